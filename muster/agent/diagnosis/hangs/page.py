"""What is printed of a job that hangs, or is looked at, while its workers go on. Pure."""

from collections import Counter
from collections.abc import Iterable, Iterator

from muster.agent.diagnosis.hang_cause import explain_hang
from muster.agent.diagnosis.report import Failure, RankView, Stack, name_ranks
from muster.agent.diagnosis.report_text import format_stacks

_LATE_S = 0.1
"""Ranks that enter a collective so much after the first one are worth a line; ages are read at slightly other moments
on each node."""


def describe_hang(idle: Iterable[Failure], stacks: Iterable[Stack]) -> Iterator[str]:
    """Describe a hang with which the job goes on: what the ranks have not done, and `describe_ranks`.

    Args:
        idle: the failures that would be recorded if the hang were one.
        stacks: of all ranks that are known.
    """
    for failure in idle:
        yield f"the job hangs: {failure.reason.removeprefix('hung: ')}"
        break
    yield from describe_ranks(stacks)


def format_page(stacks: Iterable[Stack], *, missing: int) -> Iterator[str]:
    """Format the page: who keeps the others waiting, who enters late, and the stacks, equal ones once.

    Args:
        stacks: of all ranks that are known.
        missing: of so many workers nothing is known.
    """
    known = tuple(stacks)
    yield from describe_ranks(known)
    yield from format_known_stacks(known, missing=missing)


def format_known_stacks(stacks: Iterable[Stack], *, missing: int) -> Iterator[str]:
    """Format the stacks, equal ones once. Arguments as of `format_page`."""
    return format_stacks({stack.global_rank: stack.text for stack in stacks if stack.text}, missing=missing)


def describe_ranks(stacks: Iterable[Stack]) -> Iterator[str]:
    """Who keeps the others waiting, and who enters collectives late; nothing where neither is seen."""
    known = tuple(stacks)
    views = [stack.view for stack in known if stack.view is not None]
    cause = explain_hang(known)
    if cause is not None:
        yield f"{name_ranks(cause.ranks)}{_name_place(cause.ranks, views)} {cause.clause}"
    slow = describe_slow_ranks(views)
    if slow is not None:
        yield slow


def _name_place(ranks: frozenset[int], views: Iterable[RankView]) -> str:
    """` (node 0, main1)`, if all of them are on one node."""
    places = {(view.node, view.host) for view in views if view.global_rank in ranks}
    if len(places) != 1:
        return ""
    node, host = places.pop()
    return f" (node {node}, {host})"


def describe_slow_ranks(views: Iterable[RankView]) -> str | None:
    """The rank that was most often the last to enter, and how late it was; None when none was clearly late."""
    calls: dict[tuple[str, int], list[tuple[float, int]]] = {}
    for view in views:
        for group in view.groups:
            for entry in group.entries:
                if entry.is_done and not entry.is_p2p:
                    calls.setdefault((group.name, entry.number), []).append((entry.age_s, view.global_rank))
    late: Counter[int] = Counter()
    longest_s: dict[int, float] = {}
    for ages in calls.values():
        (last_s, rank), (first_s, _) = min(ages), max(ages)
        if len(ages) > 1 and first_s - last_s >= _LATE_S:
            late[rank] += 1
            longest_s[rank] = max(longest_s.get(rank, 0.0), first_s - last_s)
    if not late:
        return None
    rank, count = late.most_common(1)[0]
    return (
        f"rank {rank} was the last to enter {count} of the last {len(calls)} collectives, "
        f"up to {longest_s[rank]:.1f} s after the first"
    )
