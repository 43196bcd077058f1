"""What happened to a job, from the records of its agents: nodes, failures, recoveries, steps, where time went. Pure.

The job as a whole is followed as its leader followed it. For each round, the records of one agent are replayed into a
`JobHistory`: those of the agent that wrote how far the job was, or else those of group rank 0. What it could not write,
because it was killed, is taken from the agent that speaks for the next round.
"""

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from muster._shared.goodput import HANG_ENDS, HANGS
from muster._shared.job_history import JobHistory
from muster._shared.job_view import Goodput, Recovery
from muster._shared.layouts import StatusPageLayout as Layout
from muster.cli.history.clocks import TimedEvent
from muster.cli.history.sources import Event, JobRecords, is_number

PHASES: Final = (
    *("join", "launch", "first step", "training", "hang", "pause", "checkpoint", "stop", "round", "waiting", "lost"),
)
"""What a node does. Bars name them by their index. What is also a part of the lost time has its name."""
JOINING, STARTING, FIRST_STEP, TRAINING, HUNG, PAUSED, SAVING, STOPPING, BETWEEN, WAITING, LOST = range(11)
_MOST_RECOVERIES: Final = 5000
WAITING_STATES: Final = ("UNSUBMITTED", "SUBMITTED", "PENDING")
"""TorchX's states of an app that waits to run."""


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A phase of a node."""

    start_s: float
    end_s: float
    phase: int
    round: int


@dataclass(frozen=True, kw_only=True)
class Mark:
    """Something that happened at one moment."""

    at_s: float
    kind: str
    """"failure", "hang", "node", "join", "drain", "end", "signal" or "checkpoint"."""
    text: str
    node: int | None = None
    """Index of its node. None: of the job."""
    report: str = ""
    """The traceback of a rank that failed."""
    since_s: float | None = None
    """When it began: of a hang, the last step before."""


@dataclass(kw_only=True)
class NodeStory:
    """One node of the job, through all of its agents."""

    index: int
    host: str = ""
    bars: list[Bar] = field(default_factory=list)
    exits: list[tuple[float, int, int, int]] = field(default_factory=list)
    """Time, global rank, code and round of workers that ended by themselves with another code than 0."""
    ranks: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """By the number of the bar's round: its global ranks."""


@dataclass(frozen=True, kw_only=True)
class Story:
    """What happened to one job. All times are seconds since the epoch by the leader's clock."""

    records: JobRecords
    start_s: float
    end_s: float
    runs: bool
    """No record says that it has ended."""
    succeeded: bool
    ending: str
    """Why it failed, or was stopped."""
    incarnations: int
    nodes: tuple[NodeStory, ...]
    rounds: tuple[tuple[float, int, int, int, int], ...]
    """Time, number, attempt, nodes and ranks."""
    marks: tuple[Mark, ...]
    recoveries: tuple[Recovery, ...]
    """`time_s` by the leader's clock."""
    steps: tuple[tuple[float, int], ...]
    """Time, and how many steps were done by then."""
    steps_done: tuple[int, int]
    """In the last round, and at most in any."""
    total: int | None
    values: Mapping[str, tuple[tuple[float, float], ...]]
    """By name, such as the loss: time and value."""
    buckets: Mapping[str, float]
    """Seconds by what they went into. They sum up to the wall clock."""
    goodput: Goodput | None
    """None: not known, because no step was done, or records of steps are missing: all time is then "unknown"."""
    time_to_start_s: float | None
    failures: Mapping[str, int]
    replaced: tuple[tuple[int, int], ...] = ()
    """Of each round in which processes went on from the last one: how many others are new, and how many all are."""
    stops: tuple[str, ...] = ()
    """The signals that ended its incarnations, oldest first, of those that a signal has ended."""
    was_stopped: bool = False
    """Its last incarnation was ended by a signal, or by agreement."""

    @property
    def goes_on(self) -> bool:
        """Whether its scheduler says that it is not over, although the records of its last incarnation have an end."""
        if self.runs or self.succeeded:
            return self.runs
        state = self.records.scheduler_state
        return state in WAITING_STATES or (state == "RUNNING" and self.was_stopped)


