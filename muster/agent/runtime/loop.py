"""One thread, one selector: everything that happens reaches the agent through them.

File descriptors and timers call back; a callback appends a frozen event to the queue of the loop's owner when the agent
must decide. The owner decides them in order between two turns. Byte pumps (logs, sockets) work inside their callbacks,
a bounded amount per call, so that a flood of output cannot delay a heartbeat.

`selectors` rather than asyncio: importing asyncio costs about 50 ms and 8 MB, half of what the agent may take before
its first worker starts.
"""

import heapq
import itertools
import selectors
from collections import deque
from collections.abc import Callable

from muster.agent.runtime.clock import Clock, SystemClock

Callback = Callable[[], None]


class Timer:
    """A call due at a time; `cancel` is idempotent."""

    __slots__ = ("callback", "cancelled", "due_s")

    def __init__(self, due_s: float, callback: Callback) -> None:
        self.due_s = due_s
        self.callback = callback
        self.cancelled = False

    def cancel(self) -> None:
        """Do not call back. Calling it again, or after the call, does nothing."""
        self.cancelled = True


class Loop:
    """Watches descriptors, keeps timers. Close it to release the selector."""

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock: Clock = clock or SystemClock()
        self._selector = selectors.DefaultSelector()
        self._timers: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()
        self._soon: deque[Callback] = deque()
        self._watches: dict[int, dict[int, Callback]] = {}

    # -- input ------------------------------------------------------------------------------------------------------

    def call_soon(self, callback: Callback) -> None:
        """Call back in the next turn, before waiting."""
        self._soon.append(callback)

    def call_at(self, due_s: float, callback: Callback) -> Timer:
        """Call back at `due_s` of the loop's monotonic clock."""
        timer = Timer(due_s, callback)
        heapq.heappush(self._timers, (due_s, next(self._order), timer))
        return timer

    def call_later(self, delay_s: float, callback: Callback) -> Timer:
        """Call back after `delay_s` seconds."""
        return self.call_at(self.clock.now_s() + delay_s, callback)

    def watch_readable(self, fd: int, callback: Callback) -> None:
        """Call back whenever `fd` is readable (level-triggered) until `unwatch_readable`."""
        self._watch(fd, selectors.EVENT_READ, callback)

    def watch_writable(self, fd: int, callback: Callback) -> None:
        """Call back whenever `fd` is writable (level-triggered) until `unwatch_writable`."""
        self._watch(fd, selectors.EVENT_WRITE, callback)

    def unwatch_readable(self, fd: int) -> None:
        """Stop watching for reading. Nothing happens if it is not watched."""
        self._unwatch(fd, selectors.EVENT_READ)

    def unwatch_writable(self, fd: int) -> None:
        """Stop watching for writing. Nothing happens if it is not watched."""
        self._unwatch(fd, selectors.EVENT_WRITE)

    def unwatch(self, fd: int) -> None:
        """Stop watching `fd` altogether. Do this before closing it."""
        self.unwatch_readable(fd)
        self.unwatch_writable(fd)

    def _watch(self, fd: int, kind: int, callback: Callback) -> None:
        callbacks = self._watches.get(fd)
        if callbacks is None:
            self._watches[fd] = {kind: callback}
            self._selector.register(fd, kind)
            return
        callbacks[kind] = callback
        self._selector.modify(fd, sum(callbacks))

    def _unwatch(self, fd: int, kind: int) -> None:
        callbacks = self._watches.get(fd)
        if callbacks is None or kind not in callbacks:
            return
        del callbacks[kind]
        if callbacks:
            self._selector.modify(fd, sum(callbacks))
        else:
            del self._watches[fd]
            self._selector.unregister(fd)

    # -- one turn ---------------------------------------------------------------------------------------------------

    def turn(self, limit_s: float | None = None) -> None:
        """Wait for something (at most `limit_s`; None: without limit) and run the callbacks that are due.

        Does not wait when soon-calls are queued. The owner must have handled its events: they do not end the wait.
        """
        self._call_ready(self._wait_s(limit_s))
        self._call_timers()
        for _ in range(len(self._soon)):
            self._soon.popleft()()

    def _wait_s(self, limit_s: float | None) -> float | None:
        if self._soon:
            return 0.0
        while self._timers and self._timers[0][2].cancelled:
            heapq.heappop(self._timers)
        if not self._timers:
            return limit_s
        until_timer_s = max(0.0, self._timers[0][0] - self.clock.now_s())
        return until_timer_s if limit_s is None else min(limit_s, until_timer_s)

    def _call_ready(self, wait_s: float | None) -> None:
        for key, ready in self._selector.select(wait_s):
            for kind in (selectors.EVENT_READ, selectors.EVENT_WRITE):
                # Looked up again each time: an earlier callback of this turn may have unwatched the descriptor.
                callback = self._watches.get(key.fd, {}).get(kind) if ready & kind else None
                if callback is not None:
                    callback()

    def _call_timers(self) -> None:
        now_s = self.clock.now_s()
        while self._timers and self._timers[0][0] <= now_s:
            timer = heapq.heappop(self._timers)[2]
            if not timer.cancelled:
                timer.cancelled = True
                timer.callback()

    def close(self) -> None:
        """Release the selector. Watched descriptors stay open: their owners close them."""
        self._selector.close()
