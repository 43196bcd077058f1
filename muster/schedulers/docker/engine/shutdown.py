"""Whether an engine is about to stop. It says nothing of that, but ends its containers first."""

import signal

from muster.schedulers.docker.engine.client import Engine


class EngineShutdown:
    """Remembers which containers, ours or not, were asked to end through the engine.

    Args:
        engine: which is watched.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._signalled: set[str] = set()
        """Written by the thread that reads the engine's events only."""

    def record_signal(self, container: str, signum: str | None) -> None:
        """A container was sent a signal (its number as text) through the engine."""
        if signum == str(int(signal.SIGTERM)):
            self._signalled.add(container)

    def may_have_ended(self, container: str) -> bool:
        """Whether this container may have been ended with all others: no container runs that was not asked to end."""
        return container in self._signalled and self._signalled.issuperset(self._running())

    def is_in_progress(self) -> bool:
        """Whether the engine still has containers to end, and is ending them all."""
        running = self._running()
        return bool(running) and self._signalled.issuperset(running)

    def _running(self) -> list[str]:
        return self._engine.list_container_ids({}, running_only=True)
