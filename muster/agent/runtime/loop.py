"""One thread, one selector: everything that happens reaches the agent through them.

File descriptors and timers call back; a callback appends a frozen event to the queue of the loop's owner when the agent
must decide. The owner decides them in order between two turns. Byte pumps (logs, sockets) work inside their callbacks,
a bounded amount per call, so that a flood of output cannot delay a heartbeat.

What may block runs in threads of its own: log files on a network file system can hang for any time. While they do,
workers wait for their pipes, as they would for their files, but heartbeats and the fencing lease do not. The agent
starts threads in four ways, all of them here:

- `Loop.call_in_thread` makes one call that may take long; the loop gets the result.
- `SideThread` prints or sends what waits, by blocking calls: the console, a Job's Events, a TrainJob, OpenTelemetry. No
  loop could do that, because a descriptor that others share must not become non-blocking, and `http.client` blocks.
- `LoopThread` has a loop for many descriptors: log files, the output of workers, metrics, torchrun's plug-in.
- `run_limited` has its caller wait for a limited time. The caller is in a thread already, or it is the agent's end,
  when no loop turns.

Two more must stay apart. A feature sends gigabytes to workers over blocking sockets, each in a thread by
`start_thread`; no loop has a part in it. `rendezvous.torch_handlers.thread` owns an object of torch that only one
thread may use and that blocks for minutes. A program without a loop may own it.

`selectors` rather than asyncio: importing asyncio costs about 50 ms and 8 MB, half of what the agent may take before
its first worker starts.
"""

import heapq
import itertools
import os
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")

Callback = Callable[[], None]


class Clock(Protocol):
    """Monotonic seconds for decisions.

    Wall-clock seconds are for records that people read, never compared across hosts.
    """

    def now_s(self) -> float:
        """Return the seconds of a monotonic clock that does not run while the machine sleeps."""
        ...

    def boottime_s(self) -> float:
        """Return the seconds of CLOCK_BOOTTIME, which also counts while the machine sleeps.

        Leases are measured with it.
        """
        ...

    def wall_s(self) -> float:
        """Return the seconds since the epoch, for records only."""
        ...


class Suspensions(Protocol):
    """How long the job was stopped; see `muster._shared.guard.SuspendedTime`."""

    def read_s(self) -> float:
        """Return the total suspended time."""
        ...

    def read_lease_s(self) -> float:
        """Return the time during which the lease stood still."""
        ...


class SystemClock:
    """The machine's clocks."""

    def now_s(self) -> float:
        """See `Clock`."""
        return time.monotonic()

    def boottime_s(self) -> float:
        """See `Clock`."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    def wall_s(self) -> float:
        """See `Clock`."""
        return time.time()


class JobClock(SystemClock):
    """The machine's clocks, which stand still while the whole job is stopped (Ctrl-Z)."""

    def __init__(self, suspended: Suspensions) -> None:
        self._suspended = suspended

    def now_s(self) -> float:
        """See `Clock`."""
        return super().now_s() - self._suspended.read_s()

    def boottime_s(self) -> float:
        """See `Clock`. It continues while the job is stopped, because other nodes may replace this one."""
        return super().boottime_s() - self._suspended.read_lease_s()


# -- the loop ---------------------------------------------------------------------------------------------------------


def _do_nothing() -> None:
    """Stand in for the call of a timer that is over."""


class Timer:
    """A call due at a time; `cancel` is idempotent."""

    __slots__ = ("callback", "cancelled", "due_s")

    def __init__(self, due_s: float, callback: Callback) -> None:
        self.due_s = due_s
        self.callback = callback
        self.cancelled = False

    def cancel(self) -> None:
        """Cancel the call, and drop all that it holds. Calling this again, or after the call, does nothing."""
        self.cancelled, self.callback = True, _do_nothing


