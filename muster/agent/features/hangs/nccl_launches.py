"""Finds the ranks that block the others, from what NCCL's own monitor says of all ranks. Pure.

NCCL counts the operations that a rank has launched on a communicator, not those that are complete.

- Ranks that have launched fewer than the others did not launch the next one.
- Ranks that have launched more of one operation and fewer of another have come apart.
- Ranks whose process does not answer the other processes, or has ended, are named.
- A communicator that some ranks are still joining waits for the rest.
- If all have launched the same, the network or a device hangs, or the ranks compute without NCCL: no rank is named.

A communicator is not judged if there is only one report of it, if it moved between two reports, or if ranks leave it.
If several wait, a rank that is missing in one may itself wait in another, where the cause is then.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from muster._shared.records import NO_ITEMS
from muster._shared.reports import ENDED, LaunchCount, Launches, RankView, name_ranks
from muster.agent.features.hangs.collectives import STATES, Finding, describe_states, use_plural

RUNNING = ""
"""The state of a rank without special state."""
SILENT, DEAD, LEFT = "silent", "dead", "left"
"""States of a rank: its process has not answered the others' monitors; they have given it up; or it answers but is not
in the communicator, or no longer."""
INITIALISING, ENDING = "initialising", "ending"
UNNAMED = "unnamed"
"""The state in a communicator that has several sets of ranks of which none is listed."""

_LOST = {SILENT: "does not answer NCCL's monitor", DEAD: "is dead to NCCL's monitor"}
_HARMLESS = (RUNNING, INITIALISING, ENDING, LEFT, UNNAMED, *_LOST)


def find_launch_cause(views: Iterable[RankView]) -> Finding | None:
    """Name the ranks that block the others; None if NCCL's monitor says nothing, or not twice the same."""
    by_rank = {view.global_rank: view for view in views}
    communicators: dict[str, dict[int, Launches]] = {}
    for rank, view in by_rank.items():
        for each in view.launches:
            communicators.setdefault(each.communicator, {})[rank] = each
    judged = (_judge(name, members, by_rank) for name, members in communicators.items())
    found = [finding for finding in judged if finding is not None]
    # A rank that waits elsewhere is not the cause. If all launched the same, none surely waits.
    waiting = {rank for finding in found if finding.ranks for rank in finding.waiting}
    causes = [finding for finding in found if not finding.ranks & waiting] or found
    return max(causes, key=lambda finding: bool(finding.ranks), default=None)


def _judge(name: str, members: Mapping[int, Launches], by_rank: Mapping[int, RankView]) -> Finding | None:
    """Judge one communicator. `members` has its ranks by global rank, as far as they are known."""
    if any(each.still_s <= 0.0 or each.state == ENDING for each in members.values()):
        return None
    still_s = min(each.still_s for each in members.values())
    size = max(each.size for each in members.values())
    failed = {rank: each.state for rank, each in members.items() if each.state not in _HARMLESS}
    lost = {
        rank: STATES.get(by_rank[rank].state, _LOST[each.state])
        for rank, each in members.items()
        if each.state in _LOST
    }
    running = {rank: each for rank, each in members.items() if each.state in (RUNNING, INITIALISING)}
    what = _name(name, size)
    if failed:
        error = failed[min(failed)]
        return _find(failed, f"reported {error!r} to NCCL's monitor for {what}", running, still_s, by_rank)
    if any(each.state == INITIALISING for each in running.values()):
        return _judge_joining(what, size, running, still_s, by_rank)
    behind = _list_behind(running)
    if behind:
        return _find(behind, _describe_behind(what, behind, running), running, still_s, by_rank)
    apart = _list_apart(running)
    if apart:
        return _find(apart, _describe_apart(what, apart, running), running, still_s, by_rank)
    # A rank is behind if it launched less than ranks about which nothing else is known, as on other nodes.
    ended = {rank: "has ended" for rank, view in by_rank.items() if view.state == ENDED and len(members) < size}
    gone = lost or ended
    if gone:
        text, they = use_plural(gone[min(gone)], len(gone)), "it is" if len(gone) == 1 else "they are"
        rest = f" with {name_ranks(running)}" if running else ""
        return _find(gone, f"{text}; {they} in {what}{rest}", running, still_s, NO_ITEMS)
    return _judge_equal(what, members, running, still_s)


def _find(
    ranks: Collection[int], clause: str, running: Collection[int], still_s: float, by_rank: Mapping[int, RankView]
) -> Finding:
    states = describe_states(ranks, by_rank)
    return Finding(
        ranks=frozenset(ranks), clause=clause + states, waiting=frozenset(running) - set(ranks), age_s=still_s
    )


