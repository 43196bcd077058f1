"""Judges a job that hangs, or is looked at, and formats what is printed of it. Pure.

A look at a running job finds ranks at different places, some of them waiting, which is no hang. So no rank is blamed
while it, or one that waits for it, has moved between two looks, or within the last seconds.

If the recorders name a rank (`collectives`), that rank counts; otherwise the one that NCCL's own monitor names
(`nccl_launches`). The stack then says at which line the rank is. If neither names one, the stacks alone decide. In
most hangs one rank does not enter the collective in which all others wait. The stacks show this: the others are inside
`torch.distributed`, and that rank is elsewhere. If all are inside, the ranks are named that wait elsewhere than most.
What the stacks do not show is not guessed: if all ranks are at one place, or most at different ones, none is named.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from muster._shared.records import record, replace
from muster._shared.reports import RankProgress, RankView, Stack, name_ranks
from muster.agent.diagnosis.hangs import HangCause, HangJudge, list_progress
from muster.agent.diagnosis.report_text import describe_progress, format_steps
from muster.agent.diagnosis.tracebacks import is_of_program, list_frames
from muster.agent.features.hangs.collectives import Finding, find_cause
from muster.agent.features.hangs.nccl_launches import find_launch_cause
from muster.agent.runtime.limits import WAITED_S

_WAITING = ("/torch/distributed/", "/torch/nn/parallel/", "/torch/autograd/")
"""Folders of the functions in which a rank waits for its peers; the last is for the collectives of a backward pass."""
_WRAPPERS = ("wrapper", "_fn", "inner", "decorate_context", "wait")
"""Functions of torch that call the one that the user named."""
_PAIRED = ("send", "recv", "send_object_list", "recv_object_list")
"""Calls whose peer makes another call. Gloo's recorder does not contain them."""
_LOADING = "/torch/utils/data/"


@record
class _Position:
    """Where the main thread of a rank is."""

    is_waiting: bool
    """Whether it is in a function of torch that waits for other ranks."""
    function: str
    """That function, or else the innermost function of the program."""
    where: str
    """`main.py:7`: the innermost line of the program itself, or else the innermost of all."""
    is_loading: bool = False
    """Whether it waits for its DataLoader."""

    def describe(self) -> str:
        """Return a text such as `at main.py:7`."""
        return f"at {self.where}" + (", waiting for its DataLoader" if self.is_loading else "")


def explain_hang(stacks: Sequence[Stack]) -> Finding | None:
    """Name the ranks that block the others; None if flight recorders, NCCL's monitor and stacks show none."""
    positions = {
        stack.global_rank: position for stack in stacks if (position := _find_position(stack.text)) is not None
    }
    views = [stack.view for stack in stacks if stack.view is not None]
    recorded = find_cause(views) if views else None
    launched = find_launch_cause(views) if recorded is None or not recorded.ranks else None
    if launched is not None and launched.ranks:
        return _add_places(launched, positions, shows_function=True)
    if recorded is not None:
        return _add_places(recorded, positions)
    seen = _explain_stacks(positions)
    if seen is not None or launched is None:
        return seen
    return _add_places(launched, positions)


def _explain_stacks(positions: "dict[int, _Position]") -> Finding | None:
    waiting = {rank: position for rank, position in positions.items() if position.is_waiting}
    absent = {rank: position for rank, position in positions.items() if not position.is_waiting}
    if not waiting:
        return None
    if absent:
        seen = Counter(position.describe() for position in absent.values()).most_common(1)[0][0]
        clause = f"{_describe_absence(len(absent), waiting)}; last seen {seen}"
        return Finding(ranks=frozenset(absent), clause=clause, waiting=frozenset(waiting))
    return _find_minority(waiting)


def describe_positions(stacks: Iterable[Stack]) -> str | None:
    """Return where most of the ranks are: `ranks 0-1 are at main.py:7`; None if no stack shows it."""
    positions = {
        stack.global_rank: position.describe()
        for stack in stacks
        if (position := _find_position(stack.text)) is not None
    }
    if not positions:
        return None
    usual, _ = Counter(positions.values()).most_common(1)[0]
    ranks = [rank for rank, position in positions.items() if position == usual]
    return f"{name_ranks(ranks)} {'is' if len(ranks) == 1 else 'are'} {usual}"