def tell(records: JobRecords, placed: Sequence[TimedEvent]) -> Story:
    """Tell it.

    Args:
        records: of the job.
        placed: the same by `clocks.place`, at least one.
    """
    replayed = _replay(placed)
    job = _Job(replayed)
    start_s, end_s = placed[0].at_s, max(each.at_s for each in placed)
    last = max(each.incarnation for each in placed)
    ended = [each for each in placed if each.event.what == "job_ended" and each.incarnation == last]
    agents_ended = {each.event.agent for each in placed if each.event.what == "agent_ended"}
    own = [each.event for each in placed if each.incarnation == last]
    number = max(each.round for each in own)
    lost = find_lost(placed)
    agents = {each.agent for each in own if each.round == number} - lost  # others wait
    runs = not ended and not agents <= agents_ended
    detail = ended[0].event.detail if ended else {}
    nodes = _tell_nodes(placed, job, end_s, runs=runs)
    lacks_steps = _lacks_steps(placed)
    stops = {incarnation: name for incarnation, name in _list_stops(placed) if incarnation < last or not runs}
    return Story(
        records=records,
        start_s=start_s,
        end_s=end_s,
        runs=runs,
        succeeded=detail.get("succeeded") is True and not detail.get("drained"),
        ending="" if runs else _find_ending(own, number, detail, has_lost=bool(lost)),
        incarnations=last + 1,
        nodes=tuple(nodes),
        rounds=tuple(job.rounds),
        marks=tuple(_list_marks(placed, replayed, job, records.tracebacks)),
        recoveries=job.history.recoveries,
        steps=tuple(job.steps),
        steps_done=job.steps_done,
        total=job.history.total,
        values={name: tuple(points) for name, points in job.values.items()},
        buckets={"unknown": end_s - start_s} if lacks_steps else dict(job.history.read_buckets(end_s)),
        goodput=None if lacks_steps else job.history.build_goodput(end_s),
        time_to_start_s=None if lacks_steps else job.history.time_to_start_s,
        failures=dict(job.history.failures),
        replaced=tuple(_list_replaced(placed)),
        stops=tuple(stops.values()),
        was_stopped=last in stops or detail.get("drained") is True,
    )


def _lacks_steps(placed: Sequence[TimedEvent]) -> bool:
    """Return whether a round has workers, no records of steps, and not the records of all nodes."""
    rounds: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for each in placed:
        rounds[each.incarnation, each.event.round].append(each.event)
    for records in rounds.values():
        kinds = {each.what for each in records}
        nodes = max(
            (_read_count(each.detail.get("nodes")) for each in records if each.what == "round_formed"), default=0
        )
        seen = {each.node for each in records if each.node is not None}
        if len(seen) < nodes and "workers_started" in kinds and "steps_done" not in kinds:
            return True
    return False


def find_lost(placed: Sequence[TimedEvent]) -> set[str]:
    """Find the agents of the last round that have written nothing since others saw a loss that broke it."""
    last = max(each.incarnation for each in placed)
    own = [each for each in placed if each.incarnation == last]
    number = max(each.event.round for each in own)
    own = [each for each in own if each.event.round == number]
    broken_s = min((each.at_s for each in own if _is_loss(each.event)), default=None)
    if broken_s is None:
        return set()
    return {each.event.agent for each in own} - {each.event.agent for each in own if each.at_s >= broken_s}


def _is_loss(event: Event) -> bool:
    detail = event.detail
    return event.what == "round_broken" and detail.get("kind") == "membership" and detail.get("joined") is not True


