"""Finds ranks that make the others wait. Pure.

It compares numbers of all ranks from one look, in seconds: when each arrived at the same step or collective, by one
clock, or how long a step of each takes. A rank's lateness is how much its number exceeds the median of the others.

A rank is chronically slow if it was the last one in most of the last looks, and was later in each quarter of them than
noise explains. That means more than 2.5 times the spread of the others' lateness, more than twice the spread of its
own, and more than a twentieth of a step. If another process takes a rank's core for a while, that time is shorter.

Arrivals at a step mean something only for ranks that wait for one another. Among others, a rank that has started later
stays as late, whatever it does.
"""

import operator
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from muster._shared.goodput import find_median
from muster._shared.job_view import RankStatus, SlowRank
from muster._shared.records import NO_ITEMS, record, replace

LOOKS = 32
"""The number of last looks that count."""
WINDOW_S = 10.0
"""Time between two looks at the ranks' rates, which are means over this time. More frequent looks would count the same
steps twice."""
_LEAST_LOOKS = 8
LEAST_STEPS = 16
"""The least looks at steps, which follow one another faster than the other looks."""
_SHARE = 0.75
_FLOOR_S = 0.001
"""What reading the numbers one after another may add to a difference."""
_LEAST_FRACTION = 0.05
"""Fraction of a step. Less is not worth a line."""
_SIGMA = 1.4826
"""The standard deviation of a normal distribution divided by its median absolute deviation."""
_LEAST_RATE = 1e-9
"""Steps per second. Another node may report anything, and the inverse must stay finite."""
_ONCE_STEPS = 10.0
_ONCE_S = 1.0
_ONCE_KEPT_S = 300.0
_APART_S = 2.0
"""Rates that were looked at so far apart are not compared."""


@record
class Lateness:
    """The lateness of one chronically slow rank."""

    rank: int
    late_s: float
    share: float
    """The share of looks at which it was the last one."""


