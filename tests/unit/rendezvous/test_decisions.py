"""Event histories through the leader's pure state machine."""

from typing import Any

import pytest
from doubles.leader_history import Leader, failure, member, rules

from muster._shared.records import replace
from muster._shared.reports import FinalFailure, Stack
from muster.agent.rendezvous.consensus.actions import (
    DropMembers,
    JobEnd,
    Notify,
    RecoveryChanged,
    RoundBreak,
    RoundStart,
    RoundSummary,
)
from muster.agent.rendezvous.consensus.events import MemberLost, ProcessEnded, Reported, RoundAcknowledged, TimerFired
from muster.agent.rendezvous.consensus.members import MemberRecord
from muster.agent.rendezvous.consensus.quorum import RecoveredRound
from muster.agent.rendezvous.consensus.recovery import RecoveryRecord
from muster.agent.rendezvous.consensus.state import FOREVER, Forming, RoundRunning, build_initial_state
from muster.agent.rendezvous.consensus.waits import LEASE_RETRY_S
from muster.agent.rendezvous.interface import AllSucceeded, BreakKind, Leaving, Prepared, RendezvousFailed
from muster.agent.rendezvous.report_messages import Failed, Idle, Stopped


def start(count: int, *sizes: int, **more: int) -> Leader:
    """The leader of a job of these sizes whose first round has so many nodes."""
    leader = Leader(rules(*sizes, **more))
    leader.join(*range(count))
    if not leader.state.assignments:
        leader.wait(3.1)  # the last call
    leader.formed()
    return leader


def importing(number: int) -> MemberRecord:
    return replace(member(number), is_prepared=False)


def known_after(*, ended: list[int], **changes: Any) -> RecoveryRecord:
    """What members know of round 4, of three nodes, in the second attempt."""
    values: dict[str, Any] = {"leader_id": "m0", "size": 3, "leader_group_rank": 0, "ended": frozenset(ended)}
    last = RecoveredRound(round_number=4, **{**values, **changes})
    return RecoveryRecord(round_number=4, attempt=2, quorum_rounds=(last,))


def test_a_full_job_forms_at_once_in_order_of_index() -> None:
    leader = Leader(rules(3, 3))
    leader.join(member(2, nproc=4), member(0, nproc=2))
    assert not leader.actions
    leader.join(member(1, nproc=3))
    form = leader.formed()
    assert [(s.id, s.group_rank, s.rank_offset) for s in form.assignments] == [("m0", 0, 0), ("m1", 1, 2), ("m2", 2, 5)]
    assert (form.world_size, form.round_number, form.attempt, form.master_port) == (9, 1, 0, 1000)


def test_elastic_forming_waits_for_the_last_call_after_the_last_join() -> None:
    leader = Leader(rules(1, 4))
    leader.join(0)
    leader.join(1, after_s=2.0)
    assert leader.next_due_s() == pytest.approx(5.0)
    assert not leader.wait(2.9)
    leader.wait(0.2)
    assert len(leader.formed().assignments) == 2


def test_members_without_index_keep_their_order_of_joining() -> None:
    leader = Leader(rules(3, 3))
    leader.join(replace(member(7, index=None), is_leader=True), member(3, index=None), 5)
    assert leader.formed_of() == ["m5", "m7", "m3"]


def test_a_join_breaks_a_running_round_after_the_batch_and_costs_no_attempt() -> None:
    leader = start(1, 1, 4)
    leader.join(1, after_s=5.0)
    leader.join(2, after_s=0.1)
    leader.wait(0.21)
    broken = leader.only(RoundBreak)
    assert (broken.kind, broken.ids, broken.want_stacks) == (BreakKind.MEMBERSHIP, ("m0",), False)
    assert "node 1 (h1)" in broken.reason
    leader.stop_all(0)
    form = leader.formed()
    assert (len(form.assignments), form.round_number, form.attempt) == (3, 2, 0)


def test_a_join_that_fills_the_job_breaks_the_round_at_once() -> None:
    """No other node could join: waiting would only delay the new member."""
    leader = start(2, 1, 3)
    leader.join(2, after_s=5.0)
    broken = leader.only(RoundBreak)
    assert (broken.kind, broken.is_join) == (BreakKind.MEMBERSHIP, True)
    leader.stop_all(0, 1)
    assert len(leader.formed().assignments) == 3


def test_a_running_round_continues_until_a_new_member_has_imported() -> None:
    leader = start(2, 1, 4)
    leader.join(importing(2), after_s=5.0)
    assert "node 2 (h2) is waiting" in leader.only(Notify).text
    leader.join(importing(3), after_s=1.0)
    summary = leader.only(RoundSummary)
    assert leader.actions == [summary]  # notified once, although the job would be full
    assert (summary.ids, summary.facts) == (("m3",), leader.state.formed[1])
    assert not leader.feed(Reported(id="m2", message=Prepared()), after_s=20.0)
    assert not leader.wait(5.0)
    leader.feed(Reported(id="m3", message=Prepared()), after_s=3.0)
    assert leader.only(RoundBreak).reason.startswith("node 2 (h2), node 3 (h3) join")
    leader.stop_all(0, 1)
    assert len(leader.formed().assignments) == 4


@pytest.mark.parametrize(
    "event", [Reported(id="m2", message=Prepared()), MemberLost(id="m2", reason="connection closed")]
)
def test_a_batch_goes_on_when_no_import_is_awaited_any_more(event) -> None:
    leader = start(2, 1, 6)
    leader.join(importing(2), after_s=5.0)
    leader.join(3, after_s=1.0)
    assert not leader.wait(1.1)
    leader.feed(event)
    assert "node 3 (h3)" in leader.only(RoundBreak).reason