def _judge_joining(
    what: str, size: int, running: Mapping[int, Launches], still_s: float, by_rank: Mapping[int, RankView]
) -> Finding:
    inside = [rank for rank, each in running.items() if each.state == INITIALISING]
    # Missing ranks are known only if all ranks should be inside.
    outside = by_rank.keys() - running.keys() if len(by_rank) == size else set()
    if outside:
        clause = f"did not join {what}, for which {name_ranks(inside)} {use_plural('has waited', len(inside))}"
        return _find(outside, clause, inside, still_s, by_rank)
    clause = f"joined {what}, which is not complete"
    return Finding(ranks=frozenset(), clause=clause, waiting=frozenset(inside), age_s=still_s)


def _list_behind(running: Mapping[int, Launches]) -> dict[int, LaunchCount]:
    """Return the ranks that have launched the fewest of all, with the operation that they did not launch."""
    behind: dict[int, LaunchCount] = {}
    for rank, each in running.items():
        if not any(count.least < count.by_rank == count.most for count in each.counts):
            missing = [count for count in each.counts if count.by_rank < count.most]
            if missing:
                behind[rank] = missing[0]
    done = {rank: sum(count.by_rank for count in running[rank].counts) for rank in behind}
    return {rank: count for rank, count in behind.items() if done[rank] == min(done.values())}


def _list_apart(running: Mapping[int, Launches]) -> dict[int, Launches]:
    """Return the ranks that have launched more of one operation, and fewer of another, than most others."""
    kinds = {
        rank: tuple((count.operation, count.by_rank) for count in each.counts if count.least != count.most)
        for rank, each in running.items()
        if any(count.by_rank < count.most for count in each.counts)
        and any(count.least < count.by_rank == count.most for count in each.counts)
    }
    if not kinds:
        return {}
    (usual, count), *_ = Counter(kinds.values()).most_common()
    if 2 * count == len(kinds):  # no majority: the lowest rank is right
        usual = kinds[min(kinds)]
    others = {rank for rank, kind in kinds.items() if kind != usual}
    return {rank: running[rank] for rank in others or kinds}


def _describe_behind(what: str, behind: Mapping[int, LaunchCount], running: Mapping[int, Launches]) -> str:
    count = behind[min(behind)]
    rest = _describe_waiting(running.keys() - behind.keys())
    return f"did not launch {_name_operation(count.operation, count.by_rank + 1)} of {what}; {rest} launched it"


def _describe_apart(what: str, apart: Mapping[int, Launches], running: Mapping[int, Launches]) -> str:
    counts = apart[min(apart)].counts
    own = next(each for each in counts if each.least < each.by_rank == each.most)
    other = next(each for each in counts if each.by_rank < each.most)
    rest = _describe_waiting(running.keys() - apart.keys())
    theirs = _name_operation(other.operation, other.most)
    return f"launched {_name_operation(own.operation, own.by_rank)} of {what} where {rest} launched {theirs}"


def _judge_equal(
    what: str, members: Mapping[int, Launches], running: Mapping[int, Launches], still_s: float
) -> Finding | None:
    unnamed = next((each for each in members.values() if each.state == UNNAMED and each.counts), None)
    if unnamed is not None:
        count = unnamed.counts[0]
        clause = (
            f"are known to NCCL's monitor: some launched {_name_operation(count.operation, count.most)} of {what}, "
            f"some {_name_operation(count.operation, count.by_rank)} at most; this NCCL does not say which"
        )
        return Finding(ranks=frozenset(), clause=clause, waiting=frozenset(members), age_s=still_s)
    if len(running) < 2:
        return None
    since = (
        "none since" if any(each.counts for each in running.values()) else "whether any since this NCCL does not say"
    )
    clause = (
        f"launched the same operations of {what}, and {since}: the network or a device hangs, or they compute "
        f"without NCCL"
    )
    return Finding(ranks=frozenset(), clause=clause, waiting=frozenset(running), age_s=still_s)


def _describe_waiting(ranks: Collection[int]) -> str:
    """Return a text such as `rank 0 has`, or "the others have" if none is known."""
    if not ranks:
        return "the others have"
    return f"{name_ranks(ranks)} {'has' if len(ranks) == 1 else 'have'}"


def _name(communicator: str, size: int) -> str:
    return (
        f"NCCL communicator {communicator} ({size} ranks)" if communicator else f"an NCCL communicator ({size} ranks)"
    )


def _name_operation(operation: str, number: int) -> str:
    return f"{operation or 'operation'} #{number}"
