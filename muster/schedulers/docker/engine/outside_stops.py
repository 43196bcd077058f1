"""Records what others than the supervisor do to containers: a person stops or restarts one, the engine ends all."""

import signal
import threading
import time
from typing import Final

from muster.schedulers.docker.engine.client import Engine

_LOOK_S: Final = 0.2
RESTART_S: Final = 5.0
"""How long after `docker restart` has stopped a container it starts it at the latest. It takes about 0.4 s."""

STOP_S: Final = 1.0
"""How long after a container's end the engine tells at the latest that it has stopped it. A busy one takes 0.1 s."""


class OutsideStops:
    """What the engine's events say of `docker stop` and `docker restart`: both stop a container, one starts it again.

    The supervisor only sends signals, so "stop" never comes from it. It starts no container a second time. An engine
    that is about to stop does not announce it, but sends SIGTERM to all containers first.

    Args:
        engine: the one whose events are recorded.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._signalled: set[str] = set()
        """Containers, of the app or not, that got SIGTERM through the engine."""
        self._lock = threading.Lock()
        self._ended: set[str] = set()
        self._stopped_s: dict[str, float] = {}
        """Container -> when it was stopped, on the monotonic clock. Those that were started again are left out."""
        self._is_app_signalled = False

    def record_signal(self, container: str, signum: str | None, *, is_ours: bool) -> None:
        """Record that a container got a signal through the engine.

        Args:
            container: of the app or not.
            signum: the signal's number, as text.
            is_ours: whether others have sent it to a container of the app.
        """
        if signum == str(int(signal.SIGTERM)):
            self._signalled.add(container)
            self._is_app_signalled |= is_ours

    def was_signalled(self, container: str) -> bool:
        """Return whether a container got SIGTERM through the engine: from a person, or from an engine that stops."""
        return container in self._signalled

    def is_engine_stopping(self) -> bool:
        """Return whether containers still run and the engine is ending all of them."""
        running = self._engine.list_container_ids({}, running_only=True)
        return bool(running) and self._signalled.issuperset(running)

    def wait_over(self) -> None:
        """Wait until no container may be about to start again."""
        if self._is_app_signalled:
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
                self._signalled.discard(container)
                self._stopped_s.pop(container, None)
                return True
        return False

    def may_restart(self, container: str) -> bool:
        """Return whether a container was stopped a moment ago, so that it may be about to start again."""
        with self._lock:
            return time.monotonic() < self._stopped_s.get(container, -RESTART_S) + RESTART_S