def test_a_new_member_that_imports_without_end_and_is_lost_breaks_nothing() -> None:
    leader = start(2, 1, 4)
    leader.join(importing(2), after_s=5.0)
    assert leader.next_due_s() == FOREVER
    assert not leader.wait(1000.0)
    assert not leader.lose(2, after_s=1.0)
    assert not leader.wait(100.0)
    assert leader.next_due_s() == FOREVER


def test_a_prepared_member_waits_for_imports_but_not_for_ever() -> None:
    """Counted from when a member waits."""
    leader = start(2, 1, 5)
    leader.join(importing(2), after_s=5.0)
    leader.join(3, after_s=100.0)
    assert leader.next_due_s() == pytest.approx(leader.now_s + 10.0)
    assert not leader.wait(9.9)
    leader.wait(0.2)
    assert leader.only(RoundBreak).reason.startswith("node 3 (h3) join")
    leader.stop_all(0, 1)
    assert leader.formed_of() == ["m0", "m1", "m3"]
    assert not [action for action in leader.actions if isinstance(action, Notify)]  # it is no spare
    leader.feed(Reported(id="m2", message=Prepared()), after_s=100.0)
    assert leader.only(RoundBreak).reason.startswith("node 2 (h2) join")


def test_a_job_recovers_without_members_that_still_import() -> None:
    leader = start(2, 1, 4)
    leader.join(importing(2), after_s=5.0)
    leader.lose(1, after_s=1.0)
    assert leader.reform(0) == ["m0"]
    leader.feed(Reported(id="m2", message=Prepared()), after_s=1.0)
    leader.only(RoundBreak)
    leader.stop_all(0)
    assert leader.formed_of() == ["m0", "m2"]


def test_a_spare_that_has_imported_goes_before_one_that_has_not() -> None:
    leader = start(2, 1, 2)
    leader.join(importing(2), after_s=5.0)
    leader.join(3)
    leader.lose(1, after_s=1.0)
    assert leader.reform(0) == ["m0", "m3"]


def test_members_that_import_take_part_when_the_leaders_own_node_imports() -> None:
    leader = Leader(rules(1, 3), takeover=True)
    known = known_after(ended=[], leader_id="old", size=1)
    leader.join(importing(0), member(1, recovery=known, ranks=(0,)), importing(2))
    leader.wait(10.0)
    assert len(leader.formed().assignments) == 3


def test_a_new_member_that_leaves_again_breaks_nothing() -> None:
    leader = start(2, 1, 4)
    leader.join(2, after_s=5.0)
    leader.feed(Reported(id="m2", message=Leaving(reason="received SIGTERM")), after_s=0.1)
    assert not leader.wait(0.2)
    assert not leader.lose(2, after_s=0.2)


def test_a_failure_becomes_final_though_an_event_overtook_its_tick() -> None:
    """Only a tick makes it final: a loss that is not reported yet may explain it."""
    leader = start(2, 1, 2, max_restarts=0)
    leader.fail(1, after_s=10.0)
    assert not leader.feed(Reported(id="m0", message=RoundAcknowledged(round_number=1)), after_s=0.4)
    assert leader.next_due_s() == pytest.approx(10.3)
    leader.wait(0.0)
    assert leader.only(RoundBreak).kind is BreakKind.FINAL


def test_a_loss_explains_a_failure_though_both_are_seen_late() -> None:
    leader = start(4, 1, 4, max_restarts=0)
    leader.fail(0, after_s=10.0)
    assert not leader.fail(2, after_s=0.4)
    leader.lose(1)
    assert leader.only(RoundBreak).kind is BreakKind.MEMBERSHIP


def test_the_join_timeout_ends_the_wait_though_an_event_overtook_its_tick() -> None:
    leader = Leader(rules(3, 3))
    leader.join(0)
    assert not leader.join(1, after_s=60.1)
    assert leader.next_due_s() == pytest.approx(61.1)  # the grace for a late join
    leader.wait(1.0)
    assert "2 of at least 3" in leader.only(RendezvousFailed).reason


def test_rendezvous_does_not_fail_before_the_fence_of_the_last_loss() -> None:
    leader = start(3, 2, 3)
    leader.fail(0, after_s=10.0)
    leader.stop_all(0, 1)
    leader.lose(2, after_s=61.0)  # its workers took that long to stop
    leader.wait(0.1)
    assert not leader.actions
    leader.wait(0.21)
    assert len(leader.formed().assignments) == 2


def test_a_process_end_that_a_joining_member_saw_starts_the_fence_time_again() -> None:
    """The process may have ended a moment ago: its guard has the fence time to kill its workers."""
    leader = Leader(rules(2, 4), takeover=True)
    old = {"leader_id": "m3", "size": 4, "leader_group_rank": 3}
    leader.join(member(0, recovery=known_after(ended=[], **old), ranks=(0,)))
    saw_end = known_after(ended=[3], **old)
    assert not leader.join(member(1, recovery=saw_end, ranks=(1,)), after_s=2.0)
    assert not leader.join(member(2, recovery=saw_end, ranks=(2,)), after_s=0.1)
    assert leader.next_due_s() == pytest.approx(2.3)
    leader.wait(0.2)
    assert len(leader.formed().assignments) == 3


def test_the_next_round_is_above_all_that_its_members_were_told_of() -> None:
    """A leader that had lost its memory told this one of a round 1 after round 5."""
    leader = Leader(rules(2, 2))
    leader.join(0, replace(member(1), highest_round=5))
    assert leader.formed().round_number == 6


