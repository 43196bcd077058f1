"""Detects that an engine is about to stop. It does not announce this, but ends its containers first."""

import signal

from muster.schedulers.docker.engine.client import Engine


class EngineShutdown:
    """Records which containers, ours or not, got SIGTERM through the engine.

    Args:
        engine: the one that is watched.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._signalled: set[str] = set()
        """Written only by the thread that reads the engine's events."""

    def record_signal(self, container: str, signum: str | None) -> None:
        """Record that a container got a signal (its number as text) through the engine."""
        if signum == str(int(signal.SIGTERM)):
            self._signalled.add(container)

    def was_signalled(self, container: str) -> bool:
        """Return whether a container got SIGTERM through the engine: from a person, or from an engine that stops."""
        return container in self._signalled

    def forget(self, container: str) -> None:
        """Forget the signals of a container that runs again."""
        self._signalled.discard(container)

    def is_in_progress(self) -> bool:
        """Return whether containers still run and the engine is ending all of them."""
        running = self._running()
        return bool(running) and self._signalled.issuperset(running)

    def _running(self) -> list[str]:
        return self._engine.list_container_ids({}, running_only=True)