class Arrivals:
    """Looks of one kind at a fixed set of ranks."""

    def __init__(self, least_looks: int = _LEAST_LOOKS) -> None:
        self._least_looks = least_looks
        self._looks: deque[dict[int, float]] = deque(maxlen=LOOKS)
        """How much later than the median of the others each rank was; less than 0 means earlier."""

    def record(self, numbers: Mapping[int, float]) -> None:
        """Record one look, by rank. If the ranks differ from those before, begin anew."""
        if len(numbers) < 2:
            return
        if self._looks and self._looks[-1].keys() != numbers.keys():
            self._looks.clear()
        ordered, late = sorted((number, rank) for rank, number in numbers.items()), {}
        low, high = (len(ordered) - 2) // 2, (len(ordered) - 1) // 2  # of the others
        for index, (number, rank) in enumerate(ordered):
            late[rank] = number - (ordered[low + (low >= index)][0] + ordered[high + (high >= index)][0]) / 2
        self._looks.append(late)

    def find(self, step_s: float | None) -> list[Lateness]:
        """Return the chronically slow ranks, the latest first; `step_s` is the duration of a step, None if unknown."""
        if len(self._looks) < self._least_looks:
            return []
        latest = [max(look.values()) for look in self._looks]
        found = [self._judge(rank, step_s or 0.0, latest) for rank in self._looks[-1]]
        return sorted((each for each in found if each is not None), key=lambda each: -each.late_s)

    def _judge(self, rank: int, step_s: float, latest: Sequence[float]) -> Lateness | None:
        own, least_s = [look[rank] for look in self._looks], max(_FLOOR_S, _LEAST_FRACTION * step_s)
        late_s, size = find_median(own), len(own)
        share = sum(map(operator.ge, own, latest)) / size
        if late_s <= least_s or share < _SHARE:  # few are left: what follows looks at all ranks
            return None
        others = [late for look in self._looks for each, late in look.items() if each != rank]
        noise_s = max(least_s, 2.5 * _spread(others), 2 * _spread(own))
        quarters = [find_median(own[size * each // 4 : size * (each + 1) // 4]) for each in range(4)]
        if min(quarters) <= noise_s:
            return None
        return Lateness(rank=rank, late_s=late_s, share=share)


def _spread(values: Iterable[float]) -> float:
    numbers = list(values)
    middle = find_median(numbers)
    return _SIGMA * find_median(abs(number - middle) for number in numbers)


class SingleWaits:
    """Ranks that have made all others wait once, because they were behind while the first ranks stood still."""

    def __init__(self) -> None:
        self._waits: dict[int, tuple[float, float]] = {}
        """How long the others waited, and when that was last seen, by rank."""

    def record(self, ranks: Iterable[RankStatus], now_s: float, ages_s: Mapping[int, float] = NO_ITEMS) -> None:
        """Record one look at all ranks of a running round. For `ages_s` see `JobSlowRanks.find`."""
        known = [rank for rank in ranks if rank.step is not None and rank.still_s is not None]
        most = max((rank.step or 0 for rank in known), default=0)
        first = [rank for rank in known if rank.step == most]
        behind = [rank for rank in known if rank.step != most]
        if not behind or len(behind) * 2 >= len(known):
            return
        last = min(behind, key=lambda each: each.step or 0)
        # How long they had waited when that rank was looked at.
        waited_s = min((rank.still_s or 0.0) + ages_s.get(rank.node, 0.0) for rank in first)
        waited_s -= ages_s.get(last.node, 0.0)
        rate = max((rank.rate or 0.0) for rank in first)
        if waited_s < max(_ONCE_S, _ONCE_STEPS / rate if rate > 0 else _ONCE_S):
            return
        rank = last.global_rank
        before_s, at_s = self._waits.get(rank, (0.0, now_s))
        longest_s = max(before_s, waited_s) if now_s - at_s < _ONCE_KEPT_S else waited_s
        self._waits[rank] = (longest_s, now_s)

    def find(self, now_s: float) -> dict[int, float]:
        """Return how long each such rank has made the others wait in the last minutes."""
        self._waits = {rank: wait for rank, wait in self._waits.items() if now_s - wait[1] < _ONCE_KEPT_S}
        return {rank: wait[0] for rank, wait in self._waits.items()}


def build_slow_rank(found: Lateness, rank: RankStatus, host: str) -> SlowRank:
    """Return what is shown of a finding."""
    return SlowRank(
        global_rank=rank.global_rank,
        node=rank.node,
        host=host,
        is_chronic=True,
        late_s=round(found.late_s, 4),
        late_fraction=round(min(1.0, found.late_s * rank.rate), 3) if rank.rate else 0.0,
        share=round(found.share, 2),
    )


class JobSlowRanks:
    """Slow ranks of the whole job: what nodes have found, and what their rates and steps show."""

    def __init__(self) -> None:
        self._round = 0
        self._paces = Arrivals()
        self._waits = SingleWaits()
        self._due_s = 0.0
        self._found: tuple[SlowRank, ...] = ()

    def find(
        self,
        number: int,
        ranks: Sequence[RankStatus],
        reported: Iterable[SlowRank],
        hosts: Mapping[int, str],
        now_s: float,
        ages_s: Mapping[int, float] = NO_ITEMS,
    ) -> tuple[SlowRank, ...]:
        """Look at the ranks of a running round, and return the slow ones, the slowest first.

        Args:
            number: the round's.
            ranks: all of them; empty in a job that lists none.
            reported: what the nodes have found among their own ranks.
            hosts: the nodes' names, by group rank.
            now_s: by the monotonic clock.
            ages_s: seconds since the nodes were looked at, by group rank; one that is missing was looked at now.
        """
        if number != self._round:
            self._round, self._paces, self._waits = number, Arrivals(), SingleWaits()
        self._waits.record(ranks, now_s, ages_s)
        rates = {rank.global_rank: rank.rate for rank in ranks if rank.rate is not None and rank.rate > _LEAST_RATE}
        if now_s >= self._due_s and max(ages_s.values(), default=0.0) - min(ages_s.values(), default=0.0) < _APART_S:
            self._due_s = now_s + WINDOW_S
            self._paces.record({rank: 1 / rate for rank, rate in rates.items()})
        by_rank = {rank.global_rank: rank for rank in ranks}
        found = {
            rank: SlowRank(
                global_rank=rank,
                node=by_rank[rank].node,
                host=hosts.get(by_rank[rank].node, ""),
                is_chronic=False,
                late_s=round(late_s, 2),
            )
            for rank, late_s in self._waits.find(now_s).items()
            if rank in by_rank
        }
        for late in self._paces.find(1 / find_median(rates.values()) if rates else None):
            if late.rank in by_rank:
                found[late.rank] = build_slow_rank(late, by_rank[late.rank], hosts.get(by_rank[late.rank].node, ""))
        for each in reported:
            before = found.get(each.global_rank)
            if before is None or not before.is_chronic or before.late_s < each.late_s:
                found[each.global_rank] = each
        parts = {each.global_rank: each.late_fraction for each in self._found}  # none while ending
        known = [
            replace(each, late_fraction=each.late_fraction or parts.get(rank, 0.0)) for rank, each in found.items()
        ]
        self._found = tuple(sorted(known, key=lambda each: (not each.is_chronic, -each.late_s)))
        return self._found

    def repeat(self) -> tuple[SlowRank, ...]:
        """Return the last findings, for a job that does not run at the moment."""
        return self._found
