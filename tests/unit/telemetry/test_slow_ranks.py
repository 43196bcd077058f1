"""Slow ranks: found in histories with one, and not in those where all are equal."""

import random
from collections.abc import Callable, Iterable, Iterator
from itertools import islice

import pytest

from muster._shared.goodput import find_median
from muster._shared.job_view import RankStatus
from muster._shared.records import replace
from muster.agent.telemetry import slow_ranks
from muster.agent.telemetry.slow_ranks import LOOKS, Arrivals, JobSlowRanks, SingleWaits

STEP_S = 0.1

ListLooks = Callable[[random.Random, int], Iterator[dict[int, float]]]


def draw_equal(draw: random.Random, ranks: int) -> dict[int, float]:
    """Equal ranks: a tenth of noise, and now and then one is much later."""
    numbers = {rank: STEP_S * draw.gauss(1.0, 0.1) for rank in range(ranks)}
    if draw.random() < 0.1:
        numbers[draw.randrange(ranks)] += STEP_S * draw.expovariate(1.0) * 5
    return numbers


def draw_half_a_core(draw: random.Random, ranks: int) -> dict[int, float]:
    """The same, but rank 1 has half a core: a step takes it twice as long."""
    numbers = draw_equal(draw, ranks)
    return {**numbers, 1: numbers[1] + STEP_S}


def list_contended(draw: random.Random, ranks: int) -> Iterator[dict[int, float]]:
    """Equal ranks whose cores other processes use, too, now more and now less; what one look sees lasts for a while."""
    shares = [draw.gauss(0.0, 1.0) for _ in range(ranks)]
    while True:
        shares = [0.5 * share + 0.75**0.5 * draw.gauss(0.0, 1.0) for share in shares]
        yield {rank: number + 0.15 * STEP_S * shares[rank] for rank, number in draw_equal(draw, ranks).items()}


def list_looks(draw_look: Callable[[random.Random, int], dict[int, float]]) -> ListLooks:
    return lambda draw, ranks: iter(lambda: draw_look(draw, ranks), None)


def find_in(list_of_looks: ListLooks, seed: int, ranks: int) -> set[int]:
    """The ranks that were ever found in 120 looks."""
    arrivals, found = Arrivals(), set[int]()
    for look, numbers in enumerate(islice(list_of_looks(random.Random(seed), ranks), 120)):
        arrivals.record(numbers)
        if look % 4 == 0:
            found |= {each.rank for each in arrivals.find(STEP_S)}
    return found


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("looks", [list_looks(draw_equal), list_contended], ids=["alone", "contended"])
def test_equal_ranks_give_no_finding_in_50_histories(looks: ListLooks, ranks: int) -> None:
    assert [seed for seed in range(50) if find_in(looks, seed, ranks)] == []


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_a_rank_at_half_a_core_is_found_and_no_other(ranks: int) -> None:
    assert [find_in(list_looks(draw_half_a_core), seed, ranks) for seed in range(50)] == [{1}] * 50