def _list_stops(placed: Sequence[TimedEvent]) -> Iterator[tuple[int, str]]:
    """Find the signals that agents got in the last round of each incarnation, if no failure and no person ended it."""
    for incarnation in sorted({each.incarnation for each in placed}):
        own = [each.event for each in placed if each.incarnation == incarnation]
        number = max(each.round for each in own)
        ended = next((each.detail for each in own if each.what == "job_ended"), {"drained": True})
        is_asked = any(_is_stop(each) for each in own if each.round == number)
        signals = _list_signals(own, number)
        if ended.get("drained") is True and signals and not is_asked:
            yield incarnation, " and ".join(signals)


def _list_replaced(placed: Sequence[TimedEvent]) -> Iterator[tuple[int, int]]:
    """Find them, see `Story.replaced`. Each node tells of its own workers."""
    rounds: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for each in placed:
        if each.event.what == "workers_started":
            rounds[each.incarnation, each.event.round].append(each.event)
    for records in rounds.values():
        kept = [each.detail.get("kept") for each in records]
        stayed = sum(each for each in kept if isinstance(each, int))
        if stayed > 0:
            count = sum(len(each.ranks) for each in records)
            yield max(0, count - stayed), count


def _list_signals(events: Sequence[Event], number: int) -> list[str]:
    return sorted({str(each.detail.get("name")) for each in events if each.what == "signal" and each.round == number})


def _is_stop(event: Event) -> bool:
    return event.what == "requested" and event.detail.get("kind") == "stop"


def _find_ending(events: Sequence[Event], number: int, ended: Mapping[str, Any], *, has_lost: bool) -> str:
    """Return why a job that has ended did not succeed. "": no record says it.

    Args:
        events: of its last incarnation.
        number: of its last round.
        ended: what the record of the job's end says. Empty: there is none.
        has_lost: the loss of a node had broken that round.
    """
    is_asked = any(_is_stop(each) for each in events if each.round == number)
    if ended.get("drained") is True:
        found = str(ended.get("reason") or "all ranks stopped at one step, before the work was done")
        return f"{found} (muster stop)" if is_asked else found
    if ended:
        return str(ended.get("reason") or "")
    lost = [str(each.detail.get("reason") or "") for each in events if each.what == "rendezvous_lost"]
    if lost:
        return lost[-1]
    signals = _list_signals(events, number)
    received = f"its agents received {' and '.join(signals)}" if signals else ""
    losses = [str(each.detail.get("reason") or "") for each in events if _is_loss(each) and each.round == number]
    if received and losses and has_lost:
        received = f"{losses[0]}; then {received}"
    return f"muster stop; {received}".rstrip("; ") if is_asked else received


# -- the job as its leader followed it --------------------------------------------------------------------------------


def _replay(placed: Sequence[TimedEvent]) -> list[Event]:
    """Return the records of the agents that speak for the job, each for its rounds, in order, by the leader's clock."""
    found: list[Event] = []
    for number in sorted({each.incarnation for each in placed}):
        own = [each for each in placed if each.incarnation == number]
        by_round: dict[int, dict[str, list[TimedEvent]]] = defaultdict(lambda: defaultdict(list))
        for each in own:
            by_round[each.event.round][each.event.agent].append(each)
        chosen = [_choose_speaker(by_round[round_number]) for round_number in sorted(by_round)]
        records: list[TimedEvent] = []
        for at, agents in enumerate(by_round[round_number] for round_number in sorted(by_round)):
            kept = list(agents[chosen[at]])
            followers = [name for name in chosen[at + 1 : at + 2] if name != chosen[at]]
            if followers and _is_cut(kept[-1], own):
                followers += [name for name in agents if name not in (*followers, chosen[at])]
                kept += _find_loss(kept[-1], agents, own)
            for name in followers:  # what the lost one could not write
                written = {other.event.what for other in kept} | {"agent_started", "fenced"}
                kept += [other for other in agents.get(name, ()) if other.event.what not in written]
            records += kept
        replayed = [_move(each.event, _find_time(each)) for each in records]
        replayed.sort(key=lambda each: each.time_s)
        is_last = number == max(each.incarnation for each in placed)
        found += _end(replayed, own) if not is_last else replayed
    return found