def test_a_takeover_with_a_spare_waits_for_the_lease_of_the_member_whose_place_it_takes() -> None:
    """Rank 2, cut off, does not know yet that the leader has ended: its workers run until its lease ends."""
    leader = Leader(rules(2, 3), takeover=True)
    known = known_after(ended=[0])
    leader.join(replace(member(1, recovery=known, ranks=(1,)), is_leader=True))
    assert not leader.join(member(3, recovery=known, ranks=(None,)))
    assert not leader.join(member(4, recovery=known, ranks=(None,)))
    assert not leader.wait(4.2)
    leader.wait(0.2)
    assert leader.formed_of() == ["m1", "m3", "m4"]


def test_a_takeover_waits_for_members_of_the_last_round_whichever_node_imports() -> None:
    leader = Leader(rules(1, 3), takeover=True)
    known = known_after(ended=[1], leader_id="m1", leader_group_rank=1)
    leader.join(member(0, recovery=known, ranks=(0,)))
    leader.join(replace(importing(3), index=1), after_s=0.1)
    leader.join(importing(4), after_s=0.1)
    assert not leader.wait(0.4)
    leader.join(member(2, recovery=known, ranks=(2,)), after_s=0.5)
    assert leader.formed_of() == ["m0", "m2"]


def test_a_member_that_fills_the_job_waits_for_no_import() -> None:
    leader = start(2, 1, 3)
    leader.join(importing(2), after_s=5.0)
    leader.join(3, after_s=1.0)
    assert leader.only(RoundBreak).reason.startswith("node 3 (h3) join")


def test_the_wait_for_imports_starts_again_when_the_waiting_member_was_lost() -> None:
    leader = start(2, 1, 6)
    leader.join(importing(2), after_s=5.0)
    leader.join(3, after_s=1.0)
    leader.lose(3, after_s=1.0)
    assert leader.next_due_s() == FOREVER
    leader.join(4, after_s=8.0)
    assert leader.next_due_s() == pytest.approx(leader.now_s + 10.0)


def test_a_member_that_joins_before_the_timeout_tick_is_in_time() -> None:
    leader = Leader(rules(2, 2))
    leader.join(0)
    leader.join(1, after_s=60.1)
    assert len(leader.formed().assignments) == 2


def test_a_join_breaks_a_round_at_once_while_its_members_still_import() -> None:
    leader = Leader(rules(1, 3))
    leader.join(importing(0), 1)
    leader.wait(3.1)
    leader.formed()
    leader.join(importing(2), after_s=1.0)
    leader.only(RoundBreak)


def test_a_broken_round_whose_members_import_does_not_wait_for_imports() -> None:
    leader = Leader(rules(2, 3))
    leader.join(0, importing(1), importing(2))
    leader.formed()
    leader.lose(1, after_s=10.0)
    leader.join(replace(member(3, index=1), is_prepared=False), after_s=1.0)
    leader.stop_all(0, 2)
    assert len(leader.formed().assignments) == 3


def test_a_loss_reforms_at_once_but_not_before_the_fence() -> None:
    leader = start(3, 2, 3)
    leader.lose(1, after_s=10.0)
    broken = leader.only(RoundBreak)
    assert (broken.kind, broken.ids) == (BreakKind.MEMBERSHIP, ("m0", "m2"))
    assert "(h1) was lost: " in broken.reason
    leader.stop_all(0, 2)
    assert not [action for action in leader.actions if isinstance(action, RoundStart)]
    assert leader.next_due_s() == pytest.approx(10.3)
    leader.wait(0.31)
    form = leader.formed()
    assert [assignment.id for assignment in form.assignments] == ["m0", "m2"]
    assert form.attempt == 0


@pytest.mark.parametrize("has_replacement", [True, False])
def test_below_min_waits_for_a_replacement_and_then_fails(has_replacement: bool) -> None:
    leader = start(2, 2, 2)
    leader.lose(1, after_s=1.0)
    leader.stop_all(0)
    assert not leader.wait(50.0)
    if has_replacement:
        leader.join(replace(member(9), index=1))
        assert leader.formed_of() == ["m0", "m9"]
    else:
        leader.wait(11.0)
        assert "1 of at least 2" in leader.only(RendezvousFailed).reason


def test_a_failure_waits_for_the_end_of_a_silent_node() -> None:
    """Its guard kills its workers before it counts as lost, which makes workers of other nodes fail."""
    leader = start(3, 2, 3, max_restarts=0)
    assert not leader.fail(0, suspicion_s=1.5, after_s=10.0)
    assert leader.next_due_s() == pytest.approx(leader.now_s + 1.8)
    leader.lose(2, after_s=1.5)
    assert leader.only(RoundBreak).kind is BreakKind.MEMBERSHIP
    leader.reform(0, 1)
    assert leader.formed().attempt == 0


def test_a_silent_nodes_loss_gives_the_attempt_back() -> None:
    leader = start(3, 2, 3, max_restarts=1)
    leader.fail(0, suspicion_s=1.5, after_s=10.0)
    assert leader.only(RoundBreak).kind is BreakKind.FAILURE
    leader.stop_all(0, 1)
    leader.lose(2, after_s=1.5)
    leader.wait(0.31)
    assert leader.formed().attempt == 0


def test_spares_wait_and_replace_lost_members() -> None:
    leader = start(2, 2, 2)
    leader.join(5, after_s=1.0)
    assert not leader.wait(5.0)
    leader.lose(1)
    assert leader.reform(0) == ["m0", "m5"]


def in_segment(number: int, segment: str) -> MemberRecord:
    return replace(member(number), segment=segment)


