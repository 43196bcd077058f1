"""What a part of a round gets, what it may do, and who calls it: see `muster.agent.features`.

Nothing here knows a part by its name.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeAlias

from muster._shared.records import record
from muster.agent.features import PARTS, RowContext, load_half
from muster.agent.rendezvous.interface import PartOrder, PartRemembered
from muster.agent.round import PartOffer

if TYPE_CHECKING:
    from muster._shared.guard import GuardLease
    from muster._shared.reports import FailedCheck, RankProgress, RankView
    from muster.agent.config import AgentConfig
    from muster.agent.errors import SpawnError
    from muster.agent.logs import LogRouter, WorkerStreams
    from muster.agent.node.events import Event
    from muster.agent.rendezvous.interface import Stream
    from muster.agent.round import PartMemory, Round
    from muster.agent.runtime.event_log import EventLog
    from muster.agent.runtime.loop import Loop
    from muster.agent.runtime.signals import ChildWatch
    from muster.agent.telemetry import Observed, Pause
    from muster.agent.workers.pool import LiveWorker, WorkerEnd
    from muster.agent.workers.spec import WorkerSpec
    from muster.agent.workers.status_page import StatusPage


class WatchedWorkers(Protocol):
    """The workers of a round, as parts see them."""

    page: "StatusPage | None"
    formed: "Round | None"
    """The round of the page."""
    pause: "Pause | None"
    """The pause, if the workers were told to wait."""
    streams: "dict[int, WorkerStreams]"
    """The workers' streams, by local rank."""

    @property
    def live(self) -> "list[LiveWorker]":
        """Workers that have not been reaped."""
        ...

    @property
    def foreground(self) -> int | None:
        """The local rank for which all others wait; None: there is none."""
        ...


ReadViews = Callable[["dict[int, RankView]"], None]
ReadProgress = Callable[["dict[int, tuple[RankView, RankProgress]]"], None]
"""They get what was read of live workers, by local rank."""


@record
class PartContext:
    """All that a part may use."""

    config: "AgentConfig"
    loop: "Loop"
    logs: "LogRouter"
    lease: "GuardLease"
    get_page: "Callable[[], StatusPage | None]"
    """Returns the round's page; None if there is none."""
    workers: WatchedWorkers
    post: "Callable[[Event], None]"
    """Posts an event of the node."""
    quit_job: Callable[[str], None]
    """Ends the job as Ctrl-C does, with the reason in a clause."""
    fail: "Callable[[int, str, FailedCheck], None]"
    """Ends the attempt of the round of a number, with the reason and what has found it."""
    event_log: "EventLog"
    children: "ChildWatch"
    early: object
    """What `begin_early` of the feature has returned; None if its row does not begin early."""
    send: Callable[[int, str], None]
    """Sends the half at the leader a report about the round of a number: JSON of a record of the feature."""
    start_process: "Callable[[WorkerSpec, Callable[[int], None], Callable[[SpawnError], None]], None]"
    """Starts a process that is no worker yet, and calls back with it."""
    keep_process: "Callable[[int, Callable[[], None]], None]"
    """Has the end of a round spare a process of a number, and all of its session; called back if the process ends."""
    open_stream: "Callable[[tuple[str, int], Callable[[Stream], None], Callable[[str], None]], None]"
    """Connects to the same part of another node: see `Rendezvous.open_stream`."""


OnFailed: TypeAlias = "Callable[[str, FailedCheck | None], None]"


class Start:
    """The start of a round's workers, for one part, which may hold it back."""

    def __init__(self, on_release: Callable[[], None], on_failed: OnFailed, has_stopped: Callable[[], bool]) -> None:
        self._on_release = on_release
        self._on_failed = on_failed
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

    def fail(self, reason: str, check: "FailedCheck | None" = None) -> None:
        """End the start: this node's workers cannot be started, as this check has found if there is one."""
        self._on_failed(reason, check)

    @property
    def has_stopped(self) -> bool:
        """Whether the start was cancelled."""
        return self._has_stopped()


