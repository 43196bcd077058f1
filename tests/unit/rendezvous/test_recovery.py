"""The recovery record: what must hold of `merge_recovery`, for all records of a history."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster._shared.records import replace
from muster._shared.reports import FinalFailure
from muster.agent.rendezvous.consensus.actions import RoundFacts
from muster.agent.rendezvous.consensus.quorum import RecoveredRound
from muster.agent.rendezvous.consensus.recovery import RecoveryRecord, merge_recovery
from muster.agent.rendezvous.member.state import MemberRecovery
from muster.agent.rendezvous.restarts import CauseCount, NodeFault, Restarts
from muster.agent.round import Checkpoint

SIZE = 4
FINAL = FinalFailure(cause="rank 1 failed", verdict="no restarts are allowed")


def build_round(number: int, leader: int, ended: frozenset[int]) -> RecoveredRound:
    return RecoveredRound(round_number=number, leader_id=f"m{leader}", size=SIZE, leader_group_rank=0, ended=ended)


def build_restarts(number: int) -> Restarts:
    fault = NodeFault(machine="b", node_index=number, host="h", cause="device", count=number, is_suspected=True)
    return Restarts(
        free=number - 1,
        causes=(CauseCount(signature=f"usage: ImportError {number}", count=number, is_stepless=True, early=True),),
        has_reported=number > 1,
        faults=(fault,),
    )


ENDED = st.frozensets(st.integers(0, SIZE - 1))
CHECKPOINTS = st.none() | st.integers(1, 4).map(lambda number: Checkpoint(number=number, step=number, path="/c"))


@st.composite
def records_of_one_leader(draw: st.DrawFn, leader: int = 0) -> RecoveryRecord:
    """What one leader may have sent: its attempt and failure follow from the round, its end and who was told when."""
    number, is_broken, is_committed = draw(st.integers(1, 3)), draw(st.booleans()), draw(st.booleans())
    rounds = [build_round(each, leader, draw(ENDED)) for each in (number - 1, number) if each]
    return RecoveryRecord(
        version=draw(st.integers(1, 9)),
        round_number=number,
        attempt=number + is_broken,
        restarts=build_restarts(number) if is_broken else Restarts(),
        final=FINAL if is_broken and number == 3 else None,
        quorum_rounds=tuple(rounds[-1:] if is_committed else rounds),
        checkpoint=draw(CHECKPOINTS),
    )


RECORDS = records_of_one_leader() | st.builds(RecoveryRecord, checkpoint=CHECKPOINTS)
ANY = RECORDS | records_of_one_leader(leader=1)


def without_version(record: RecoveryRecord) -> RecoveryRecord:
    return replace(record, version=0)


@given(one=RECORDS, other=RECORDS)
def test_the_order_in_which_two_records_arrive_changes_nothing(one: RecoveryRecord, other: RecoveryRecord) -> None:
    assert without_version(merge_recovery(one, other)) == without_version(merge_recovery(other, one))


@given(records=st.tuples(RECORDS, RECORDS, RECORDS).filter(lambda each: len({one.round_number for one in each}) == 1))
def test_nor_does_that_of_all_records_of_a_round(records: tuple[RecoveryRecord, ...]) -> None:
    one, two, three = records
    assert merge_recovery(merge_recovery(one, two), three) == merge_recovery(one, merge_recovery(two, three))


@given(one=ANY, other=ANY)
def test_a_record_that_arrives_twice_changes_nothing(one: RecoveryRecord, other: RecoveryRecord) -> None:
    merged = merge_recovery(one, other)
    assert merge_recovery(merged, other) == merged
    assert merge_recovery(one, one) == one


@given(one=ANY, other=ANY)
def test_nothing_is_lost_and_nothing_is_made_up(one: RecoveryRecord, other: RecoveryRecord) -> None:
    merged = merge_recovery(one, other)
    later = max((one, other), key=lambda each: each.round_number)
    assert merged.round_number == later.round_number
    assert merged.attempt >= later.attempt
    assert later.final is None or merged.final is not None
    numbers = [each.checkpoint.number for each in (one, other) if each.checkpoint is not None]
    assert merged.checkpoint is None if not numbers else merged.checkpoint.number == max(numbers)  # type: ignore[union-attr]
    for each in merged.quorum_rounds:
        known = [same.ended for record in (one, other) for same in record.quorum_rounds if each.is_same(same)]
        assert each.ended == frozenset().union(*known)
    assert not merged.round_number or merged.quorum_rounds[-1].round_number == merged.round_number


@given(mine=records_of_one_leader(), theirs=records_of_one_leader(leader=1))
def test_of_two_rounds_of_one_number_the_one_known_first_keeps_its_quorum(mine, theirs) -> None:
    merged = merge_recovery(mine, theirs)
    expected = theirs if theirs.round_number > mine.round_number else mine
    assert [each.leader_id for each in merged.quorum_rounds] == [each.leader_id for each in expected.quorum_rounds]


def begin_round(record: RecoveryRecord, ranks: tuple[int | None, ...]) -> MemberRecovery:
    facts = RoundFacts(
        recovery=record, successors=(), group_world_size=SIZE, world_size=SIZE, master_addr="h", master_port=1
    )
    return MemberRecovery().with_round(facts, ranks)


def test_a_member_that_hears_of_a_commit_keeps_its_rank_in_the_last_round() -> None:
    rounds = (build_round(1, 0, frozenset()), build_round(2, 0, frozenset({3})))
    known = RecoveryRecord(version=4, round_number=2, attempt=1, quorum_rounds=rounds)
    member = begin_round(known, (0, 2)).with_record(replace(known, version=5, quorum_rounds=rounds[1:]))
    assert (member.group_ranks, member.group_rank, member.version) == ((2,), 2, 5)
    assert member.record.quorum_rounds == rounds[1:]


def test_a_member_remembers_the_highest_round_that_it_was_told_of() -> None:
    rounds = [RecoveryRecord(round_number=each, quorum_rounds=(build_round(each, 0, frozenset()),)) for each in (5, 1)]
    member = begin_round(rounds[0], (1,))
    facts = RoundFacts(
        recovery=rounds[1], successors=(), group_world_size=SIZE, world_size=SIZE, master_addr="h", master_port=1
    )
    member = member.with_round(facts, (None,))
    assert (member.round_number, member.highest_round) == (1, 5)


@pytest.mark.parametrize("leader", [0, 1])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_member_merges_only_what_is_about_its_round(number: int, leader: int) -> None:
    """Of a round that it was not told of, it does not know its rank: a candidate has sent its own record."""
    member = begin_round(RecoveryRecord(round_number=2, quorum_rounds=(build_round(2, 0, frozenset()),)), (1,))
    checkpoint = Checkpoint(number=7, step=7, path="/7")
    theirs = build_round(number, leader, frozenset({3}))
    other = RecoveryRecord(
        version=8, round_number=number, attempt=2, final=FINAL, quorum_rounds=(theirs,), checkpoint=checkpoint
    )
    member = member.with_record(other)
    assert (member.version, member.record.checkpoint) == (8, checkpoint)
    is_mine = (number, leader) == (2, 0)
    assert (member.record.attempt, member.record.final) == ((2, FINAL) if is_mine else (0, None))
    assert member.record.quorum_rounds == ((theirs,) if is_mine else (build_round(2, 0, frozenset()),))


def test_a_new_leader_is_asked_for_its_record_whatever_its_version() -> None:
    member = MemberRecovery().with_leader("m0").with_record(RecoveryRecord(version=6))
    assert member.version == 6
    assert member.with_leader("m0").version == 0  # the same node again: it may have led anew
