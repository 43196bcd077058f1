"""Puts the records of all agents on one clock: the leader's. Pure.

The wall clocks of two machines are never compared. Each agent has recorded (`clock_compared`) how far the leader's
clock is ahead of its own, with the possible error. It knows this from the times of its heartbeats and of their answers.
If the leader changes, what the later leader has recorded about the first one is added to what others have recorded
about the later one. So are the errors.

An agent that ended before it had an answer is placed by its own wall clock, with an unknown error. Incarnations of a
job, which no agent outlives, are placed by the wall clock of the leader of each.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone

from muster.cli.history.sources import Event, is_number


@dataclass(frozen=True, kw_only=True)
class TimedEvent:
    """A record at its time."""

    event: Event
    at_s: float
    """Seconds since the epoch, by the wall clock that the leader of the incarnation had at its start."""
    uncertainty_s: float | None
    """At most so much earlier or later, in relation to the leader's records. None: not known."""
    incarnation: int
    """From 0: counts how often the scheduler has run the whole job."""


@dataclass(frozen=True, kw_only=True)
class _Offset:
    ahead_s: float
    uncertainty_s: float | None


def place(events: Iterable[Event]) -> tuple[TimedEvent, ...]:
    """Place all records, in the order of their times."""
    agents: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        agents[event.agent].append(event)
    timed: list[TimedEvent] = []
    for number, group in enumerate(_list_incarnations(agents)):
        own = {name: agents[name] for name in group}
        leader = _find_leader(own)
        first = own[leader][0]
        offsets = _find_offsets(own, leader)
        began_s = first.time_s - first.monotonic_s - offsets[leader].ahead_s
        for name, records in own.items():
            offset = offsets[name]
            for event in records:
                at_s = began_s + event.monotonic_s + offset.ahead_s
                timed.append(TimedEvent(event=event, at_s=at_s, uncertainty_s=offset.uncertainty_s, incarnation=number))
    return tuple(sorted(timed, key=lambda each: (each.incarnation, each.at_s)))


def _list_incarnations(agents: Mapping[str, Sequence[Event]]) -> list[list[str]]:
    """Return the agents that belong together, in the order of time.

    They named the same leader. One that no other has compared its clock with, as a leader that was lost in its first
    second, belongs to those that ran at the same time.
    """
    groups: list[tuple[set[str], list[str]]] = []
    spans = {name: (records[0].time_s, records[-1].time_s) for name, records in agents.items()}
    for name, records in agents.items():
        names = {str(each.detail.get(key)) for each in _list_comparisons(records) for key in ("leader", "member")}
        joined = [group for group in groups if names & group[0]]
        rest = [group for group in groups if not names & group[0]]
        merged = {each for group in joined for each in group[0]} | names
        groups = [*rest, (merged, [each for group in joined for each in group[1]] + [name])]
    known = [group for group in groups if len(group[0]) > 1]
    for names, members in (group for group in groups if len(group[0]) < 2):
        began_s, ended_s = min(spans[each][0] for each in members), max(spans[each][1] for each in members)
        for _, others in known:
            if any(spans[each][0] <= ended_s and began_s <= spans[each][1] for each in others):
                others += members
                break
        else:
            known.append((names, members))
    return sorted((members for _, members in known), key=lambda each: min(spans[name][0] for name in each))


def _list_comparisons(records: Iterable[Event]) -> list[Event]:
    return [each for each in records if each.what == "clock_compared" and _is_whole(each.detail)]


def _is_whole(detail: Mapping[str, object]) -> bool:
    error_s = detail.get("uncertainty_s")
    is_error = is_number(error_s) and error_s >= 0  # negative ones would improve for ever
    return (
        is_error
        and is_number(detail.get("ahead_s"))
        and isinstance(detail.get("member"), str)
        and isinstance(detail.get("leader"), str)
    )


def _find_leader(agents: Mapping[str, Sequence[Event]]) -> str:
    """Find whose clock counts: that of the node that led first, else that of the lowest node."""

    def find_place(name: str) -> tuple[bool, int, int, str]:
        led = [each.round for each in _list_comparisons(agents[name]) if each.detail["leader"] == each.detail["member"]]
        index = next((each.node_index for each in agents[name] if each.node_index is not None), 1 << 30)
        return not led, min(led, default=0), index, name

    return min(agents, key=find_place)


def _find_offsets(agents: Mapping[str, Sequence[Event]], leader: str) -> dict[str, _Offset]:
    """Return what is added to each agent's monotonic clock to get the leader's."""
    if len(agents) == 1:
        return {leader: _Offset(ahead_s=0.0, uncertainty_s=0.0)}
    found = _follow_comparisons(agents, leader)
    base = agents[leader][0]
    for name, (first, *_) in agents.items():
        by_wall_s = base.monotonic_s + found[leader].ahead_s + first.time_s - base.time_s - first.monotonic_s
        found.setdefault(name, _Offset(ahead_s=by_wall_s, uncertainty_s=None))
    return found


def _follow_comparisons(agents: Mapping[str, Sequence[Event]], leader: str) -> dict[str, _Offset]:
    """Go from agent to agent, the most certain known way first."""
    comparisons = {name: _choose_comparisons(records) for name, records in agents.items()}
    own = next((each for each in comparisons[leader] if each.detail["leader"] == each.detail["member"]), None)
    found = {leader: _Offset(ahead_s=0.0 if own is None else float(own.detail["ahead_s"]), uncertainty_s=0.0)}
    clocks: dict[str, _Offset] = {}
    """What is added to the CLOCK_BOOTTIME of members, by their names."""
    before = None
    while before != found:
        before = dict(found)
        for name in list(found):
            for each in comparisons[name]:
                ahead_s = found[name].ahead_s - float(each.detail["ahead_s"])
                _keep_better(clocks, str(each.detail["leader"]), ahead_s, _add(found[name], each))
        for name, records in comparisons.items():
            for each in records:
                clock = clocks.get(str(each.detail["leader"]))
                if clock is not None:
                    ahead_s = clock.ahead_s + float(each.detail["ahead_s"])
                    _keep_better(found, name, ahead_s, _add(clock, each))
    return found


def _choose_comparisons(records: Iterable[Event]) -> list[Event]:
    """Choose the most certain of the comparisons with one leader."""
    best: dict[str, Event] = {}
    for each in _list_comparisons(records):
        leader = str(each.detail["leader"])
        if leader not in best or each.detail["uncertainty_s"] < best[leader].detail["uncertainty_s"]:
            best[leader] = each
    return list(best.values())


def _add(offset: _Offset, comparison: Event) -> float:
    return (offset.uncertainty_s or 0.0) + float(comparison.detail["uncertainty_s"])


def _keep_better(offsets: dict[str, _Offset], name: str, ahead_s: float, uncertainty_s: float) -> None:
    before = offsets.get(name)
    if before is None or uncertainty_s < (before.uncertainty_s or 0.0):
        offsets[name] = _Offset(ahead_s=ahead_s, uncertainty_s=uncertainty_s)


def show_clock(at_s: float) -> str:
    """Return the date and time, UTC. Records with a wrong offset of a clock may say a time that no calendar has."""
    try:
        return datetime.fromtimestamp(at_s, timezone.utc).strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):
        return f"second {at_s:.0f}"
