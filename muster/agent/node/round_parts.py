"""What a part of a round gets, what it may do, and who calls it: see `muster.agent.features`.

Nothing here knows a part by its name.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from muster._shared.records import record
from muster.agent.features import PARTS, PartRow, Sight

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


class RoundParts:
    """The parts of one agent. An exception in a part is the part's: a line, and the job goes on without it."""

    def __init__(self, build_context: Callable[[], PartContext]) -> None:
        """Load nothing; `build_context` builds what parts get."""
        self._build_context = build_context
        self._context: PartContext | None = None
        self._parts: dict[str, RoundPart | None] = {}
        """Loaded parts by name, in the order of the table; None for one that has failed."""
        self._starts: dict[str, Start] = {}

    def begin_round(self, sight: Sight, on_ready: Callable[[], None], has_stopped: Callable[[], bool]) -> None:
        """Begin a round, and call back as soon as no part holds its workers back, perhaps before this returns."""
        self._starts = {}
        for row in PARTS:
            if self._parts.get(row.name) is not None or (row.name not in self._parts and row.starts(sight)):
                self._begin(row, sight.formed, on_ready, has_stopped)
        if not any(start.is_held for start in self._starts.values()):
            on_ready()

    def _begin(
        self, row: PartRow, formed: "Round", on_ready: Callable[[], None], has_stopped: Callable[[], bool]
    ) -> None:
        self._load(row.name)

        def go_on() -> None:
            if self._starts is starts and not any(each.is_held for each in starts.values()):
                on_ready()

        starts = self._starts
        start = starts[row.name] = Start(go_on, has_stopped)
        self._call(row.name, lambda part: part.begin_round(formed, start))

    def look(self, sight: Sight) -> None:
        """Load the parts that a worker wants, and have all look at the page."""
        for row in PARTS:
            if row.name not in self._parts and row.wakes(sight):
                self._load(row.name)
                self._call(row.name, lambda part: part.begin_round(sight.formed, None))
        self._call_all(lambda part: part.look())

    def build_env(self, formed: "Round", local_rank: int) -> dict[str, str]:
        """Build the parts' variables of a worker."""
        env: dict[str, str] = {}
        self._call_all(lambda part: env.update(part.build_env(formed, local_rank)))
        return env

    def end_worker(self, end: "WorkerEnd") -> None:
        """Tell the parts that a worker of the round has ended."""
        self._call_all(lambda part: part.end_worker(end))

    def end_round(self) -> None:
        """End the round, while its page is still open."""
        self._starts = {}
        self._call_all(lambda part: part.end_round())

    @property
    def foreground(self) -> int | None:
        """The local rank that Ctrl-C is for; None: it is for all."""
        ranks = (part.foreground for part in self._parts.values() if part is not None)
        return next((rank for rank in ranks if rank is not None), None)

    def close(self) -> None:
        """Close the parts."""
        self._call_all(lambda part: part.close())

    def _load(self, name: str) -> None:
        if name in self._parts:
            return
        try:
            self._context = self._context or self._build_context()
            self._parts[name] = __import__(f"muster.agent.features.{name}.node", fromlist=("node",)).create_part(
                self._context
            )
        except Exception as error:  # noqa: BLE001  # whatever it is, the job goes on
            self._drop(name, error)

    def _call_all(self, call: Callable[[RoundPart], None]) -> None:
        for name in self._parts:
            self._call(name, call)

    def _call(self, name: str, call: Callable[[RoundPart], None]) -> None:
        part = self._parts.get(name)
        if part is None:
            return
        try:
            call(part)
        except Exception as error:  # noqa: BLE001
            self._drop(name, error)
            start = self._starts.get(name)
            if start is not None:
                start.release()

    def _drop(self, name: str, error: Exception) -> None:
        self._parts[name] = None
        if self._context is not None:
            reason = f"{type(error).__name__}: {error}"
            self._context.logs.print_line(f"the feature {name} has failed ({reason}); the job goes on without it")