def test_nodes_of_one_segment_get_adjacent_ranks() -> None:
    """Segments in the order of their first node: node 0 keeps rank 0. A node that tells none keeps its place."""
    leader = Leader(rules(6, 6))
    leader.join(*(in_segment(*each) for each in enumerate("babca")), 5)
    assert leader.formed_of() == ["m0", "m2", "m1", "m4", "m3", "m5"]
    assert [each.group_rank for each in leader.formed().assignments] == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(("lost", "taken", "order"), [(3, 9, [0, 1, 2, 9]), (1, 8, [0, 8, 2, 3])])
def test_a_spare_of_the_same_segment_takes_over_first(lost: int, taken: int, order: list[int]) -> None:
    leader = Leader(rules(4, 4))
    leader.join(*(in_segment(*each) for each in enumerate("aabb")))
    leader.formed()
    leader.join(*(in_segment(*each) for each in enumerate("cab", 7)), after_s=1.0)
    leader.wait(5.0)
    leader.feed(MemberLost(id=f"m{lost}", reason="connection closed"))
    assert leader.reform(*({0, 1, 2, 3} - {lost})) == [f"m{number}" for number in order]


def test_one_budget_for_the_whole_job() -> None:
    leader = start(2, 2, 2, max_restarts=1)
    leader.fail(0, after_s=1.0)
    broken = leader.only(RoundBreak)
    assert (broken.kind, broken.recovery.value.attempt, broken.want_stacks) == (BreakKind.FAILURE, 1, True)
    leader.fail(1)
    leader.stop_all(0, 1)
    form = leader.formed()
    assert (form.attempt, form.master_port) == (1, 2000)
    leader.feed(Reported(id="m1", message=Failed(round_number=2, failures=(failure(1),))), after_s=20.0)
    assert leader.next_due_s() == pytest.approx(leader.now_s + 0.3)
    leader.wait(0.3)
    broken = leader.only(RoundBreak)
    assert broken.kind is BreakKind.FINAL
    assert "its one restart" in broken.reason
    leader.stop_all(0, 1)
    end = leader.only(JobEnd)
    assert (end.succeeded, end.printer_id, set(end.ids)) == (False, "m0", {"m0", "m1"})
    assert end.report.value.failures[0].global_rank == 1
    assert not leader.feed(Reported(id="m0", message=Failed(round_number=2, failures=(failure(0),))))


def test_the_report_has_what_comes_with_the_end_of_the_workers() -> None:
    leader = start(3, 3, 3, max_restarts=0)
    leader.fail(0, after_s=1.0)
    leader.wait(0.3)
    assert leader.only(RoundBreak).kind is BreakKind.FINAL
    leader.fail(1)
    stack = Stack(global_rank=2, node=2, local_rank=0, text="File x")
    stopped = failure(2, exit_code=None, signal="SIGTERM", stopped_by_us=True)
    leader.feed(Reported(id="m2", message=Stopped(round_number=1, port=1, failures=(stopped,), stacks=(stack,))))
    leader.stop_all(0, 1)
    report = leader.only(JobEnd).report.value
    assert [each.global_rank for each in report.failures] == [0, 1, 2]
    assert report.stacks == (stack,)


def test_the_loss_of_a_node_does_not_explain_its_own_failure() -> None:
    leader = start(2, 1, 2, max_restarts=3)
    leader.fail(1, after_s=9.0)
    leader.lose(1, after_s=0.5)
    leader.reform(0)
    assert leader.formed().attempt == 1
    last = start(2, 1, 2, max_restarts=0)
    last.fail(1, after_s=9.0)
    last.lose(1, after_s=0.05)
    assert last.only(RoundBreak).kind is BreakKind.FINAL


def test_a_spare_and_a_node_that_has_succeeded_break_no_round_when_they_stop() -> None:
    leader = start(2, 2, 2)
    leader.join(5, after_s=1.0)
    leader.succeed(1)
    for number in (5, 1):
        assert not leader.feed(Reported(id=f"m{number}", message=Stopped(round_number=1, port=1)))
    assert isinstance(leader.state.phase, RoundRunning)


@pytest.mark.parametrize(
    ("max_restarts", "after_s", "attempt"),
    [(0, 0.05, 0), (3, 0.5, 0), (3, 20.0, 1)],
    ids=["explained before it was final", "soon afterwards", "much later"],
)
def test_a_loss_that_explains_a_failure_gives_its_attempt_back(max_restarts, after_s: float, attempt: int) -> None:
    leader = start(2, 1, 2, max_restarts=max_restarts)
    leader.fail(0, after_s=9.0)
    leader.lose(1, after_s=after_s)
    leader.reform(0)
    assert leader.formed().attempt == attempt


def test_a_join_does_not_hide_a_failure_that_waits_for_a_loss() -> None:
    leader = start(2, 1, 4, max_restarts=0)
    leader.join(2, after_s=5.0)
    leader.fail(1, after_s=0.1)
    assert not leader.wait(0.15)
    leader.wait(0.2)
    assert leader.only(RoundBreak).kind is BreakKind.FINAL


def test_root_cause_is_the_earliest_by_age_and_never_a_worker_that_muster_stopped() -> None:
    leader = start(3, 3, 3, max_restarts=0)
    leader.fail(0, age_s=0.0, after_s=5.0)
    leader.fail(2, age_s=0.2, after_s=0.1)
    leader.wait(0.31)
    stopped = failure(1, age_s=9.0, exit_code=None, signal="SIGTERM", stopped_by_us=True)
    leader.stop_all(0, 2)
    leader.feed(Reported(id="m1", message=Stopped(round_number=1, port=1, failures=(stopped,))))
    report = leader.only(JobEnd).report.value
    # rank 0 has the same exit code at about the same time: it failed in the same way
    assert [(f.global_rank, f.collateral) for f in report.failures] == [(2, False), (0, False), (1, True)]