def _move(event: Event, at_s: float) -> Event:
    return replace(event, time_s=at_s, monotonic_s=at_s)


_ENDS: Final = ("round_broken", "fenced", "job_ended", "rendezvous_lost", "signal", "agent_ended")
"""What an agent writes that is not killed, when a round ends for it."""


def _is_cut(last: TimedEvent, own: Sequence[TimedEvent]) -> bool:
    """Return whether the agent was killed in its last round: no record of it tells how that ended.

    Args:
        last: the agent's last record of a round.
        own: all records of the incarnation.
    """
    mine = [each.event for each in own if each.event.agent == last.event.agent]
    number = last.event.round
    return number > 0 and not any(each.round > number or (each.round == number and each.what in _ENDS) for each in mine)


def _find_loss(
    last: TimedEvent, agents: Mapping[str, Sequence[TimedEvent]], own: Sequence[TimedEvent]
) -> list[TimedEvent]:
    """Return the end of the round of a leader that was killed, if the others know only that it is silent.

    Args:
        last: its last record.
        agents: the records of the round.
        own: all records of the incarnation.
    """
    ends = [each for records in agents.values() for each in records if each.event.what in _ENDS]
    if not ends or any(
        each.event.what == "round_broken" and each.event.detail.get("kind") != "fenced" for each in ends
    ):
        return []
    return [_lose(last, min(each.at_s for each in ends), own)]


def _lose(last: TimedEvent, at_s: float, own: Sequence[TimedEvent]) -> TimedEvent:
    """Return the end of a round as the leader would have recorded it for this lost node.

    Args:
        last: the last record of the node's agent.
        at_s: when the round ended, by the leader's clock, in seconds since the epoch.
        own: all records of the incarnation.
    """
    index = last.event.node_index
    mine = (each.event.detail.get("host") for each in own if each.event.agent == last.event.agent)
    host = next((f" ({each})" for each in mine if each), "")
    detail = {"kind": "membership", "reason": f"node {index or 0}{host} was lost: its agent was killed"}
    return replace(last, at_s=at_s, event=replace(last.event, what="round_broken", detail=detail))


def _end(replayed: list[Event], own: Sequence[TimedEvent]) -> list[Event]:
    """Return the records of an incarnation with an end: one that was killed has none.

    Args:
        replayed: the records of its speakers.
        own: all of its records.
    """
    if not replayed or any(each.what == "job_ended" for each in replayed):
        return replayed
    at_s = max(each.at_s for each in own)
    last = replayed[-1]
    if last.round and not any(each.event.what in _ENDS for each in own if each.event.round == last.round):
        lost = next(each for each in reversed(own) if each.event.agent == last.agent)
        return [*replayed, _move(_lose(lost, at_s, own).event, at_s)]
    return [*replayed, _move(replace(last, what="job_ended", detail={"succeeded": False, "reason": ""}), at_s)]


def _find_time(placed: TimedEvent) -> float:
    """Return the time. For a record of steps it is that of the last step."""
    ago_s = placed.event.detail.get("ago_s") if placed.event.what == "steps_done" else None
    return placed.at_s - (ago_s if is_number(ago_s) else 0.0)


def _choose_speaker(agents: Mapping[str, Sequence[TimedEvent]]) -> str:
    def find_place(name: str) -> tuple[int, int, float]:
        records = [each.event for each in agents[name]]
        steps = sum(each.what == "steps_done" for each in records)
        rank = min((each.node for each in records if each.node is not None), default=1 << 30)
        return -steps, rank, agents[name][0].at_s

    return min(agents, key=find_place)


