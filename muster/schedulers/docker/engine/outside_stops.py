"""Records which containers of an app are stopped, and perhaps started again at once, by others than its supervisor."""

import threading
import time
from typing import Final

_LOOK_S: Final = 0.2
RESTART_S: Final = 5.0
"""How long after `docker restart` has stopped a container it starts it at the latest. It takes about 0.4 s."""

STOP_S: Final = 1.0
"""How long after a container's end the engine tells at the latest that it has stopped it. A busy one takes 0.1 s."""


class OutsideStops:
    """What the engine's events say of `docker stop` and `docker restart`: both stop a container, one starts it again.

    The supervisor only sends signals, so "stop" never comes from it. It starts no container a second time.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ended: set[str] = set()
        self._stopped_s: dict[str, float] = {}
        """Container -> when it was stopped, on the monotonic clock. Those that were started again are left out."""
        self._is_signalled = False

    def record_signal(self) -> None:
        """Record that others have sent SIGTERM to a container, as a stop begins."""
        self._is_signalled = True

    def wait_over(self) -> None:
        """Wait until no container may be about to start again."""
        if self._is_signalled:
            time.sleep(STOP_S)  # of what has ended just now it is told later that it was stopped
        while any(map(self.may_restart, tuple(self._stopped_s))):
            time.sleep(_LOOK_S)

    def record(self, action: str, container: str) -> bool:
        """Record an event of one of the app's containers. Return whether it was started again."""
        with self._lock:
            if action == "die":
                self._ended.add(container)
            elif action == "stop":
                self._stopped_s[container] = time.monotonic()
            elif action == "start" and container in self._ended:
                self._ended.discard(container)
                self._stopped_s.pop(container, None)
                return True
        return False

    def may_restart(self, container: str) -> bool:
        """Return whether a container was stopped a moment ago, so that it may be about to start again."""
        with self._lock:
            return time.monotonic() < self._stopped_s.get(container, -RESTART_S) + RESTART_S