def test_the_work_grows_with_the_ranks_and_not_with_their_square(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is done on the leader's loop."""
    handled = [0]

    def count(values: Iterable[float]) -> float:
        handled[0] += len(numbers := list(values))
        return find_median(numbers)

    monkeypatch.setattr(slow_ranks, "find_median", count)
    arrivals, draw = Arrivals(), random.Random(1)
    for _ in range(LOOKS):
        numbers = draw_equal(draw, 256)
        arrivals.record({rank: number + STEP_S * (rank % 5 < 2) for rank, number in numbers.items()})
    arrivals.find(STEP_S)
    assert handled[0] <= 2 * LOOKS * 256


def test_how_late_it_is_and_how_often_it_was_the_last() -> None:
    arrivals, draw = Arrivals(), random.Random(1)
    for _ in range(32):
        arrivals.record(draw_half_a_core(draw, 8))
    [found] = arrivals.find(STEP_S)
    assert found.late_s == pytest.approx(STEP_S, rel=0.15)
    assert found.share > 0.9


def test_a_rank_that_recovers_is_not_named_for_ever() -> None:
    arrivals, draw = Arrivals(), random.Random(1)
    for _ in range(32):
        arrivals.record(draw_half_a_core(draw, 4))
    assert arrivals.find(STEP_S)
    for _ in range(20):
        arrivals.record(draw_equal(draw, 4))
    assert arrivals.find(STEP_S) == []


def test_a_few_looks_say_nothing_and_other_ranks_begin_anew() -> None:
    arrivals, draw = Arrivals(), random.Random(1)
    for _ in range(7):
        arrivals.record(draw_half_a_core(draw, 4))
    assert arrivals.find(STEP_S) == []
    arrivals.record(draw_half_a_core(draw, 4))
    assert arrivals.find(STEP_S)
    arrivals.record(draw_half_a_core(draw, 3))
    assert arrivals.find(STEP_S) == []


def test_what_is_less_than_a_twentieth_of_a_step_is_no_finding() -> None:
    arrivals = Arrivals()
    for look in range(32):
        arrivals.record({0: 0.0, 1: 0.01 + look * 1e-6, 2: 0.0})
    assert arrivals.find(1.0) == []
    assert [each.rank for each in arrivals.find(0.1)] == [1]


def make_ranks(steps: list[int], still_s: list[float], rate: float = 10.0) -> list[RankStatus]:
    return [
        RankStatus(global_rank=rank, node=0, local_rank=rank, step=step, still_s=still, rate=rate)
        for rank, (step, still) in enumerate(zip(steps, still_s, strict=True))
    ]


def test_a_rank_that_kept_the_others_waiting_once() -> None:
    waits = SingleWaits()
    for second in range(60):
        is_stuck = 10 <= second < 51
        still_s = [second - 10.0] * 3 if is_stuck else [0.05] * 3
        behind = 1 if is_stuck else 0
        waits.record(make_ranks([100, 100 - behind, 100], [still_s[0], second + 0.0, still_s[2]]), float(second))
    assert waits.find(60.0) == {1: 40.0}
    assert waits.find(400.0) == {}


def test_ranks_of_which_many_are_behind_or_none_waits_say_nothing() -> None:
    waits = SingleWaits()
    waits.record(make_ranks([100, 99], [50.0, 50.0]), 1.0)  # of two, one would always be behind
    waits.record(make_ranks([100, 99, 99], [50.0, 1.0, 1.0]), 2.0)
    waits.record(make_ranks([100, 99, 100], [0.5, 0.5, 0.5]), 3.0)
    waits.record(make_ranks([100, 99, 100], [5.0, 5.0, 5.0], rate=0.5), 4.0)  # steps of 2 s
    waits.record(make_ranks([100, 100, 100], [50.0, 50.0, 50.0]), 5.0)
    assert waits.find(6.0) == {}


@pytest.mark.parametrize(("age_s", "found"), [(0.5, {2: 2.5}), (2.5, {})])
def test_a_rank_is_behind_by_what_was_known_when_it_was_looked_at(age_s: float, found: dict[int, float]) -> None:
    """All have reached the same step since, and save a checkpoint."""
    waits, ranks = SingleWaits(), make_ranks([100, 100, 95], [3.0, 3.0, 0.1])
    waits.record([*ranks[:2], replace(ranks[2], node=1)], 1.0, {0: 0.0, 1: age_s})
    assert waits.find(1.0) == found


@pytest.mark.parametrize(("age_s", "slow"), [(0.9, [2]), (3.0, [])])
def test_rates_of_different_moments_are_not_compared(age_s: float, slow: list[int]) -> None:
    """While all became faster, one node was looked at before, and the others after."""
    job, ranks = JobSlowRanks(), make_ranks([100, 100, 100], [0.0, 0.0, 0.0])
    ranks[2] = replace(ranks[2], node=1, rate=5.0)
    for look in range(LOOKS):
        found = job.find(1, ranks, (), {}, 100.0 + 10.0 * look, {0: 0.0, 1: age_s})
    assert [each.global_rank for each in found] == slow


def test_what_was_seen_in_a_round_says_nothing_of_the_ranks_of_the_next() -> None:
    job = JobSlowRanks()
    assert [each.global_rank for each in job.find(1, make_ranks([9, 9, 8], [3.0, 3.0, 3.0]), (), {}, 100.0)] == [2]
    assert job.find(2, make_ranks([1, 1, 1], [0.0, 0.0, 0.0]), (), {}, 101.0) == ()