@pytest.mark.parametrize(("second", "kind"), [("ImportError: x", BreakKind.FINAL), ("B", BreakKind.FAILURE)])
def test_the_same_start_up_error_twice_in_a_row_is_not_retried(second: str, kind: BreakKind) -> None:
    leader = start(1, 1, 1, max_restarts=5)
    leader.fail(0, early=True, exception="ImportError: x", after_s=1.0)
    assert leader.only(RoundBreak).kind is BreakKind.FAILURE
    leader.stop_all(0)
    leader.fail(0, early=True, exception=second, after_s=1.0)
    broken = leader.only(RoundBreak)
    assert (broken.kind, "twice in a" in broken.reason) == (kind, kind is BreakKind.FINAL)


def test_success_of_all_ends_the_job_and_one_that_was_lost_after_it_counts() -> None:
    leader = start(3, 2, 3)
    leader.succeed(2)
    assert not leader.lose(2)
    leader.succeed(0, 1)
    end = leader.only(JobEnd)
    assert end.succeeded
    assert end.report is None
    assert set(end.ids) == {"m0", "m1"}


def test_no_join_starts_a_round_once_a_node_has_succeeded() -> None:
    leader = start(2, 1, 3)
    leader.succeed(0)
    leader.join(2)
    assert leader.next_due_s() == FOREVER
    leader.succeed(1)
    assert set(leader.only(JobEnd).ids) == {"m0", "m1", "m2"}


def test_a_node_that_succeeded_takes_part_again_after_a_failure() -> None:
    leader = start(2, 2, 2)
    leader.succeed(0)
    leader.fail(1, after_s=1.0)
    assert set(leader.only(RoundBreak).ids) == {"m0", "m1"}
    leader.stop_all(0, 1)
    assert leader.formed().attempt == 1
    assert leader.state.phase == RoundRunning()


def test_success_waits_for_members_that_may_continue_with_another_leader() -> None:
    leader = start(3, 3, 3)
    for number in (1, 2):
        leader.succeed(number)
        leader.feed(MemberLost(id=f"m{number}", reason="connection closed"))
    assert not leader.succeed(0)
    leader.feed(ProcessEnded(id="m1"))
    assert leader.only(JobEnd).succeeded


def test_events_of_old_rounds_and_unknown_members_change_nothing() -> None:
    leader = start(2, 2, 2)
    before = leader.state
    for event in (
        Reported(id="m1", message=Failed(round_number=0, failures=(failure(1),))),
        Reported(id="unknown", message=Failed(round_number=1, failures=(failure(1),))),
        Reported(id="m1", message=AllSucceeded(round_number=7)),
        Reported(id="m1", message=Stopped(round_number=0, port=1)),
        Reported(id="unknown", message=Stopped(round_number=1, port=1)),
        MemberLost(id="unknown", reason="x"),
        Reported(id="unknown", message=Leaving(reason="x")),
        Reported(id="unknown", message=RoundAcknowledged(round_number=1)),
        ProcessEnded(id="m1"),
        TimerFired(round_number=0),
        TimerFired(round_number=1),
    ):
        assert not leader.feed(event)
    assert leader.state == before


@pytest.mark.parametrize("is_interrupt", [True, False])
def test_leaving_breaks_at_once_and_reforms_when_the_connection_is_gone(is_interrupt: bool) -> None:
    leader = start(2, 1, 2)
    leader.feed(
        Reported(id="m1", message=Leaving(reason="SIGTERM", is_interrupt=is_interrupt, is_planned=True)), after_s=1.0
    )
    broken = leader.only(RoundBreak)
    assert (broken.reason, broken.is_interrupt, broken.is_leave) == ("node 1 (h1) left: SIGTERM", is_interrupt, True)
    leader.stop_all(0)
    assert isinstance(leader.state.phase, Forming)
    leader.lose(1, after_s=2.0)
    leader.wait(0.31)
    assert leader.formed_of() == ["m0"]


@pytest.mark.parametrize(
    "event", [Reported(id="m1", message=Leaving(reason="it cannot go on")), MemberLost(id="m1", reason="eof")]
)
def test_a_node_that_fails_or_is_lost_has_not_left_as_it_was_told_to(event: Reported | MemberLost) -> None:
    leader = start(2, 1, 2)
    leader.feed(event)
    assert not leader.only(RoundBreak).is_leave


@pytest.mark.parametrize("leaving", [0, 1])
def test_a_node_that_has_succeeded_breaks_the_round_only_if_it_leads(leaving: int) -> None:
    """The workers of the other node can still save. They were killed at once when the leader was gone."""
    leader = start(2, 2, 2)
    leader.succeed(leaving)
    leader.feed(Reported(id=f"m{leaving}", message=Leaving(reason="SIGTERM")))
    assert isinstance(leader.state.phase, Forming if leaving == 0 else RoundRunning)


def test_a_fenced_leader_node_breaks_its_round() -> None:
    leader = start(2, 2, 2)
    leader.stop_all(0)
    assert leader.only(RoundBreak).kind is BreakKind.FENCED


def test_a_round_is_committed_when_all_have_acknowledged_it() -> None:
    leader = start(2, 2, 2)
    assert not leader.feed(Reported(id="m0", message=RoundAcknowledged(round_number=1)))
    leader.feed(Reported(id="m1", message=RoundAcknowledged(round_number=1)))
    assert leader.only(RecoveryChanged).recovery.value.round_number == 1