class RoundPart:
    """The half of a feature on one node: one object per agent, on the loop's thread. What it needs, it overrides."""

    foreground: int | None = None
    """The local rank that Ctrl-C is for, and for which all others wait."""

    is_idle: bool = False
    """Whether no worker has been active for the time that the feature allows."""
    still_s: float = 0.0
    """How long all workers have stood still; 0 if one has not, or if that is unknown."""

    def enter_round(self, formed: "Round") -> None:
        """Note that a round has formed. Its start may still be delayed, and workers of the last one may run."""

    def begin_round(self, formed: "Round", start: Start | None) -> None:
        """Begin a round. No worker runs, unless `start` is None: then a worker of the round wants the part."""

    def build_env(self, formed: "Round", local_rank: int) -> Mapping[str, str]:
        """Build variables of a worker that is about to start."""
        del formed, local_rank
        return {}

    def leave_round(self, local_ranks: frozenset[int]) -> None:
        """Ask these workers to leave the round, and post `WorkerLeft` for each: the part has said that they can."""

    def start_kept(self, formed: "Round", spec: "WorkerSpec") -> int | None:
        """Start a worker in a process that the part keeps, and return the process; None if it has none for it."""
        del formed, spec
        return None

    def look(self) -> None:
        """Look at the page; called once a second while a round has one, ten times a second in a drain."""

    def add_to(self, observed: "Observed") -> "Observed":
        """Add what the feature knows to what the status shows. Called about once a second."""
        return observed

    def read_views(self, formed: "Round", host: str, then: ReadViews) -> None:
        """Read what live workers wait in, and call back. Only the part whose row says so is asked."""
        del formed, host
        then({})

    def read_progress(self, formed: "Round", host: str, then: ReadProgress) -> None:
        """Look twice at live workers, and call back with what was seen last and what has moved. See `read_views`."""
        del formed, host
        then({})

    def end_pause(self) -> None:
        """Note that workers go on that were told to wait."""

    def end_worker(self, end: "WorkerEnd") -> None:
        """Note the end of a worker of the round."""

    def end_round(self) -> None:
        """End the round. Its page is still open."""

    def build_offer(self) -> str | None:
        """Build what this node has for the next round, for the half at the leader. No worker runs."""

    def obey(self, round_number: int, content: str) -> None:
        """Do what the half at the leader says, about the round of a number."""

    def remember(self, round_number: int, memory: "PartMemory") -> None:
        """Note what the job remembers from now on, in the round of a number."""

    def take_stream(self, stream: "Stream") -> None:
        """Take a connection that the same part of another node has opened, and close it in the end."""
        stream.close()

    def close(self) -> None:
        """Release everything, at the agent's end. The last round has ended."""