class Loop:
    """Watches descriptors and keeps timers. Close it to release the selector."""

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock: Clock = clock or SystemClock()
        self._selector = selectors.DefaultSelector()
        self._timers: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()
        self._soon: deque[Callback] = deque()
        self._watches: dict[int, dict[int, Callback]] = {}
        self._from_threads: deque[Callback] = deque()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self.watch_readable(self._wake_read, self._call_from_threads)

    # -- input ------------------------------------------------------------------------------------------------------

    def call_soon(self, callback: Callback) -> None:
        """Call back in the next turn, before waiting."""
        self._soon.append(callback)

    def call_from_thread(self, callback: Callback) -> None:
        """Call back soon, in order. Any thread may call this, even after `close`, when it does nothing."""
        self._from_threads.append(callback)
        try:
            os.write(self._wake_write, b"!")
        except OSError:  # full (already woken) or closed
            return

    def _call_from_threads(self) -> None:
        os.read(self._wake_read, 4096)
        while self._from_threads:
            self._from_threads.popleft()()

    def call_in_thread(
        self, read: Callable[[], T], then: Callable[[T], None], without: Callable[[RuntimeError], T] | None = None
    ) -> None:
        """Call `read`, which may take long, in its own thread; then call `then` with the result on the loop.

        Errors of `read` are raised on the loop.

        Args:
            read: the call that may take long.
            then: gets its result.
            without: gives the result if no thread is left. If it is None, `read` is called here in that case, because
                its caller could not continue without the result.
        """
        results: list[T] = []
        errors: list[BaseException] = []

        def read_and_reply() -> None:
            try:
                results.append(read())
            except BaseException as error:  # noqa: BLE001  # a thread's error would be lost
                errors.append(error)
            self.call_from_thread(finish)

        def finish() -> None:
            if errors:
                raise errors[0]
            then(results[0])

        try:
            start_thread(read_and_reply, "muster-read")
        except RuntimeError as error:
            if without is None:
                read_and_reply()
            else:
                results.append(without(error))
                self.call_from_thread(finish)

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
        """Stop watching for reading. Do nothing if it is not watched."""
        self._unwatch(fd, selectors.EVENT_READ)

    def unwatch_writable(self, fd: int) -> None:
        """Stop watching for writing. Do nothing if it is not watched."""
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
        """Wait for something (at most `limit_s`; None means without limit) and run the callbacks that are due.

        This does not wait if soon-calls are queued. The owner must have handled its events, because they do not end the
        wait.
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
                # Looked up again: an earlier callback may have unwatched it.
                if ready & kind and (callback := self._watches.get(key.fd, {}).get(kind)) is not None:
                    callback()

    def _call_timers(self) -> None:
        now_s = self.clock.now_s()
        while self._timers and self._timers[0][0] <= now_s:
            timer = heapq.heappop(self._timers)[2]
            callback = timer.callback
            timer.cancel()
            callback()

    def close(self) -> None:
        """Release the selector. Watched descriptors stay open, because their owners close them."""
        self._selector.close()
        read_fd, write_fd = self._wake_read, self._wake_write
        self._wake_read = self._wake_write = -1  # keeps threads from reused numbers
        os.close(read_fd)
        os.close(write_fd)


class Awaited(Generic[T]):
    """A value that a thread reads for one reader, which may come before or after the value is read."""

    def __init__(self, loop: Loop, read: Callable[[], T], without: Callable[[RuntimeError], T]) -> None:
        """Begin to read; the arguments are those of `Loop.call_in_thread`."""
        self._results: list[T] = []
        self._then: Callable[[T], None] | None = None
        loop.call_in_thread(read, self._finish, without)

    def watch(self, then: Callable[[T], None]) -> None:
        """Call back once with the result, on the loop, perhaps before this returns."""
        self._then = then
        for result in self._results:
            then(result)

    def _finish(self, result: T) -> None:
        self._results.append(result)
        if self._then is not None:
            self._then(result)


class LoopThread:
    """A loop in its own thread. The agent's thread submits commands, and the thread replies."""

    def __init__(self, agent_loop: Loop | None, name: str, *, on_failure: Callback) -> None:
        """Start it.

        Args:
            agent_loop: where replies run; None means in the thread, for a program that has no loop.
            name: the thread's.
            on_failure: a reply when a command has raised; after that the thread runs no others.

        Raises:
            OSError: no descriptors left.
            RuntimeError: no threads left, which is how `threading` reports EAGAIN.
        """
        self.loop = Loop(agent_loop.clock if agent_loop else None)
        """The thread's loop: only commands may use it."""
        self._agent_loop = agent_loop
        self._on_failure = on_failure
        self._stopping = False
        self._pending: threading.Event | None = None
        try:
            self._thread = start_thread(self._run, name)
        except RuntimeError:
            self.loop.close()
            raise

    def submit(self, command: Callback) -> None:
        """Run a command in the thread, soon and in order."""
        self.loop.call_from_thread(command)

    def reply(self, command: Callback) -> None:
        """Run a call on the agent's loop, soon and in order."""
        if self._agent_loop is None:
            command()
        else:
            self._agent_loop.call_from_thread(command)

    def run(self, command: Callback, limit_s: float) -> bool:
        """Run a command in the thread and wait; return False if it took longer than `limit_s` (it may still run later).

        If an earlier command has not finished, the thread hangs; then return False at once.
        """
        if self._pending is not None and not self._pending.is_set():
            return False
        done = self._pending = threading.Event()

        def run_and_set() -> None:
            command()
            done.set()

        self.submit(run_and_set)
        return done.wait(limit_s)

    def close(self, limit_s: float) -> bool:
        """Stop after the commands submitted so far. Return False if the thread hangs; then it is abandoned."""
        self.submit(self._stop)
        self._thread.join(limit_s)
        if self._thread.is_alive():
            return False
        self.loop.close()
        return True

    def _stop(self) -> None:
        self._stopping = True

    def _run(self) -> None:
        try:
            while not self._stopping:
                self.loop.turn()
        finally:
            if not self._stopping:
                self.reply(self._on_failure)