@pytest.mark.parametrize(
    ("reports", "hung"),
    [
        pytest.param("i0 i1", None, id="one that works: the others wait for it"),
        pytest.param("i0 i1 i2", (0, 1, 2), id="all idle: a hang of the job"),
        pytest.param("i0 i0 i0", None, id="repeated reports of one node count once"),
        pytest.param("i0 i1 d2", None, id="the last that worked finishes: the rest may have waited for it"),
        pytest.param("i0 i1 d2 i0 i1", (0, 1), id="and are idle for another timeout"),
        pytest.param("d2 i0 i1", (0, 1), id="a node that succeeded is not waited for"),
        pytest.param("i2 d2 i0 i1", (0, 1), id="idle, then succeeded: not part of the hang"),
        pytest.param("d2 i2 i0", None, id="a report of a node that succeeded does not count"),
        pytest.param("d0 d1 i2", (2,), id="the only one left"),
        pytest.param("i0 i1 a0 i2", None, id="one is active again"),
        pytest.param("i0 i1 a0 i2 i0", (0, 1, 2), id="and idle again"),
        pytest.param("i0 d0 d1 d2", None, id="idle at the end of its work: no hang"),
        pytest.param("u1", (1,), id="torch is about to end one that waits: the others do not matter"),
        pytest.param("i0 i1 u1", (0, 1), id="likewise, said later"),
    ],
)
def test_a_job_hangs_when_every_node_that_still_works_is_idle(reports: str, hung: tuple[int, ...] | None) -> None:
    """i: idle, u: and torch is about to end it, a: active again, d: succeeded, each with a node number.

    Only the last report may make the job hang.
    """
    leader = start(3, 3, 3)
    for item in reports.split():
        assert not any(isinstance(action, RoundBreak) for action in leader.actions)
        report(leader, item, round_number=1)
    if hung is None:
        assert not any(isinstance(action, RoundBreak) for action in leader.actions)
    else:
        broken = leader.only(RoundBreak)
        assert (broken.kind, broken.want_stacks, broken.ids) == (BreakKind.FAILURE, True, ("m0", "m1", "m2"))
        assert broken.is_hang
        assert sorted(seen.failure.node for seen in leader.state.failures.seen) == list(hung)


def report(leader: Leader, item: str, *, round_number: int) -> None:
    number = int(item[1:])
    member_id = f"m{number}"
    if item[0] == "d":
        leader.feed(Reported(id=member_id, message=AllSucceeded(round_number=round_number)), after_s=1.0)
        return
    failures = (failure(number, exit_code=None, hung=True, reason="made no progress"),) if item[0] in "iu" else ()
    idle = Reported(id=member_id, message=Idle(round_number=round_number, failures=failures, is_urgent=item[0] == "u"))
    leader.feed(idle, after_s=1.0)


def test_of_a_hang_the_report_also_has_the_workers_that_are_busy() -> None:
    """Their node says so when the round is broken: the ranks that hang wait for one of them."""
    leader = start(2, 2, 2)
    report(leader, "u0", round_number=1)
    busy = failure(1, exit_code=None, hung=True)  # its node does not know why the job counts as hung
    leader.feed(Reported(id="m1", message=Idle(round_number=1, failures=(busy,))))
    seen = [each.failure for each in leader.state.failures.seen]
    assert [(each.node, each.reason) for each in seen] == [(0, "made no progress"), (1, "made no progress")]


def test_a_node_that_is_idle_when_another_has_failed_adds_no_failure() -> None:
    """It waited for the one that has failed."""
    leader = start(2, 2, 2)
    leader.fail(1)
    assert not leader.only(RoundBreak).is_hang
    report(leader, "i0", round_number=1)
    assert [seen.failure.node for seen in leader.state.failures.seen] == [1]


def test_idle_members_are_cleared_in_the_next_round() -> None:
    leader = start(2, 2, 2)
    report(leader, "i0", round_number=1)
    leader.fail(1)
    leader.stop_all(0, 1)
    assert leader.formed().round_number == 2
    report(leader, "i0", round_number=1)
    report(leader, "i1", round_number=2)
    assert not leader.actions
    report(leader, "i0", round_number=2)
    # No attempt is left, so the failure waits a moment for a loss that explains it.
    leader.wait(0.31)
    assert leader.only(RoundBreak).kind is BreakKind.FINAL


def test_a_hang_on_the_last_attempt_is_final_and_reports_every_node() -> None:
    leader = start(2, 2, 2, max_restarts=0)
    report(leader, "i0", round_number=1)
    report(leader, "i1", round_number=1)
    leader.wait(0.31)
    assert leader.only(RoundBreak).kind is BreakKind.FINAL
    leader.stop_all(0, 1)
    end = leader.only(JobEnd)
    assert [(f.node, f.reason) for f in end.report.value.failures] == [(0, "made no progress"), (1, "made no progress")]


def test_takeover_after_the_last_failure_ends_the_job() -> None:
    """The old leader had announced that the job failed for good, and was lost before it could end it."""
    leader = Leader(rules(2, 3), takeover=True)
    cause, verdict = "rank 1 on node 1 (h) exited with code 1", "no restarts are allowed"
    final = FinalFailure(cause=cause, global_rank=1, verdict=verdict)
    known = replace(known_after(ended=[]), final=final)
    assert not leader.join(replace(member(1, recovery=known, ranks=(1,)), is_leader=True))
    leader.join(member(2, recovery=known, ranks=(2,)))
    end = leader.only(JobEnd)
    assert not end.succeeded
    assert (end.report.value.reason, end.printer_id) == (f"{cause}; {verdict}", "m1")


def test_a_final_failure_waits_for_members_that_may_continue_with_another_leader() -> None:
    leader = start(3, 3, 3, max_restarts=0)
    leader.fail(0)
    leader.wait(0.31)
    assert leader.only(RoundBreak).kind is BreakKind.FINAL
    leader.lose(1)
    leader.lose(2)
    leader.feed(Reported(id="m0", message=Stopped(round_number=1, port=1)))
    assert "waiting 60 s for" in leader.only(Notify).text
    assert not leader.wait(59.0)
    leader.wait(1.1)
    assert not leader.only(JobEnd).succeeded


