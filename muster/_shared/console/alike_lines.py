"""Prints once what several ranks say alike in a short time: merges equal units of their output. Pure.

Units that are held stand in one queue. A rank joins the first held unit of its text that stands behind all that it has
said before together with others. What it alone has said since then is moved in front of that unit. If there is none,
its unit goes to the end of the queue. So each rank's text is there exactly once, and in its order, and what one rank
alone says does not keep the next lines of all apart. The queue is printed from its head: a unit leaves when all ranks
have said it, or `WINDOW_S` after it was first said. The first rank's text is printed. A text is found by its hash, its
place by bisection among at most `_HELD_LIMIT`, and a unit is moved once. So the work grows with the number of lines.

A warning that ranks write while they start is printed once even where lines are not merged: the first rank's, at once.
What others say of it later is left out.

Whether lines are merged at all: `muster.agent.cli.arguments` (`_merges_lines`), and for `torchx run`
`muster.schedulers.agent_command` (`count_merged_ranks`). Prefixes (`muster.agent.logs.lines`,
`muster.schedulers.runner.job_console`) and what waits until `due_s` are not here.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable
from operator import attrgetter
from typing import Generic, Protocol, TypeVar

from muster._shared.console.units import ALONE, TRACEBACK, WARNING, Masks, Unit, Units

WINDOW_S = 0.5
"""How long a unit waits for other ranks that say it."""

LAUNCH_S = 120.0
"""So long after its first output a launch counts as starting: its warnings are printed once."""

_WARNING_LIMIT = 256
"""How many different warnings one launch may have. A program with more has another purpose than to warn."""
_HELD_LIMIT = 4096
"""How many units are held at most, for ranks that say different things, very fast."""
_NUMBER = attrgetter("number")
_GAP = 1 << 200
"""Between the numbers of units at the end of the queue: others are moved in between."""


class Speaker(Protocol):
    """One stream of one rank, or what a node has merged already. Its attributes do not change."""

    @property
    def stream(self) -> object:
        """Units of different streams are not merged."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks whose lines it carries."""

    @property
    def launch(self) -> object:
        """The same object for all workers that were started together.

        When another one speaks, nothing of this one is held on.
        """

    @property
    def peers(self) -> int:
        """How many ranks this stream has: when all have said a unit, it waits for no other. 0: not known."""


_S = TypeVar("_S", bound=Speaker)


class HeldUnit(Generic[_S]):
    """A unit, and whose it is."""

    __slots__ = (
        "_count",
        "due_s",
        "is_whole",
        "key",
        "kind",
        "number",
        "speakers",
        "text",
    )

    def __init__(self, unit: Unit, speaker: _S, due_s: float) -> None:
        self.kind = unit.kind
        self.text = unit.text
        r"""Whole lines, with their `\n`, as the first speaker said them."""
        self.key = speaker.stream, unit.key
        self.speakers = [speaker]
        """In the order in which they said it."""
        self.number = 0
        """Its place in the queue: numbers rise from its head."""
        self.due_s = due_s
        self._count = 0
        self.is_whole = unit.kind == ALONE
        """Whether it waits for no other rank."""
        self._count_ranks(speaker)

    @property
    def is_traceback(self) -> bool:
        """Whether it is one, or a part of one."""
        return self.kind == TRACEBACK

    def join(self, speaker: _S) -> None:
        """Count one more speaker of it."""
        self.speakers.append(speaker)
        self._count_ranks(speaker)

    def _count_ranks(self, speaker: _S) -> None:
        self._count += len(speaker.ranks)
        self.is_whole = self.is_whole or 0 < speaker.peers <= self._count


class _QueuePosition(Generic[_S]):
    """Where a rank is in the queue."""

    __slots__ = ("fixed", "last", "loose")

    def __init__(self) -> None:
        self.last: HeldUnit[_S] | None = None
        """The last unit that it has said."""
        self.fixed: HeldUnit[_S] | None = None
        """The last that keeps its place."""
        self.loose: list[HeldUnit[_S]] = []
        """Held ones behind that, which it alone has said."""


def _find_behind(alike: "list[HeldUnit[_S]]", last: "HeldUnit[_S] | None") -> "HeldUnit[_S] | None":
    index = 0 if last is None else bisect_right(alike, last.number, key=_NUMBER)
    return alike[index] if index < len(alike) else None