class _Job:
    """Follows the records of the speakers."""

    def __init__(self, replayed: Sequence[Event]) -> None:
        self.history = JobHistory(most_recoveries=_MOST_RECOVERIES)
        self.rounds: list[tuple[float, int, int, int, int]] = []
        self.steps: list[tuple[float, int]] = []
        self.values: dict[str, list[tuple[float, float]]] = defaultdict(list)
        self.first_steps: dict[int, list[float]] = defaultdict(list)
        """The times of its first steps, by the number of the round, of which each incarnation may have one."""
        self.spans: list[tuple[float, float | None, int]] = []
        """Hangs, pauses and saves of the whole job: start, end, phase."""
        self._last_step_s: float | None = None
        self._drain_kind = ""
        for each in replayed:
            self._follow(each)
        self.span_ends = [math.inf if end_s is None else end_s for _, end_s, _ in self.spans]

    def _follow(self, event: Event) -> None:
        at_s = event.time_s
        if event.what == "steps_done":
            self._record_steps(event, at_s)
            return
        self.history.write(event)
        if event.what == "round_formed":
            self._last_step_s = None
            size = _read_count(event.detail.get("nodes")), _read_count(event.detail.get("world_size"))
            self.rounds.append((at_s, event.round, event.attempt, *size))
        elif event.what in HANGS:
            self._open(at_s if self._last_step_s is None else self._last_step_s, HUNG)
        elif event.what == "drain_begun":
            self._drain_kind = str(event.detail.get("kind"))
        elif event.what == "drain_committed" and self._drain_kind in ("pause", "checkpoint", "stop"):
            self._open(at_s, PAUSED if self._drain_kind == "pause" else SAVING)
        elif event.what in (*HANG_ENDS, "drain_withdrawn") or self._is_saved(event):
            self._close(at_s)
        elif event.what in ("round_broken", "fenced", "job_ended", "agent_ended"):
            if event.detail.get("hang") is True and not self._is_open:
                self._open(at_s if self._last_step_s is None else self._last_step_s, HUNG)
            self._close(at_s)

    def _is_saved(self, event: Event) -> bool:
        return event.what == "checkpoint_completed" and self._is_open and self.spans[-1][2] == SAVING

    def find_hang(self, at_s: float) -> float | None:
        """Return when the hang of this moment began: with the last step."""
        found = ((start_s, end_s) for start_s, end_s, phase in self.spans if phase == HUNG)
        return next((start_s for start_s, end_s in found if start_s <= at_s <= (end_s or at_s)), None)

    @property
    def _is_open(self) -> bool:
        return bool(self.spans) and self.spans[-1][1] is None

    def _open(self, at_s: float, phase: int) -> None:
        self._close(at_s)
        self.spans.append((at_s, None, phase))

    def _close(self, at_s: float) -> None:
        if self._is_open:
            start_s, _, phase = self.spans[-1]
            self.spans[-1] = start_s, max(start_s, at_s), phase

    @property
    def steps_done(self) -> tuple[int, int]:
        """See `Story`. Of an optimizer, which counts from 0 in each attempt, it is twice the most."""
        done, most = self.history.steps_done
        if done or most:
            return done, max(done, most)
        return (max((each[1] for each in self.steps), default=0),) * 2

    def _record_steps(self, event: Event, at_s: float) -> None:
        detail = event.detail
        done, total = detail.get("done"), detail.get("total")
        if not isinstance(done, int):
            return
        done = min(done, 1 << 53)
        is_counted, phase = detail.get("is_counted") is True, str(detail.get("phase", ""))
        total = total if isinstance(total, int) else None
        self.history.record_steps(done, at_s, is_counted=is_counted, phase=phase, total=total)
        self.steps.append((at_s, done))
        if self._last_step_s is None:
            self.first_steps[event.round].append(at_s)
        self._last_step_s = at_s
        values = detail.get("values")
        for name, value in values.items() if isinstance(values, dict) else ():
            if is_number(value) and len(self.values) <= 8:
                self.values[str(name)].append((at_s, float(value)))


def _read_count(value: object) -> int:
    return value if isinstance(value, int) and value > 0 else 1


# -- nodes -------------------------------------------------------------------------------------------------------------