def test_a_round_of_a_leader_that_resigned_is_given_time_to_end() -> None:
    """Another leader resigned in favour of this one; its other member may not know it yet and still train."""
    leader = start(2, 1, 4)
    rival = RecoveredRound(round_number=1, leader_id="m2", size=2, leader_group_rank=0, node_indices=(2, 3))
    leader.join(member(2, recovery=RecoveryRecord(round_number=1, quorum_rounds=(rival,)), ranks=(0,)))
    for member_id in ("m0", "m1"):
        leader.feed(Reported(id=member_id, message=RoundAcknowledged(round_number=1)))
    leader.wait(0.25)
    assert leader.only(RoundBreak).kind is BreakKind.MEMBERSHIP
    leader.stop_all(0, 1)
    assert not leader.wait(3.8)
    leader.wait(0.3)
    assert leader.formed_of() == ["m0", "m1", "m2"]


def test_takeover_recovers_round_attempt_and_budget() -> None:
    leader = Leader(rules(1, 3, max_restarts=3), takeover=True)
    leader.join(replace(member(1, recovery=known_after(ended=[0]), ranks=(1,)), is_leader=True))
    leader.join(member(2, recovery=known_after(ended=[0]), ranks=(2,)), after_s=0.1)
    leader.wait(0.25)
    form = leader.formed()
    assert (form.round_number, form.attempt) == (5, 2)
    assert [assignment.id for assignment in form.assignments] == ["m1", "m2"]


@pytest.mark.parametrize(("followed", "forms_after_s"), [("m0", 4.4), (None, 4.4), ("m4", 6.4)])
def test_takeover_with_a_member_of_an_unknown_leader_waits_for_that_leaders_rounds(followed, forms_after_s) -> None:
    """Rank 4 is unreachable, and may have formed a round with the member that joins last."""
    leader = Leader(rules(2, 5), takeover=True)
    known = known_after(ended=[0], size=5)
    one, two, three = (member(rank, recovery=known, ranks=(rank,)) for rank in (1, 2, 3))
    leader.join(replace(one, is_leader=True), two)
    assert not leader.join(replace(three, last_leader_id=followed), after_s=2.0)
    assert not leader.wait(forms_after_s - 2.2)
    leader.wait(0.2)
    assert leader.formed_of() == ["m1", "m2", "m3"]


def test_no_round_is_formed_without_a_lease() -> None:
    leader = Leader(rules(2, 2))
    leader.is_lease_held = False
    leader.join(0)
    assert not leader.join(1)
    assert leader.next_due_s() == pytest.approx(leader.now_s + LEASE_RETRY_S)
    assert not leader.wait(LEASE_RETRY_S + 0.01)
    leader.is_lease_held = True
    leader.wait(LEASE_RETRY_S + 0.01)
    assert leader.formed().round_number == 1


def test_a_leader_that_gets_no_lease_fails_at_the_join_timeout() -> None:
    leader = Leader(rules(2, 2))
    leader.is_lease_held = False
    leader.join(0, 1)
    leader.wait(60.0)
    assert not leader.actions
    leader.wait(0.05)
    assert leader.only(RendezvousFailed)


def test_an_old_timer_changes_nothing() -> None:
    """Only the timer of this round makes a failure final."""
    leader = start(2, 2, 2, max_restarts=0)
    leader.fail(0, after_s=10.0)
    assert not leader.feed(TimerFired(round_number=0), after_s=0.4)
    assert leader.feed(TimerFired(round_number=1))


def test_takeover_without_quorum_waits_until_the_join_timeout() -> None:
    leader = Leader(rules(1, 3), takeover=True)
    leader.join(replace(member(2, recovery=known_after(ended=[0]), ranks=(2,)), is_leader=True))
    assert not leader.wait(30.0)
    leader.wait(31.0)
    assert "round was formed" in leader.only(RendezvousFailed).reason


def test_takeover_waits_for_missing_members_to_rejoin_or_lose_their_leases() -> None:
    leader = Leader(rules(1, 3), takeover=True)
    leader.join(replace(member(1, recovery=known_after(ended=[0]), ranks=(1,)), is_leader=True))
    assert not leader.wait(4.0)
    leader.wait(0.5)
    assert leader.formed_of() == ["m1"]


def test_round_number_is_above_that_of_every_member() -> None:
    leader = start(1, 1, 3)
    leader.join(member(1, recovery=RecoveryRecord(round_number=9, attempt=1)), after_s=1.0)
    leader.wait(0.3)
    leader.stop_all(0)
    form = leader.formed()
    assert (form.round_number, form.attempt) == (10, 1)


def test_a_member_that_joins_after_the_end_receives_the_end() -> None:
    leader = start(1, 1, 1)
    leader.succeed(0)
    leader.join(5)
    assert leader.only(JobEnd).ids == ("m5",)


def test_surplus_members_are_announced() -> None:
    leader = Leader(rules(1, 1))
    leader.join(replace(member(3), is_leader=False), 0)
    assert "more than --nnodes allows (1)" in leader.only(Notify).text


def break_by_loss(*, max_nodes: int = 4) -> Leader:
    """A round of four nodes with limits of 5, 20 and 5 s breaks because the last one is lost."""
    leader = Leader(rules(1, max_nodes))
    leader.join(*(replace(member(each), stop_limit_s=20.0 if each == 1 else 5.0) for each in range(4)))
    leader.formed()
    leader.lose(3, after_s=10.0)
    leader.only(RoundBreak)
    return leader


