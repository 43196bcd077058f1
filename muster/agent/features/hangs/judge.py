"""Judges a job that hangs, or is looked at, and formats what is printed of it. Pure.

A look at a running job finds ranks at different places, some of them waiting, which is no hang. So no rank is blamed
while it, or one that waits for it, has moved between two looks, or within the last seconds.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from muster._shared.reports import RankProgress, RankView, Stack, name_ranks
from muster.agent.diagnosis.hangs import HangCause, HangJudge, list_progress
from muster.agent.diagnosis.report_text import describe_progress, format_steps
from muster.agent.features.hangs.causes import describe_places, explain_hang
from muster.agent.features.hangs.collectives import Finding
from muster.agent.runtime.limits import WAITED_S

_LATE_S = 0.1
"""Ranks that enter a collective this much after the first one are worth a line. Each node reads ages at a slightly
different moment."""
_LATE_SHARE = 0.5
"""Share of the collectives. A rank that is late less often is not slow; then the machine is busy."""


class Judge(HangJudge):
    """See `HangJudge`."""

    def find_cause(self, stacks: Sequence[Stack]) -> HangCause:
        """See `HangJudge`."""
        found = explain_hang(stacks)
        if found is None:
            return HangCause()
        return HangCause(ranks=found.ranks, clause=found.clause, line=_format_cause(found, stacks))

    def describe_hang(self, stacks: Sequence[Stack]) -> Iterator[str]:
        """See `HangJudge`."""
        found = explain_hang(stacks)
        if found is not None:
            yield _format_cause(found, stacks)
        yield from _list_slow(stacks)

    def describe_ranks(self, stacks: Sequence[Stack]) -> Iterator[str]:
        """See `HangJudge`. Then who enters collectives late."""
        progress = list_progress(stacks)
        verdict = find_verdict(stacks)
        moved = describe_movement(progress)
        if verdict is not None:
            yield verdict
        elif moved is not None:
            yield f"the job makes progress{moved and ': '}{moved}"
        elif (doubt := _describe_doubt(explain_hang(stacks), progress)) is not None:
            yield doubt
        if verdict is not None or moved is None:
            yield from format_steps(progress)
        yield from _list_slow(stacks)

    def describe_standstill(self, stacks: Sequence[Stack], for_s: float) -> str | None:
        """See `HangJudge`. A job that has done nothing yet does not stand still."""
        verdict, cause = find_verdict(stacks), explain_hang(stacks)
        found = verdict or _describe_standstill(stacks)
        if found is None:
            return None
        # The verdict says how long the others have waited; a second, slightly different time would only raise a
        # question.
        has_time = verdict is not None and cause is not None and cause.age_s > 0
        return f"the job stands still{'' if has_time else f', for {for_s:.0f} s now'}: {found}; nothing is stopped"


def _describe_standstill(stacks: Sequence[Stack]) -> str | None:
    """Return where the ranks are if nobody is known to block the others."""
    progress = list_progress(stacks)
    if not any(each.still_s is not None for each in progress):
        return None
    if any(each.moved is not None or each.is_busy for each in progress):
        return None
    place = describe_places(stacks)
    places = () if place is None else (place,)
    return "; ".join(("no rank seems to keep the others waiting", *places, *format_steps(progress)))


def find_verdict(stacks: Sequence[Stack]) -> str | None:
    """Return who blocks the others; None if nobody is known to, or if it is too early to say so."""
    cause = explain_hang(stacks)
    if cause is None or _find_doubt(cause, list_progress(stacks)) is not None:
        return None
    return _format_cause(cause, stacks)


def describe_movement(progress: Sequence[RankProgress]) -> str | None:
    """Return the job's progress: "step 812 of 1000, 7.9 a second"; None if no rank has moved between two looks."""
    moved = [each for each in progress if each.moved is not None]
    if not moved:
        return None
    counted = [text for each in _sort_slowest_first(progress) if (text := describe_progress(each)) is not None]
    return f"step {counted[0]}" if counted else moved[0].moved


def _sort_slowest_first(ranks: Iterable[RankProgress]) -> list[RankProgress]:
    return sorted(ranks, key=lambda each: (each.step or 0, each.optimizer_steps or 0, each.global_rank))


def _format_cause(cause: Finding, stacks: Sequence[Stack]) -> str:
    place = _name_place(cause.ranks, (stack.view for stack in stacks if stack.view is not None))
    busy = {each.global_rank for each in list_progress(stacks) if each.is_busy} & (cause.ranks - cause.waiting)
    works = f"; {name_ranks(busy)} {'works' if len(busy) == 1 else 'work'} (CPU time, reads or writes)" if busy else ""
    return f"{name_ranks(cause.ranks)}{place} {cause.clause}{works}"


def _find_doubt(cause: Finding, progress: Iterable[RankProgress]) -> str | None:
    """Return why these ranks are not blamed yet; None if the cause is certain, "" if a rank has moved."""
    ranks = cause.ranks | cause.waiting
    concerned = [each for each in progress if each.global_rank in ranks]
    if any(each.moved is not None for each in concerned):
        return ""
    ages = [cause.age_s] if cause.age_s else [each.still_s for each in concerned if each.still_s is not None]
    if min(ages, default=WAITED_S) < WAITED_S:
        return f"the last sign of life is {min(ages):.0f} s old"
    busy = [each.global_rank for each in concerned if each.is_busy and each.global_rank in cause.ranks]
    if busy and not cause.age_s:  # its own waiting time is unknown
        return f"{name_ranks(busy)} {'works' if len(busy) == 1 else 'work'} (CPU time, reads or writes)"
    return None


def _describe_doubt(cause: Finding | None, progress: Iterable[RankProgress]) -> str | None:
    doubt = None if cause is None else _find_doubt(cause, progress)
    return f"no verdict: {doubt}; ask again in a few seconds" if doubt else None


def _list_slow(stacks: Sequence[Stack]) -> Iterator[str]:
    slow = describe_slow_ranks(stack.view for stack in stacks if stack.view is not None)
    if slow is not None:
        yield slow


def _name_place(ranks: frozenset[int], views: Iterable[RankView]) -> str:
    """Return a text such as ` (node 0, main1)`, if all of them are on one node."""
    places = {(view.node, view.host) for view in views if view.global_rank in ranks}
    if len(places) != 1:
        return ""
    node, host = places.pop()
    return f" (node {node}, {host})"


def describe_slow_ranks(views: Iterable[RankView]) -> str | None:
    """Return the rank that was most often the last to enter, and how late it was; None if none was clearly late."""
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
    if count < _LATE_SHARE * len(calls):
        return None
    return (
        f"rank {rank} was the last to enter {count} of the last {len(calls)} collectives, "
        f"up to {longest_s[rank]:.1f} s after the first"
    )
