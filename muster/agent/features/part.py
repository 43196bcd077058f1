"""What a part of a round gets, and what it may do: see `muster.agent.features`."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from muster._shared.records import record

if TYPE_CHECKING:
    from muster._shared.guard import GuardLease
    from muster.agent.config import AgentConfig
    from muster.agent.logs import LogRouter
    from muster.agent.round import Round
    from muster.agent.runtime.loop import Loop
    from muster.agent.workers.pool import WorkerEnd
    from muster.agent.workers.status_page import StatusPage


@record
class PartContext:
    """All that a part may use."""

    config: "AgentConfig"
    loop: "Loop"
    logs: "LogRouter"
    lease: "GuardLease"
    get_page: "Callable[[], StatusPage | None]"
    """Returns the round's page; None if there is none."""
    quit_job: Callable[[], None]
    """Ends the job as Ctrl-C does."""


class Start:
    """The start of a round's workers, for one part, which may hold it back."""

    def __init__(self, on_release: Callable[[], None], has_stopped: Callable[[], bool]) -> None:
        self._on_release = on_release
        self._has_stopped = has_stopped
        self.is_held = False
        """Whether the workers wait for this part."""

    def hold(self) -> Callable[[], None]:
        """Hold the workers back until the returned function is called. All parts hold at the same time."""
        self.is_held = True
        return self.release

    def release(self) -> None:
        """End the hold. May be called again."""
        if self.is_held:
            self.is_held = False
            self._on_release()

    @property
    def has_stopped(self) -> bool:
        """Whether the start was cancelled."""
        return self._has_stopped()


class RoundPart:
    """The half of a feature on one node: one object per agent, on the loop's thread. What it needs, it overrides."""

    foreground: int | None = None
    """The local rank that Ctrl-C is for, and for which all others wait."""

    def begin_round(self, formed: "Round", start: Start | None) -> None:
        """Begin a round. No worker runs, unless `start` is None: then the part was loaded during the round."""

    def build_env(self, formed: "Round", local_rank: int) -> Mapping[str, str]:
        """Build variables of a worker that is about to start."""
        del formed, local_rank
        return {}

    def look(self) -> None:
        """Look at the page; called once a second while a round has one, ten times a second in a drain."""

    def end_worker(self, end: "WorkerEnd") -> None:
        """Note the end of a worker of the round."""

    def end_round(self) -> None:
        """End the round. Its page is still open."""

    def close(self) -> None:
        """Release everything, at the agent's end. The last round has ended."""
