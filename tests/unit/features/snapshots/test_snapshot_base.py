"""Which snapshot a round continues, and which of a node's slots stay for it."""

import pytest

from muster._shared.snapshot_file import COMPLETE, EMPTY, WRITING, Slot
from muster.agent.features.snapshots.keeping import decide_keeping, find_kept, find_newest, find_whole, is_kept
from muster.agent.features.snapshots.leader import choose_base
from muster.agent.features.snapshots.messages import Generation, Holding
from muster.agent.round import find_lineage

ROUND_1, ROUND_2, ROUND_3 = (find_lineage(number, "leader") for number in (1, 2, 3))


def hold(step, group_rank, size=2, lineage=ROUND_1, is_copy=False, is_replicated=False):
    generation = Generation(lineage=lineage, step=step, size=size, is_replicated=is_replicated)
    return Holding(generation=generation, group_rank=group_rank, first_rank=2 * group_rank, nproc=2, is_copy=is_copy)


def key(generation):
    return None if generation is None else generation.key


def test_a_later_rounds_lineage_is_greater_whatever_its_leader():
    assert ROUND_1 < ROUND_2 < ROUND_3
    assert find_lineage(7, "a") != find_lineage(7, "b")
    assert find_lineage(7, "a") < find_lineage(8, "b") < 1 << 53


def test_the_newest_that_all_have_is_the_base():
    assert choose_base([], 2) is None
    assert choose_base([hold(5, 0)], 2) is None
    assert key(choose_base([hold(5, 0), hold(6, 0), hold(5, 1), hold(4, 1)], 2)) == (ROUND_1, 5)


def test_the_later_round_comes_before_the_greater_step():
    old = [hold(9, 0), hold(9, 1)]
    assert key(choose_base([*old, hold(3, 0, lineage=ROUND_2), hold(3, 1, lineage=ROUND_2)], 2)) == (ROUND_2, 3)
    assert key(choose_base([*old, hold(3, 0, lineage=ROUND_2)], 2)) == (ROUND_1, 9)


def test_a_copy_stands_for_its_node():
    assert key(choose_base([hold(5, 0), hold(6, 0), hold(5, 1, is_copy=True)], 2)) == (ROUND_1, 5)


def test_any_part_of_a_replicated_one_serves_where_the_others_are_gone():
    assert key(choose_base([hold(5, 0, is_replicated=True)], 1)) == (ROUND_1, 5)
    others = [hold(5, 0, is_replicated=True), hold(4, 0, is_replicated=True), hold(4, 1, is_replicated=True)]
    assert key(choose_base(others, 1)) == (ROUND_1, 4), "a node that is here has not saved 5"


def test_for_as_many_nodes_the_whole_of_an_older_replicated_one_comes_first():
    """The other ranks' random numbers and loaders are in the missing part."""
    found = [
        hold(5, 0, is_replicated=True),
        hold(4, 0, is_replicated=True),
        hold(4, 1, is_copy=True, is_replicated=True),
    ]
    assert key(choose_base(found, 2)) == (ROUND_1, 4)
    assert key(choose_base(found, 1)) == (ROUND_1, 5)
    assert key(choose_base(found, 3)) == (ROUND_1, 5)


def test_what_a_round_has_continued_without_a_part_is_not_given_up_for_a_node_that_comes_back_with_an_older_one():
    """Two of three nodes continue step 9 in round 2. The third comes back before anything is saved there."""
    two = [hold(9, 0, 3, is_replicated=True), hold(9, 1, 3, is_replicated=True)]
    base = choose_base(two, 2)
    assert (key(base), base.is_partial) == ((ROUND_1, 9), True)
    older = [hold(4, rank, 3, is_replicated=True) for rank in range(3)]
    assert key(choose_base([*two, *older], 3)) == (ROUND_1, 4), "exactly what the three of round 1 had"
    again = choose_base([*two, *older], 3, base)
    assert (key(again), again.is_partial) == ((ROUND_1, 9), True)
    assert key(choose_base(older, 3, base)) == (ROUND_1, 4)
    later = [hold(3, rank, lineage=ROUND_2, is_replicated=True) for rank in range(2)]
    assert key(choose_base([*two, *older, *later], 3, base)) == (ROUND_2, 3)
    assert key(choose_base([*two, *older, later[0]], 3, base)) == (ROUND_2, 3)


# -- one node ----------------------------------------------------------------------------------------------------------


def slots(*steps, lineage=ROUND_1, state=COMPLETE):
    return [Slot(state, lineage, step, 8, 0, 1, False) for step in steps]


def test_a_node_has_what_all_its_ranks_have():
    ranks = [slots(3, 4, 5), [*slots(4, 5), *slots(3, state=WRITING)]]
    assert set(find_whole(ranks)) == {(ROUND_1, 4), (ROUND_1, 5)}
    assert find_newest(ranks, ROUND_1, 4) == 5
    assert find_newest(ranks, ROUND_1, 5) is None
    assert find_newest(ranks, ROUND_2, -1) is None


def test_for_a_mark_each_rank_keeps_the_first_at_or_above_it():
    assert find_kept([slots(3, 4, 5), slots(4, 5)], ROUND_1, 4) == 4
    assert find_kept([slots(3, 4, 5), slots(3)], ROUND_1, 4) is None
    assert find_kept([slots(4, 5), slots(5, 6)], ROUND_1, 4) == 5, "they do not agree: a step that others do not keep"


@pytest.mark.parametrize(
    ("slot", "base", "lineages", "stays"),
    [
        ((ROUND_2, 5), (ROUND_2, 5), (ROUND_2,), True),
        ((ROUND_2, 4), (ROUND_2, 5), (ROUND_2,), True),
        ((ROUND_2, 6), (ROUND_2, 5), (ROUND_2,), False),
        ((ROUND_1, 9), (ROUND_2, 5), (ROUND_1, ROUND_2), True),
        ((ROUND_1, 9), (ROUND_2, 5), (ROUND_1,), False),
        ((ROUND_3, 1), (ROUND_2, 5), (ROUND_2, ROUND_3), False),
        ((ROUND_1, 1), None, (ROUND_1,), False),
    ],
)
def test_what_the_base_does_not_descend_from_is_dropped(slot, base, lineages, stays):
    assert is_kept(slot, base, lineages) is stays


def test_a_look_keeps_the_newest_and_then_tells_of_it():
    ranks = [slots(3, 4), slots(3, 4)]
    look = decide_keeping(ranks, ROUND_1, None, None, may_hold=True)
    assert (look.hold, look.report) == (4, None)
    assert decide_keeping(ranks, ROUND_1, None, 4, may_hold=True).report == 4
    assert decide_keeping(ranks, ROUND_1, None, 5, may_hold=True).report is None
    assert decide_keeping(ranks, ROUND_1, (ROUND_1, 4), None, may_hold=True).hold is None
    assert decide_keeping(ranks, ROUND_1, None, None, may_hold=False).hold is None
    assert decide_keeping([slots(3, state=EMPTY)], ROUND_1, None, None, may_hold=True).hold is None
