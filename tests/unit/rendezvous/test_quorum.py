"""Who may form a round: the table of the rules, and a search for two sides that both may."""

import itertools
import json

import pytest

from muster.agent.rendezvous.consensus.quorum import QuorumBase, build_base, may_form, may_go_on, may_take_over
from muster.agent.rendezvous.protocol.payloads import build_base as build_json
from muster.agent.rendezvous.protocol.payloads import read_base
from muster.agent.runtime.records import replace


def base(size: int, held: set[int], ended: set[int] = frozenset(), claimed: set[int] = frozenset()) -> QuorumBase:
    return QuorumBase(
        number=3,
        by="m0",
        size=size,
        leader=0,
        held={f"m{rank}": rank for rank in held},
        ended=frozenset(ended),
        claimed=frozenset(claimed),
    )


@pytest.mark.parametrize(
    ("size", "held", "ended", "claimed", "min_nodes", "allowed"),
    [
        (2, {1}, {0}, set(), 1, True),  # the other one of two, leader seen to end
        (2, {1}, set(), set(), 1, False),  # leader only silent: it may be alive and go on alone
        (2, {1}, set(), {0}, 1, True),  # node 0 came back: everybody is accounted for
        (3, {1}, {0}, set(), 1, True),  # half of the two left, and the lower of them
        (3, {2}, {0}, set(), 1, False),  # half, but not the lower: rank 1 may go on
        (3, {1, 2}, set(), set(), 2, True),  # more than half, and the silent leader alone cannot reach min
        (3, {1, 2}, set(), set(), 1, False),  # the silent leader may go on alone
        (5, {2, 3}, {0}, set(), 1, False),  # two of four without the lowest
        (5, {1, 4}, {0}, set(), 1, True),
        (5, {2, 3, 4}, {0}, set(), 1, True),
        (4, {3}, set(), {0, 1, 2}, 3, True),  # all others were replaced by new processes
        (3, {2}, set(), {1}, 1, False),  # late evidence does not make a majority
    ],
)
def test_takeover(size, held, ended, claimed, min_nodes, allowed) -> None:
    assert may_take_over(base(size, held, ended, claimed), min_nodes) is allowed


@pytest.mark.parametrize(
    ("size", "held", "ended", "min_nodes", "allowed"),
    [
        (4, {0}, set(), 1, True),
        (4, {0}, set(), 2, False),
        (4, {0, 1}, set(), 3, True),  # half: no majority can form elsewhere
        (4, {0}, {1, 2, 3}, 4, True),  # all others ended: replacements may come
        (3, {0}, {1}, 3, True),
    ],
)
def test_leader_in_office(size, held, ended, min_nodes, allowed) -> None:
    assert may_go_on(base(size, held, ended), min_nodes) is allowed


def test_unconfirmed_round_needs_both_majorities() -> None:
    old = base(4, {1, 2, 3}, {0})
    new = base(5, {4}, {0})
    assert may_form((old,), 1)
    assert not may_form((old, new), 1)


def test_who_took_over_is_in_office_only_for_its_own_rounds() -> None:
    """Of five left, three took over, and one of them was lost before it had the new round: the others may win it."""
    old = base(6, {1, 4}, {0})
    new = replace(base(3, {0, 2}), own=True)
    assert may_form((new,), 2)
    assert not may_form((old, new), 2)


def test_no_two_sides_may_go_on_at_once() -> None:
    """Every split of up to five members, every set of ended ones each side has seen, every min."""
    for size in range(1, 6):
        ranks = range(size)
        for min_nodes in range(1, size + 1):
            for ended in _subsets(ranks):
                alive = [rank for rank in ranks if rank not in ended]
                for one in _subsets(alive):
                    others = set(alive) - one
                    for seen_one, seen_other in itertools.product(_subsets(ended), repeat=2):
                        assert not (
                            _may(size, one, seen_one, min_nodes) and _may(size, others, seen_other, min_nodes)
                        ), (size, min_nodes, one, seen_one, others, seen_other)


def _may(size: int, held: set[int], ended: set[int], min_nodes: int) -> bool:
    if not held:
        return False
    rule = may_go_on if 0 in held else may_take_over
    return rule(base(size, held, ended), min_nodes)


def _subsets(items) -> list[set]:
    items = list(items)
    return [set(chosen) for count in range(len(items) + 1) for chosen in itertools.combinations(items, count)]


def test_base_travels() -> None:
    before = QuorumBase(number=7, by="m1", size=3, leader=1, indices=(2, 5, 9), held={"a": 2}, ended=frozenset({0}))
    carried = before.carried_by("a")
    assert carried.rank == 2
    assert read_base(json.loads(json.dumps(build_json(carried)))) == carried
    assert replace(build_base(carried), held={"a": 2}) == before
    assert before.find_rank(9) == 2
    assert before.find_rank(3) is None
    assert base(3, {0}).find_rank(2) == 2
