"""Calls the parts of the rounds, which features have: see `muster.agent.features`. It knows none by its name."""

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING

from muster.agent.features import PARTS, PartRow, Sight

if TYPE_CHECKING:
    from muster.agent.features.part import PartContext, RoundPart, Start
    from muster.agent.round import Round
    from muster.agent.workers.pool import WorkerEnd


class RoundParts:
    """The parts of one agent. An exception in a part is the part's: a line, and the job goes on without it."""

    def __init__(self, build_context: "Callable[[], PartContext]") -> None:
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
        from muster.agent.features.part import Start

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
            self._parts[name] = import_module(f"muster.agent.features.{name}.node").create_part(self._context)
        except Exception as error:  # noqa: BLE001  # whatever it is, the job goes on
            self._drop(name, error)

    def _call_all(self, call: "Callable[[RoundPart], None]") -> None:
        for name in self._parts:
            self._call(name, call)

    def _call(self, name: str, call: "Callable[[RoundPart], None]") -> None:
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