class AlikeLines(Generic[_S]):
    """The lines of several speakers on their way to one console. Only one thread at a time may call it."""

    def __init__(self, *, merges_lines: bool) -> None:
        """Hold nothing yet.

        Args:
            merges_lines: False: of all units only warnings are printed once.
        """
        self._merges_lines = merges_lines
        self._masks = Masks()
        self._units: dict[_S, Units] = {}
        self._blocks: dict[_S, Units] = {}
        """The blocks of those that hold rows."""
        self._queue: list[HeldUnit[_S]] = []
        self._alike: dict[tuple[object, bytes], list[HeldUnit[_S]]] = {}
        """The held units of one text, in the order of the queue. Those in front may be printed."""
        self._number = 0
        """The number of the unit that left the queue last."""
        self._positions: dict[int, _QueuePosition[_S]] = {}
        """By rank."""
        self._warned: dict[tuple[_S, bytes], int] = {}
        """How often each has written a warning."""
        self._launch: object = self  # not a speaker's
        self._launch_until_s = 0.0
        self._printed: dict[bytes, int] = {}
        """How often each warning of the launch was printed."""
        self._out: list[HeldUnit[_S]] = []
        """What is to be printed now."""

    def push(self, speaker: _S, lines: bytes, now_s: float) -> list[HeldUnit[_S]]:
        r"""Take whole lines of a speaker, which end in `\n`, and return what is to be printed now, in this order."""
        if speaker.launch is not self._launch:
            self._hold_nothing()
            self._launch, self._launch_until_s = speaker.launch, now_s + LAUNCH_S
            self._printed.clear()
        if not self._merges_lines and not self.holds_rows(speaker) and b"Warning: " not in lines:
            self._out.append(HeldUnit(Unit(ALONE, b"", lines, now_s), speaker, now_s))
            return self._take_out()
        units = self._units.get(speaker)
        if units is None:
            units = self._units[speaker] = Units(self._masks, holds_tracebacks=self._merges_lines)
        for unit in units.cut(lines, now_s):
            self._add(speaker, unit, now_s)
            self._release(now_s)
        if units.holds_rows:
            self._blocks[speaker] = units
        else:
            self._blocks.pop(speaker, None)
        return self._take_out()

    @property
    def due_s(self) -> float | None:
        """When to call `take_due` next. None: nothing is held."""
        times = [each.since_s + WINDOW_S for each in self._blocks.values()]
        if self._queue:
            times.append(self._queue[0].due_s)
        return min(times) if times else None

    def holds_rows(self, speaker: _S) -> bool:
        """Return whether its last rows may be the beginning of a warning or a traceback."""
        return speaker in self._blocks

    def take_due(self, now_s: float) -> list[HeldUnit[_S]]:
        """Return what has been held long enough, and what other speakers hold that equals it so far."""
        blocks = list(self._blocks.items())
        due = {(each.stream, units.held) for each, units in blocks if units.since_s + WINDOW_S <= now_s}
        for speaker, units in blocks if due else ():
            if (speaker.stream, units.held) in due:
                self._end_block(speaker, now_s, may_go_on=True)
        self._release(now_s)
        return self._take_out()

    def take_all(self) -> list[HeldUnit[_S]]:
        """Return all that is held."""
        self._hold_nothing()
        return self._take_out()

    def end(self, speaker: _S, now_s: float) -> list[HeldUnit[_S]]:
        """End a speaker, and return what is to be printed. What it has said may still be held."""
        self._end_block(speaker, now_s)
        self._release(now_s)
        self._units.pop(speaker, None)
        for key in [key for key in self._warned if key[0] is speaker]:
            del self._warned[key]
        return self._take_out()

    def _take_out(self) -> list[HeldUnit[_S]]:
        out, self._out = self._out, []
        return out

    def _hold_nothing(self) -> None:
        for speaker in list(self._blocks):
            self._end_block(speaker, 0.0)
        while self._queue:
            self._leave()

    def _end_block(self, speaker: _S, now_s: float, *, may_go_on: bool = False) -> None:
        units = self._blocks.pop(speaker, None)
        for unit in units.end_block(may_go_on=may_go_on) if units is not None else ():
            self._add(speaker, unit, now_s)

    def _add(self, speaker: _S, unit: Unit, now_s: float) -> None:
        entry = self._find(speaker, unit) if self._merges_lines and unit.kind != ALONE else None
        if unit.kind == WARNING and self._repeats(speaker, unit, now_s) and entry is None:
            return
        if entry is None:
            entry = HeldUnit(unit, speaker, unit.since_s + WINDOW_S)
            if not self._merges_lines:
                self._out.append(entry)
                return
            self._insert(entry, (self._queue[-1].number if self._queue else self._number) + _GAP)
        else:
            entry.join(speaker)
            self._fix(entry)
            self._hasten(self._find_place(entry), unit.since_s + WINDOW_S)
        for rank in speaker.ranks:
            place = self._positions.setdefault(rank, _QueuePosition())
            place.last = entry
            if len(entry.speakers) > 1 or len(speaker.ranks) > 1:
                place.fixed, place.loose = entry, []
            else:
                place.loose.append(entry)

    def _fix(self, entry: HeldUnit[_S]) -> None:
        """Fix the place of a unit that is of several speakers now, and with it what its first one said before it."""
        for rank in entry.speakers[0].ranks:
            place = self._positions[rank]
            if place.loose and place.loose[0].number <= entry.number:
                del place.loose[: bisect_right(place.loose, entry.number, key=_NUMBER)]
                place.fixed = entry

    def _find(self, speaker: _S, unit: Unit) -> HeldUnit[_S] | None:
        """Return the held unit that the speaker joins. What the speaker alone has said then stands in front of it."""
        alike = self._alike.get((speaker.stream, unit.key))
        if alike is None:
            return None
        if alike[0].number <= self._number:  # already printed
            del alike[: bisect_right(alike, self._number, key=_NUMBER)]
        places = [place for rank in speaker.ranks if (place := self._positions.get(rank)) is not None]
        if len(places) == 1 and places[0].loose:
            first = _find_behind(alike, places[0].fixed)
            for found in () if first is None else (first, alike[-1]):
                if found.speakers[0].ranks != speaker.ranks and self._move(places[0].loose, found):
                    return found
        last = max((place.last for place in places if place.last is not None), key=_NUMBER, default=None)
        return _find_behind(alike, last)

    def _move(self, loose: list[HeldUnit[_S]], target: HeldUnit[_S]) -> bool:
        """Put those of these units that stand behind the target in front of it. False: no numbers are left there."""
        moved = loose[bisect_right(loose, target.number, key=_NUMBER) :]
        place = self._find_place(target)
        low = self._queue[place - 1].number if place else self._number
        step = (target.number - low) // (len(moved) + 1)
        if step == 0:
            return False
        for count, entry in enumerate(moved, 1):
            alike = self._alike.get(entry.key)
            if entry.kind != ALONE and alike is not None:
                del alike[bisect_left(alike, entry.number, key=_NUMBER)]
                if not alike:
                    del self._alike[entry.key]
            del self._queue[self._find_place(entry)]
            entry.due_s = min(entry.due_s, target.due_s)
            self._insert(entry, low + count * step)
        return True

    def _find_place(self, entry: HeldUnit[_S]) -> int:
        return bisect_left(self._queue, entry.number, key=_NUMBER)

    def _insert(self, entry: HeldUnit[_S], number: int) -> None:
        entry.number = number
        place = self._find_place(entry)
        self._queue.insert(place, entry)
        self._hasten(place - 1, entry.due_s)
        if entry.kind != ALONE:
            insort(self._alike.setdefault(entry.key, []), entry, key=_NUMBER)

    def _hasten(self, place: int, due_s: float) -> None:
        """Print a unit, and all in front of it, no later than this: rows of a traceback are older than their unit."""
        while place >= 0 and self._queue[place].due_s > due_s:
            self._queue[place].due_s = due_s
            place -= 1

    def _release(self, now_s: float) -> None:
        while self._queue and (
            self._queue[0].is_whole or self._queue[0].due_s <= now_s or len(self._queue) > _HELD_LIMIT
        ):
            self._leave()

    def _leave(self) -> None:
        head = self._queue.pop(0)
        self._number = head.number
        self._out.append(head)
        alike = self._alike.get(head.key)
        if alike is not None and alike[-1] is head:
            del self._alike[head.key]
        if len(head.speakers) == 1:
            self._fix(head)

    def _repeats(self, speaker: _S, unit: Unit, now_s: float) -> bool:
        """Return whether a warning of the launch was already printed as often as the speaker has written it."""
        if now_s > self._launch_until_s or len(self._printed) > _WARNING_LIMIT:
            return False
        times = self._warned.get((speaker, unit.key), 0) + 1
        self._warned[speaker, unit.key] = times
        if times <= self._printed.get(unit.key, 0):
            return True
        self._printed[unit.key] = times
        return False


def format_ranks(ranks: Iterable[int]) -> str:
    """Return a text such as `0-2,5`."""
    from muster._shared.reports import name_ranks  # only where lines are merged

    return name_ranks(ranks).partition(" ")[2].replace(" ", "")
