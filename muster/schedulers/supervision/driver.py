"""The interface between a supervisor and what runs replicas.

The app's spec names a factory as `package.module:function`. The supervisor calls it in its main thread, as
`factory(spec=..., event_queue=...)`, and gets the driver. A driver may use threads of its own (Docker's client blocks).
It reports what happens by `event_queue.post`, which is safe from any thread.
"""

import contextlib
import json
import os
import selectors
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from muster.schedulers.supervision.app_folder import LENT_FDS
from muster.schedulers.supervision.state import ReplicaId

Handle = Mapping[str, Any]
"""What a driver needs to find a running replica (a pid and its start time, a container's id). It is JSON, kept on disk.

`host`: the name of its machine, for people, if it is another one than the supervisor's.
"""


def take_lent_fds() -> dict[str, list[int]]:
    """Take the descriptors that the submission has lent, by name. No child inherits them. None after a later start."""
    lent: dict[str, list[int]] = json.loads(os.environ.pop(LENT_FDS, "{}"))
    for fd in (fd for fds in lent.values() for fd in fds):
        os.set_inheritable(fd, False)
    return lent


class StartError(Exception):
    """A replica could not be started. `str()` is one line. `final`: another try would be useless."""

    def __init__(self, reason: str, *, final: bool = True) -> None:
        super().__init__(reason)
        self.final = final


class EventQueue:
    """The supervisor's one queue: events of all sources, callbacks for descriptors, timers. Monotonic seconds."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self.now_s = now_s
        self._events: deque[Any] = deque()
        self._selector = selectors.DefaultSelector()
        self._timers: dict[str, tuple[float, Callable[[], None]]] = {}
        self._wake_read, self._wake_write = os.pipe()
        for fd in (self._wake_read, self._wake_write):
            os.set_blocking(fd, False)
        self._selector.register(self._wake_read, selectors.EVENT_READ, lambda: os.read(self._wake_read, 65536))

    def post(self, event: Any) -> None:
        """Queue an event for the supervisor. This is safe from any thread and from signal handlers."""
        # Atomic: a lock would deadlock in a signal handler.
        self._events.append(event)
        with contextlib.suppress(BlockingIOError):  # full of wake-ups
            os.write(self._wake_write, b"x")

    def watch_readable(self, fd: int, callback: Callable[[], None]) -> None:
        """Call back, in the main thread, whenever `fd` can be read. Main thread only."""
        self._selector.register(fd, selectors.EVENT_READ, callback)

    def unwatch(self, fd: int) -> None:
        """Stop watching. Call it before the descriptor is closed."""
        self._selector.unregister(fd)

    def set_timer(self, name: str, delay_s: float, callback: Callable[[], None]) -> None:
        """Call back once after `delay_s`. A timer of the same name is replaced."""
        self._timers[name] = (self.now_s() + delay_s, callback)

    def clear_timer(self, name: str) -> None:
        """Remove a timer if it is set."""
        self._timers.pop(name, None)

    def run_once(self) -> None:
        """Wait for a descriptor, a timer or an event and run due callbacks. Returns at once when events are queued."""
        for key, _ in self._selector.select(self._wait_s()):
            # An earlier callback may have unwatched it.
            if key.fd in self._selector.get_map():
                key.data()
        now_s = self.now_s()
        for name in [name for name, (due_s, _) in self._timers.items() if due_s <= now_s]:
            self._timers.pop(name)[1]()

    def pop(self) -> Any | None:
        """Remove and return the oldest event, or None if there is none."""
        return self._events.popleft() if self._events else None

    def close(self) -> None:
        """Release descriptors."""
        self._selector.close()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _wait_s(self) -> float | None:
        if self._events:
            return 0.0
        if not self._timers:
            return None
        return max(0.0, min(due_s for due_s, _ in self._timers.values()) - self.now_s())


class ReplicaDriver(Protocol):
    """Starts and ends replicas. It posts `ReplicaEnded` exactly once per start or adoption."""

    def start(self, replica: ReplicaId, start_number: int) -> Handle:
        """Start a replica. This may take a second, and must not wait for the replica's end.

        Args:
            replica: the one to start.
            start_number: 1 for the first start, 2 after one restart, ...

        Raises:
            StartError: it could not be started. Nothing of it is left, and no ReplicaEnded follows.
        """
        ...

    def adopt(self, replica: ReplicaId, handle: Handle) -> bool:
        """Watch a replica that an earlier supervisor started, after a restart of the supervisor.

        Returns:
            False if nothing of it is left. Then no ReplicaEnded follows. True when the driver will report its end, even
            one in the past.
        """
        ...

    def stop(self, replica: ReplicaId, *, is_interrupt: bool = False) -> None:
        """Ask a replica to end, if it runs. Returns at once. The supervisor measures the grace period.

        Args:
            replica: the one to stop.
            is_interrupt: an agent gets SIGINT, as from a terminal. Any other command gets SIGTERM also then: a shell
                heeds a SIGINT of its own only when its child has ended.
        """
        ...

    def suspend(self, *, suspended: bool) -> None:
        """Stop all replicas for a while, or continue them. A driver that cannot leaves them running."""
        ...

    def kill(self, replica: ReplicaId) -> None:
        """End a replica now, if it runs. Returns at once."""
        ...

    def close(self, *, succeeded: bool) -> None:
        """Flush logs and remove what the driver created for the app, such as networks, after all replicas have ended.

        May take a few seconds. Raises nothing for objects that are gone already. `succeeded`: the app has.
        """
        ...


DriverFactory = Callable[..., ReplicaDriver]
"""What `AppSpec.driver` names: `factory(*, spec: AppSpec, event_queue: EventQueue) -> ReplicaDriver`."""