def _tell_nodes(placed: Sequence[TimedEvent], job: _Job, end_s: float, *, runs: bool) -> list[NodeStory]:
    agents: dict[str, list[TimedEvent]] = defaultdict(list)
    for each in placed:
        agents[each.event.agent].append(each)
    broken = {
        (each.incarnation, each.event.round): each.at_s
        for each in reversed(placed)
        if each.event.what in ("round_broken", "fenced")
    }
    nodes: dict[int, NodeStory] = {}
    for records in sorted(agents.values(), key=lambda each: each[0].at_s):
        index = next((each.event.node_index for each in records if each.event.node_index is not None), 0)
        node = nodes.setdefault(index, NodeStory(index=index))
        node.host = next((str(each.event.detail["host"]) for each in records if "host" in each.event.detail), node.host)
        node.bars += _tell_agent(records, node, job, broken, end_s, runs=runs)
    return [nodes[index] for index in sorted(nodes)]


_NEXT_PHASE: Final[Mapping[str, int]] = {
    "agent_started": JOINING,
    "round_formed": STARTING,
    "workers_started": FIRST_STEP,
    "round_broken": STOPPING,
    "fenced": STOPPING,
    "workers_stopped": BETWEEN,
    "nodes_awaited": WAITING,
}


def _tell_agent(
    records: Sequence[TimedEvent],
    node: NodeStory,
    job: _Job,
    broken: Mapping[tuple[int, int], float],
    end_s: float,
    *,
    runs: bool,
) -> list[Bar]:
    bars: list[Bar] = []
    phase, since_s, number = JOINING, records[0].at_s, 0
    has_ended = False

    def change(to: int, at_s: float) -> None:
        nonlocal phase, since_s
        if at_s > since_s:
            bars.extend(_split(Bar(start_s=since_s, end_s=at_s, phase=phase, round=number), job))
        phase, since_s = to, max(since_s, at_s)

    for each in records:
        event, to = each.event, _NEXT_PHASE.get(each.event.what)
        if event.what == "worker_exited" and phase in (FIRST_STEP, STARTING) and event.detail.get("code"):
            code = event.detail["code"]
            node.exits += [(each.at_s, rank, code, number) for rank in event.ranks if isinstance(code, int)]
        if event.what in ("job_ended", "agent_ended"):
            if not has_ended:
                change(phase, each.at_s)
            has_ended = True
        elif to is not None and not (to == WAITING and phase != BETWEEN) and not (to == BETWEEN and phase != STOPPING):
            change(to, each.at_s)
            number = event.round
            if to == FIRST_STEP:
                node.ranks[event.round] = event.ranks
    if not has_ended:
        last = records[-1]
        lost_s = broken.get((last.incarnation, last.event.round)) if phase != BETWEEN else None
        change(LOST, end_s if runs and lost_s is None else max(last.at_s, lost_s or last.at_s))
        if lost_s is not None:
            change(LOST, min((at_s for at_s, *_ in job.rounds if at_s > lost_s), default=end_s))
    return bars


def _split(bar: Bar, job: _Job) -> list[Bar]:
    """Return the time of workers that run, divided into the first step, training, and what all nodes did together."""
    if bar.phase != FIRST_STEP:
        return [bar]
    formed = [at_s for at_s, number, *_ in job.rounds if number == bar.round and at_s <= bar.start_s]
    began_s = max(formed, default=bar.start_s)  # another node's step may come first
    starts = [each for each in job.first_steps.get(bar.round, ()) if began_s <= each <= bar.end_s]
    first_s = min(starts, default=bar.end_s if job.steps else bar.start_s)
    first_s = min(max(first_s, bar.start_s), bar.end_s)
    found = [replace(bar, end_s=first_s)] if first_s > bar.start_s else []
    at_s = first_s
    for start_s, ended_s, phase in job.spans[bisect_left(job.span_ends, first_s) :]:
        if start_s >= bar.end_s:
            break
        start_s, ended_s = max(start_s, at_s), min(bar.end_s if ended_s is None else ended_s, bar.end_s)
        if ended_s <= start_s:
            continue
        if start_s > at_s:
            found.append(replace(bar, start_s=at_s, end_s=start_s, phase=TRAINING))
        found.append(replace(bar, start_s=start_s, end_s=ended_s, phase=phase))
        at_s = ended_s
    if bar.end_s > at_s:
        found.append(replace(bar, start_s=at_s, phase=TRAINING))
    return found