class SideThread:
    """A thread that processes what waits for it by blocking calls; it starts with the first item.

    Only the agent's end waits for it, and for a limited time.
    """

    def __init__(self, run: Callback, name: str) -> None:
        """Start nothing yet.

        Args:
            run: what the thread does. It returns soon after `is_closing`, unless one of its calls hangs.
            name: the thread's.
        """
        self.changed = threading.Condition()
        """Guards what the thread and its callers share; notified when that changes."""
        self.is_closing = False
        """Whether no more items will come."""
        self._run = run
        self._name = name
        self._thread: threading.Thread | None = None

    @property
    def is_started(self) -> bool:
        """Whether the thread has ever run."""
        return self._thread is not None

    def wake(self) -> bool:
        """Wake the thread because there is work. False: no thread is left, so try again with the next item."""
        with self.changed:
            if self._thread is None:
                try:
                    self._thread = start_thread(self._run, self._name)
                except RuntimeError:
                    return False
            self.changed.notify_all()
            return True

    def wait_closing(self, limit_s: float) -> None:
        """Wait in the thread until it has to end, for at most this time."""
        with self.changed:
            self.changed.wait_for(lambda: self.is_closing, limit_s)

    def close(self, limit_s: float) -> bool:
        """Have the thread process what waits, and end. Wait at most this time; 0 means not at all. Idempotent.

        Returns:
            Whether it has ended.
        """
        with self.changed:
            self.is_closing = True
            self.changed.notify_all()
        if self._thread is not None and limit_s > 0:
            self._thread.join(limit_s)
        return self._thread is None or not self._thread.is_alive()


def run_limited(commands: Iterable[Callback], limit_s: float) -> bool:
    """Run each call in its own thread and wait for all; return False if one took longer than `limit_s`.

    Raises:
        RuntimeError: no thread is left. Calls that have started continue.
    """
    threads = [start_thread(command, "muster-limited") for command in commands]
    until_s = time.monotonic() + limit_s
    for thread in threads:
        thread.join(max(0.0, until_s - time.monotonic()))
    return not any(thread.is_alive() for thread in threads)


def start_thread(run: Callback, name: str) -> threading.Thread:
    """Start a thread that does not keep the process alive, and return it.

    Raises:
        RuntimeError: no thread is left, which is how `threading` reports EAGAIN.
    """
    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread
