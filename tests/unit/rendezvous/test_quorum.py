"""Quorum: a table of the rules, and a search for two sides that both have one."""

import itertools
import json

import pytest

from muster._shared.codec import decode, encode
from muster._shared.records import replace
from muster.agent.rendezvous.consensus.quorum import (
    QuorumRound,
    RecoveredRound,
    build_quorum_round,
    may_continue,
    may_form_round,
    may_take_over,
)
from muster.agent.runtime.persistent import PersistentMap


def quorum_round(
    size: int, connected: set[int], ended: set[int] = frozenset(), claimed: set[int] = frozenset()
) -> QuorumRound:
    return QuorumRound(
        round_number=3,
        leader_id="m0",
        size=size,
        leader_group_rank=0,
        connected={f"m{rank}": rank for rank in connected},
        ended=frozenset(ended),
        claimed=frozenset(claimed),
    )


@pytest.mark.parametrize(
    ("size", "connected", "ended", "claimed", "min_nodes", "allowed"),
    [
        (2, {1}, {0}, set(), 1, True),  # the other of two nodes, leader seen to end
        (2, {1}, set(), set(), 1, False),  # leader only silent: it may be alive and continue alone
        (2, {1}, set(), {0}, 1, True),  # node 0 returned: no member is missing
        (3, {1}, {0}, set(), 1, True),  # half of the remaining two, and the lower of them
        (3, {2}, {0}, set(), 1, False),  # half, but not the lower: rank 1 may continue
        (3, {1, 2}, set(), set(), 2, True),  # more than half, and the silent leader alone cannot reach min
        (3, {1, 2}, set(), set(), 1, False),  # the silent leader may continue alone
        (5, {2, 3}, {0}, set(), 1, False),  # two of four without the lowest
        (5, {1, 4}, {0}, set(), 1, True),
        (5, {2, 3, 4}, {0}, set(), 1, True),
        (4, {3}, set(), {0, 1, 2}, 3, True),  # all others were replaced by new processes
        (3, {2}, set(), {1}, 1, False),  # a claim does not make a majority
    ],
)
def test_takeover(size, connected, ended, claimed, min_nodes, allowed) -> None:
    assert may_take_over(quorum_round(size, connected, ended, claimed), min_nodes) is allowed


@pytest.mark.parametrize(
    ("size", "connected", "ended", "min_nodes", "allowed"),
    [
        (4, {0}, set(), 1, True),
        (4, {0}, set(), 2, False),
        (4, {0, 1}, set(), 3, True),  # half: no majority can form elsewhere
        (4, {0}, {1, 2, 3}, 4, True),  # all others ended: replacements may join
        (3, {0}, {1}, 3, True),
    ],
)
def test_a_leader_that_formed_the_round(size, connected, ended, min_nodes, allowed) -> None:
    assert may_continue(quorum_round(size, connected, ended), min_nodes) is allowed


def test_only_a_member_that_left_as_announced_counts_as_ended() -> None:
    """One that is lost may be cut off, and continue."""
    known = replace(quorum_round(3, set()), connected=PersistentMap({"m0": 0, "m1": 1, "m2": 2}))
    assert known.without("m1", has_left=False).ended == frozenset()
    assert known.without("m1", has_left=True).ended == {1}


def test_an_unacknowledged_round_needs_both_majorities() -> None:
    old = quorum_round(4, {1, 2, 3}, {0})
    new = quorum_round(5, {4}, {0})
    assert may_form_round((old,), 1)
    assert not may_form_round((old, new), 1)


def test_a_leader_that_took_over_may_continue_only_its_own_rounds() -> None:
    """Of five that remain, three took over, and one was lost before it received the round: the others may win it."""
    old = quorum_round(6, {1, 4}, {0})
    new = replace(quorum_round(3, {0, 2}), is_own=True)
    assert may_form_round((new,), 2)
    assert not may_form_round((old, new), 2)


def test_no_two_sides_may_continue_at_once() -> None:
    """Every split of up to five members, every set of process ends that each side has seen, every min."""
    for size in range(1, 6):
        ranks = range(size)
        for min_nodes in range(1, size + 1):
            for ended in _subsets(ranks):
                alive = [rank for rank in ranks if rank not in ended]
                for one in _subsets(alive):
                    others = set(alive) - one
                    for seen_one, seen_other in itertools.product(_subsets(ended), repeat=2):
                        assert not (
                            _may_form(size, one, seen_one, min_nodes) and _may_form(size, others, seen_other, min_nodes)
                        ), (size, min_nodes, one, seen_one, others, seen_other)


def _may_form(size: int, connected: set[int], ended: set[int], min_nodes: int) -> bool:
    if not connected:
        return False
    rule = may_continue if 0 in connected else may_take_over
    return rule(quorum_round(size, connected, ended), min_nodes)


def _subsets(items) -> list[set]:
    items = list(items)
    return [set(chosen) for count in range(len(items) + 1) for chosen in itertools.combinations(items, count)]


def test_a_quorum_round_is_encoded_and_read() -> None:
    before = QuorumRound(
        round_number=7,
        leader_id="m1",
        size=3,
        leader_group_rank=1,
        node_indices=(2, 5, 9),
        connected={"a": 2},
        ended=frozenset({0}),
    )
    recovered = before.build_recovered()
    assert decode(RecoveredRound, json.loads(encode(recovered, 1000))) == recovered
    assert replace(build_quorum_round(recovered), connected={"a": 2}) == before
    assert before.find_group_rank(9) == 2
    assert before.find_group_rank(3) is None
    assert quorum_round(3, {0}).find_group_rank(2) == 2