# -- marks -------------------------------------------------------------------------------------------------------------


def _list_marks(
    placed: Sequence[TimedEvent], replayed: Sequence[Event], job: _Job, tracebacks: Mapping[tuple[int, int], str]
) -> list[Mark]:
    begun = (each for each in replayed if each.what == "drain_begun")
    drains = {(each.round, each.detail.get("drain")): str(each.detail.get("kind")) for each in begun}
    marks: list[Mark] = []
    hung = 0
    """The round of the last hang."""
    for event in replayed:
        mark = _mark_job(event, drains)
        if mark is None:
            continue
        if mark.kind == "hang":
            mark = replace(mark, since_s=job.find_hang(mark.at_s))
            last, hung = hung, event.round
            if marks and marks[-1].kind == "hang" and event.round == last and event.what in _MORE_ON_A_HANG:
                marks[-1] = replace(marks[-1], text=f"{marks[-1].text}; {mark.text}")
                continue
        marks.append(mark)
    for each in placed:
        event, report = each.event, ""
        if event.what == "worker_failed":
            kind, reason = "failure", event.detail.get("reason")
            text = f"rank {', '.join(map(str, event.ranks))} failed" + (f": {reason}" if reason else "")
            report = "\n".join(filter(None, (tracebacks.get((event.attempt, rank)) for rank in event.ranks)))
        elif event.what in _SIGNALS:
            kind, (words, field_name) = "signal", _SIGNALS[event.what]
            text = f"{words} {event.detail.get(field_name)}" if field_name else words
        else:
            continue
        marks.append(Mark(at_s=each.at_s, kind=kind, text=text, node=event.node_index, report=report))
    return sorted(marks, key=lambda mark: mark.at_s)


_SIGNALS: Final = {
    "signal": ("the agent received", "name"),
    "fenced": ("fenced", ""),
    "requested": ("a person asked for it: muster", "kind"),
}
"""What is said of what an agent got, and the field of its detail that follows."""
_MORE_ON_A_HANG: Final = ("hang_named", "hang_explained")
"""Lines that follow on the one that says that the job hangs."""


def _mark_job(event: Event, drains: Mapping[tuple[int, Any], str]) -> Mark | None:
    at_s, detail = event.time_s, event.detail
    reason = str(detail.get("reason", detail.get("text", "")))
    if event.what == "round_broken":
        kind = {"membership": "node", "drained": "drain"}.get(str(detail.get("kind")), "failure")
        kind = "join" if detail.get("joined") is True else "hang" if detail.get("hang") is True else kind
        kind = "drain" if detail.get("left") is True else kind
        cause = str(detail.get("cause") or "")
        return Mark(at_s=at_s, kind=kind, text=f"{reason} (cause: {cause})" if cause else reason)
    if event.what in (*HANGS, "hang_explained"):
        return Mark(at_s=at_s, kind="hang", text=reason)
    if event.what == "drain_committed":
        verb = Layout.VERBS.get(drains.get((event.round, detail.get("drain")), ""))
        what = "on" if verb is None else f"to {verb} at"
        return Mark(at_s=at_s, kind="drain", text=f"all ranks agreed {what} step {detail.get('step')}")
    if event.what == "checkpoint_completed":
        return Mark(at_s=at_s, kind="checkpoint", text=f"all ranks have saved step {detail.get('step')}")
    if event.what == "job_ended":
        text = "the job has succeeded" if detail.get("succeeded") is True else f"the job has ended: {reason}"
        return Mark(at_s=at_s, kind="end", text=text)
    return None