def _add_places(found: Finding, positions: "dict[int, _Position]", *, shows_function: bool = False) -> Finding:
    """Add the line at which the named ranks were last seen, and the function in which they wait there.

    If no rank is named, and the ranks are at few different lines, add these: the reader sees who does something else.
    """
    if not found.ranks:
        return replace(found, ranks=found.waiting, clause=f"{found.clause}{_describe_apart(found.waiting, positions)}")
    seen = Counter(
        positions[rank].describe()
        + (f", in {positions[rank].function}" if shows_function and positions[rank].is_waiting else "")
        for rank in found.ranks
        if rank in positions
    )
    last = f"; last seen {seen.most_common(1)[0][0]}" if seen else ""
    return replace(found, clause=f"{found.clause}{last}")


def _describe_apart(ranks: Iterable[int], positions: "dict[int, _Position]") -> str:
    """Return a text such as `; rank 1 is at main.py:7, rank 0 at main.py:9`, the fewest ranks first.

    It is "" if all are at one line, or at more than three.
    """
    by_place: dict[str, list[int]] = {}
    for rank in sorted(ranks):
        if rank in positions:
            by_place.setdefault(positions[rank].describe(), []).append(rank)
    if not 2 <= len(by_place) <= 3:
        return ""
    (position, few), *others = sorted(by_place.items(), key=lambda item: len(item[1]))
    first = f"{name_ranks(few)} {'is' if len(few) == 1 else 'are'} {position}"
    return "; " + ", ".join([first, *(f"{name_ranks(rest)} {at}" for at, rest in others)])


def _find_minority(waiting: dict[int, _Position]) -> Finding | None:
    """Return the ranks that wait at another place than more than half of all."""
    (function, where), count = Counter(
        (position.function, position.where) for position in waiting.values()
    ).most_common(1)[0]
    most = {
        rank: position for rank, position in waiting.items() if (position.function, position.where) == (function, where)
    }
    rest = {rank: position for rank, position in waiting.items() if rank not in most}
    if not rest or 2 * count <= len(waiting):
        return None
    other = next(iter(rest.values()))
    clause = f"hung in {other.function} ({other.where}), not in {_describe_wait(most)}"
    return Finding(ranks=frozenset(rest), clause=clause, waiting=frozenset(most))


def _describe_absence(count: int, waiting: dict[int, _Position]) -> str:
    """Return a text such as `did not enter barrier (main.py:7), where rank 0 waits`, for this many ranks."""
    function, where = _find_usual(waiting)
    if function not in _PAIRED:
        return f"did not enter {_describe_wait(waiting)}"
    verb = "waits" if len(waiting) == 1 else "wait"
    return f"{'is' if count == 1 else 'are'} elsewhere while {name_ranks(waiting)} {verb} in {function} ({where})"


def _describe_wait(waiting: dict[int, _Position]) -> str:
    """Return where ranks wait, `all_reduce (main.py:7), where ranks 0, 2 wait`.

    If there are several places, name the most frequent one.
    """
    function, where = _find_usual(waiting)
    ranks = name_ranks(waiting)
    return f"{function} ({where}), where {ranks} {'waits' if len(waiting) == 1 else 'wait'}"


def _find_usual(waiting: dict[int, _Position]) -> tuple[str, str]:
    """Return the function and the line at which most ranks wait."""
    return Counter((position.function, position.where) for position in waiting.values()).most_common(1)[0][0]


def _find_position(text: str) -> _Position | None:
    """Return where the main thread is; None if the text has no frame of it."""
    frames = list_frames(text)
    if not frames:
        return None
    program = next(filter(is_of_program, frames), frames[0])
    in_torch = []
    for frame in frames:  # innermost first
        if is_of_program(frame):
            break
        if any(part in frame["file"] for part in _WAITING):
            in_torch.append(frame["function"])
    named = [name for name in in_torch if name not in _WRAPPERS]
    return _Position(
        is_waiting=bool(in_torch),
        function=(named or in_torch or [program["function"]])[-1],
        where=f"{program['file'].rpartition('/')[2]}:{program['line']}",
        is_loading=any(_LOADING in frame["file"] for frame in frames),
    )


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
    position = describe_positions(stacks)
    positions = () if position is None else (position,)
    return "; ".join(("no rank seems to keep the others waiting", *positions, *format_steps(progress)))


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
    position = _name_place(cause.ranks, (stack.view for stack in stacks if stack.view is not None))
    busy = {each.global_rank for each in list_progress(stacks) if each.is_busy} & (cause.ranks - cause.waiting)
    works = f"; {name_ranks(busy)} {'works' if len(busy) == 1 else 'work'} (CPU time, reads or writes)" if busy else ""
    return f"{name_ranks(cause.ranks)}{position} {cause.clause}{works}"


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
    positions = {(view.node, view.host) for view in views if view.global_rank in ranks}
    if len(positions) != 1:
        return ""
    node, host = positions.pop()
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
