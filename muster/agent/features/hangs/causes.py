"""Finds the ranks that block the others, from the flight recorders and stacks of a job that hangs. Pure.

If the recorders name a rank (`collectives`), that rank counts; otherwise the one that NCCL's own monitor names
(`nccl_launches`). The stack then says at which line the rank is. If neither names one, the stacks alone decide. In
most hangs one rank does not enter the collective in which all others wait. The stacks show this: the others are inside
`torch.distributed`, and that rank is elsewhere. If all are inside, the ranks are named that wait elsewhere than most.
What the stacks do not show is not guessed: if all ranks are at one place, or most at different ones, none is named.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from muster._shared.records import record, replace
from muster._shared.reports import Stack, name_ranks
from muster.agent.diagnosis.tracebacks import is_of_program, list_frames
from muster.agent.features.hangs.collectives import Finding, find_cause
from muster.agent.features.hangs.nccl_launches import find_launch_cause

_WAITING = ("/torch/distributed/", "/torch/nn/parallel/", "/torch/autograd/")
"""Folders of the functions in which a rank waits for its peers; the last is for the collectives of a backward pass."""
_WRAPPERS = ("wrapper", "_fn", "inner", "decorate_context", "wait")
"""Functions of torch that call the one that the user named."""
_PAIRED = ("send", "recv", "send_object_list", "recv_object_list")
"""Calls whose peer makes another call. Gloo's recorder does not contain them."""
_LOADING = "/torch/utils/data/"


@record
class _Place:
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
    places = {stack.global_rank: place for stack in stacks if (place := _find_place(stack.text)) is not None}
    views = [stack.view for stack in stacks if stack.view is not None]
    recorded = find_cause(views) if views else None
    launched = find_launch_cause(views) if recorded is None or not recorded.ranks else None
    if launched is not None and launched.ranks:
        return _add_places(launched, places, shows_function=True)
    if recorded is not None:
        return _add_places(recorded, places)
    seen = _explain_stacks(places)
    if seen is not None or launched is None:
        return seen
    return _add_places(launched, places)


def _explain_stacks(places: "dict[int, _Place]") -> Finding | None:
    waiting = {rank: place for rank, place in places.items() if place.is_waiting}
    absent = {rank: place for rank, place in places.items() if not place.is_waiting}
    if not waiting:
        return None
    if absent:
        seen = Counter(place.describe() for place in absent.values()).most_common(1)[0][0]
        clause = f"{_describe_absence(len(absent), waiting)}; last seen {seen}"
        return Finding(ranks=frozenset(absent), clause=clause, waiting=frozenset(waiting))
    return _find_minority(waiting)


def describe_places(stacks: Iterable[Stack]) -> str | None:
    """Return where most of the ranks are: `ranks 0-1 are at main.py:7`; None if no stack shows it."""
    places = {stack.global_rank: place.describe() for stack in stacks if (place := _find_place(stack.text)) is not None}
    if not places:
        return None
    usual, _ = Counter(places.values()).most_common(1)[0]
    ranks = [rank for rank, place in places.items() if place == usual]
    return f"{name_ranks(ranks)} {'is' if len(ranks) == 1 else 'are'} {usual}"


def _add_places(found: Finding, places: "dict[int, _Place]", *, shows_function: bool = False) -> Finding:
    """Add the line at which the named ranks were last seen, and the function in which they wait there.

    If no rank is named, and the ranks are at few different lines, add these: the reader sees who does something else.
    """
    if not found.ranks:
        return replace(found, ranks=found.waiting, clause=f"{found.clause}{_describe_apart(found.waiting, places)}")
    seen = Counter(
        places[rank].describe()
        + (f", in {places[rank].function}" if shows_function and places[rank].is_waiting else "")
        for rank in found.ranks
        if rank in places
    )
    last = f"; last seen {seen.most_common(1)[0][0]}" if seen else ""
    return replace(found, clause=f"{found.clause}{last}")


def _describe_apart(ranks: Iterable[int], places: "dict[int, _Place]") -> str:
    """Return a text such as `; rank 1 is at main.py:7, rank 0 at main.py:9`, the fewest ranks first.

    It is "" if all are at one line, or at more than three.
    """
    by_place: dict[str, list[int]] = {}
    for rank in sorted(ranks):
        if rank in places:
            by_place.setdefault(places[rank].describe(), []).append(rank)
    if not 2 <= len(by_place) <= 3:
        return ""
    (place, few), *others = sorted(by_place.items(), key=lambda item: len(item[1]))
    first = f"{name_ranks(few)} {'is' if len(few) == 1 else 'are'} {place}"
    return "; " + ", ".join([first, *(f"{name_ranks(rest)} {at}" for at, rest in others)])


def _find_minority(waiting: dict[int, _Place]) -> Finding | None:
    """Return the ranks that wait at another place than more than half of all."""
    (function, where), count = Counter((place.function, place.where) for place in waiting.values()).most_common(1)[0]
    most = {rank: place for rank, place in waiting.items() if (place.function, place.where) == (function, where)}
    rest = {rank: place for rank, place in waiting.items() if rank not in most}
    if not rest or 2 * count <= len(waiting):
        return None
    other = next(iter(rest.values()))
    clause = f"hung in {other.function} ({other.where}), not in {_describe_wait(most)}"
    return Finding(ranks=frozenset(rest), clause=clause, waiting=frozenset(most))


def _describe_absence(count: int, waiting: dict[int, _Place]) -> str:
    """Return a text such as `did not enter barrier (main.py:7), where rank 0 waits`, for this many ranks."""
    function, where = _find_usual(waiting)
    if function not in _PAIRED:
        return f"did not enter {_describe_wait(waiting)}"
    verb = "waits" if len(waiting) == 1 else "wait"
    return f"{'is' if count == 1 else 'are'} elsewhere while {name_ranks(waiting)} {verb} in {function} ({where})"


def _describe_wait(waiting: dict[int, _Place]) -> str:
    """Return where ranks wait, `all_reduce (main.py:7), where ranks 0, 2 wait`.

    If there are several places, name the most frequent one.
    """
    function, where = _find_usual(waiting)
    ranks = name_ranks(waiting)
    return f"{function} ({where}), where {ranks} {'waits' if len(waiting) == 1 else 'wait'}"


def _find_usual(waiting: dict[int, _Place]) -> tuple[str, str]:
    """Return the function and the line at which most ranks wait."""
    return Counter((place.function, place.where) for place in waiting.values()).most_common(1)[0][0]


def _find_place(text: str) -> _Place | None:
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
    return _Place(
        is_waiting=bool(in_torch),
        function=(named or in_torch or [program["function"]])[-1],
        where=f"{program['file'].rpartition('/')[2]}:{program['line']}",
        is_loading=any(_LOADING in frame["file"] for frame in frames),
    )