class RoundParts:
    """The parts of one agent. An exception in a part is the part's: a line, and the job goes on without it."""

    def __init__(self, build_context: Callable[[str], PartContext], print_line: Callable[[str], None]) -> None:
        """Load nothing; `build_context` builds what the part of a name gets."""
        self._build_context = build_context
        self._print_line = print_line
        self._parts: dict[str, RoundPart | None] = {}
        """Loaded parts by name, in the order of the table; None for one that has failed."""
        self._starts: dict[str, Start] = {}

    def load_early(self, names: Iterable[str]) -> None:
        """Load the parts that have begun before there was a round."""
        for name in names:
            self._load(name)

    def enter_round(self, formed: "Round") -> None:
        """Tell the parts that a round has formed."""
        self._call_all(lambda part: part.enter_round(formed))

    def begin_round(
        self,
        context: RowContext,
        on_ready: Callable[[], None],
        on_failed: OnFailed,
        has_stopped: Callable[[], bool],
    ) -> None:
        """Begin a round, and call back as soon as no part holds its workers back, perhaps before this returns."""
        starts: dict[str, Start] = {}
        self._starts = starts

        def go_on() -> None:
            if self._starts is starts and not any(each.is_held for each in starts.values()):
                self._starts = {}
                on_ready()

        def fail(reason: str, check: "FailedCheck | None") -> None:
            if self._starts is starts:
                self._starts = {}
                on_failed(reason, check)

        starts[""] = own = Start(go_on, fail, has_stopped)
        own.hold()  # until all parts have begun
        for row in PARTS:
            if self._parts.get(row.name) is not None or (row.name not in self._parts and row.starts(context)):
                self._load(row.name)
                start = starts[row.name] = Start(go_on, fail, has_stopped)
                self._call(row.name, partial(_begin, context.formed, start))
        own.release()

    def look(self, context: RowContext) -> None:
        """Load the parts that a worker wants, and have all look at the page."""
        for row in PARTS:
            if row.wakes(context):
                self._load(row.name)
                self._call(row.name, lambda part: part.begin_round(context.formed, None))
        self._call_all(lambda part: part.look())

    def build_env(self, formed: "Round", local_rank: int) -> dict[str, str]:
        """Build the parts' variables of a worker."""
        env: dict[str, str] = {}
        self._call_all(lambda part: env.update(part.build_env(formed, local_rank)))
        return env

    def leave_round(self, local_ranks: frozenset[int]) -> None:
        """Ask these workers to leave the round."""
        self._call_all(lambda part: part.leave_round(local_ranks))

    def start_kept(self, formed: "Round", spec: "WorkerSpec") -> int | None:
        """Start a worker in a process that a part keeps, and return the process; None if no part has one for it."""
        found: list[int] = []
        for name in self._parts:
            if not found:
                self._call(name, partial(_start_kept, found, formed, spec))
        return found[0] if found else None

    def add_to(self, observed: "Observed") -> "Observed":
        """Add what the parts know to what the status shows."""
        for name in self._parts:
            found = [observed]
            self._call(name, partial(_add_to, found))
            observed = found[-1]
        return observed

    def read_views(self, formed: "Round", host: str, then: ReadViews) -> None:
        """Read what live workers wait in, and call back; without a part that reads it, at once."""
        part = self._load_reader()
        if part is None:
            then({})
        else:
            self._call(part, lambda each: each.read_views(formed, host, then))

    def read_progress(self, formed: "Round", host: str, then: ReadProgress) -> None:
        """Look twice at live workers, and call back; without a part that does so, at once."""
        part = self._load_reader()
        if part is None:
            then({})
        else:
            self._call(part, lambda each: each.read_progress(formed, host, then))

    def _load_reader(self) -> str | None:
        """Return the name of the loaded part that reads what workers wait in; None: there is none."""
        name = next((row.name for row in PARTS if row.reads_views), None)
        if name is not None:
            self._load(name)
        return name if name is not None and self._parts[name] is not None else None

    def end_pause(self) -> None:
        """Tell the parts that workers go on that were told to wait."""
        self._call_all(lambda part: part.end_pause())

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

    @property
    def is_idle(self) -> bool:
        """See `RoundPart`."""
        return any(part.is_idle for part in self._parts.values() if part is not None)

    @property
    def still_s(self) -> float:
        """See `RoundPart`."""
        return max((part.still_s for part in self._parts.values() if part is not None), default=0.0)

    def list_offers(self) -> tuple[PartOffer, ...]:
        """Return what the parts have for the next round."""
        offers: list[PartOffer] = []
        for name in self._parts:
            self._call(name, partial(_offer, offers, name))
        return tuple(offers)

    def tell(self, message: PartOrder | PartRemembered) -> None:
        """Tell a part what its half at the leader says, or what the job remembers."""
        number = message.round_number
        if isinstance(message, PartOrder):
            self._call(message.feature, lambda part: part.obey(number, message.content))
        else:
            self._call(message.memory.feature, lambda part: part.remember(number, message.memory))

    def take_stream(self, feature: str, stream: "Stream") -> None:
        """Pass a connection of another node to its part."""
        if any(row.name == feature for row in PARTS):
            self._load(feature)
        if self._parts.get(feature) is None:
            stream.close()
        self._call(feature, lambda part: part.take_stream(stream))

    def close(self) -> None:
        """Close the parts."""
        self._call_all(lambda part: part.close())

    def _load(self, name: str) -> None:
        if name in self._parts:
            return
        try:
            self._parts[name] = load_half(name, "node").create_part(self._build_context(name))
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
        reason = f"{type(error).__name__}: {error}"
        self._print_line(f"the feature {name} has failed ({reason}); the job goes on without it")


def _begin(formed: "Round", start: Start, part: RoundPart) -> None:
    part.begin_round(formed, start)


def _start_kept(found: list[int], formed: "Round", spec: "WorkerSpec", part: RoundPart) -> None:
    pid = part.start_kept(formed, spec)
    if pid is not None:
        found.append(pid)


def _offer(offers: list[PartOffer], name: str, part: RoundPart) -> None:
    content = part.build_offer()
    if content is not None:
        offers.append(PartOffer(feature=name, content=content))


def _add_to(found: "list[Observed]", part: RoundPart) -> None:
    found.append(part.add_to(found[-1]))