def test_a_member_that_still_stops_after_every_limit_counts_as_lost() -> None:
    """Its workers were killed but cannot end (uninterruptible sleep), and its agent does not give them up."""
    leader = break_by_loss()
    leader.stop_all(0, 2)
    assert leader.next_due_s() == pytest.approx(leader.now_s + 30.0)  # the longest limit, a margin
    assert not leader.wait(29.9)
    leader.wait(0.2)
    assert leader.only(DropMembers).ids == ("m1",)
    assert "(h1) did not stop" in leader.only(Notify).text
    assert not [action for action in leader.actions if isinstance(action, RoundStart)]
    assert not leader.wait(4.2)  # its lease may not have ended
    leader.wait(0.2)
    assert leader.formed_of() == ["m0", "m2"]
    leader.join(1, after_s=30.0)  # its workers have ended after all
    leader.wait(0.3)
    assert leader.only(RoundBreak).reason.startswith("node 1 (h1) join")


def test_a_member_that_gives_up_its_workers_and_leaves_is_not_waited_for() -> None:
    leader = break_by_loss()
    leader.stop_all(0, 2)
    leader.feed(Reported(id="m1", message=Leaving(reason="cannot end process 7")), after_s=20.0)
    leader.lose(1, after_s=0.1)
    leader.wait(0.31)
    assert leader.formed_of() == ["m0", "m2"]


def test_the_leaders_own_member_is_not_dropped() -> None:
    """Its agent is this process: it leaves by itself, and the others take over."""
    leader = break_by_loss()
    leader.stop_all(1, 2)
    assert not leader.wait(31.0)
    assert leader.next_due_s() == FOREVER
    leader.stop_all(0)
    assert leader.formed_of() == ["m0", "m1", "m2"]


def test_the_join_timeout_counts_from_when_the_last_member_has_stopped() -> None:
    leader = start(2, 2, 2)
    leader.fail(0, after_s=1.0)
    leader.stop_all(0)
    leader.lose(1, after_s=65.0)
    assert not leader.wait(59.0)
    leader.wait(2.0)
    assert "1 of at least 2" in leader.only(RendezvousFailed).reason


def knows_4(number: int) -> MemberRecord:
    """A member of round 4 that saw no process end."""
    return member(number, recovery=known_after(ended=[]), ranks=(number,))


def restart_leader(min_nodes: int, max_nodes: int) -> Leader:
    """Node 0 was started again: it has no memory of the job."""
    leader = Leader(rules(min_nodes, max_nodes))
    leader.state = build_initial_state(leader.state.rules, 0.0, takeover=False, must_find_last_round=True)
    leader.join(0)
    return leader


@pytest.mark.parametrize(
    ("joins", "missing"),
    [
        pytest.param((3, 1), "2 of 3 nodes joined, and none knew a round", id="new members"),
        pytest.param((2, 2, 3), "1 of 2 nodes joined, and none knew a round", id="a spare in the place of a node"),
        pytest.param(
            (4, knows_4(1), knows_4(2)),
            "3 of 4 nodes joined, and they do not prove that round 4 was the last",
            id="alone, or with a new node, it may have gone on without these",
        ),
    ],
)
def test_a_leader_without_memory_forms_no_round_while_the_last_one_may_be_training_elsewhere(joins, missing) -> None:
    max_nodes, *members = joins
    leader = restart_leader(1, max_nodes)
    for each in members:
        assert not leader.join(each, after_s=1.0)
    assert not leader.wait(30.0)
    leader.wait(31.0)
    assert f"reach: {missing}, within 60 s" in leader.only(RendezvousFailed).reason


def test_a_leader_without_memory_forms_a_round_of_all_nodes() -> None:
    leader = restart_leader(1, 2)
    leader.join(1, after_s=20.0)
    assert leader.formed().round_number == 1


@pytest.mark.parametrize(
    ("min_nodes", "max_nodes", "first"),
    [
        pytest.param(2, 4, knows_4(1), id="without them its old process was one of too few to go on"),
        pytest.param(1, 3, 1, id="all nodes together"),
    ],
)
def test_a_leader_without_memory_trusts_members_that_it_cannot_have_left_behind(min_nodes, max_nodes, first) -> None:
    leader = restart_leader(min_nodes, max_nodes)
    leader.join(first, after_s=5.0)
    leader.join(knows_4(2))
    leader.wait(5.0)
    assert (leader.formed_of(), leader.formed().round_number) == (["m0", "m1", "m2"], 5)


def test_a_leader_without_memory_forms_a_round_with_members_that_bring_the_last_one() -> None:
    """They have seen its old process end, so it has formed no later round without them."""
    leader = restart_leader(1, 4)
    leader.join(member(2, recovery=known_after(ended=[0]), ranks=(2,)), after_s=5.0)
    assert not leader.wait(5.0)  # rank 1 may have taken over what is left
    leader.join(member(1, recovery=known_after(ended=[0]), ranks=(1,)))
    assert leader.formed_of() == ["m0", "m1", "m2"]
    assert leader.formed().round_number == 5


def test_idleness_that_was_measured_before_another_node_succeeded_is_no_hang() -> None:
    """The report is under way while the node that the idle one waits for succeeds; if it hangs, it says so again."""
    leader = start(2, 2, 2)
    hung = failure(0, exit_code=None, hung=True, reason="hung")
    idle = Reported(id="m0", message=Idle(round_number=1, failures=(hung,)))
    leader.succeed(1, after_s=1.0)
    leader.feed(idle, after_s=0.1)
    assert not any(isinstance(action, RoundBreak) for action in leader.actions)
    leader.feed(idle, after_s=2.0)
    assert leader.only(RoundBreak).kind is BreakKind.FAILURE
