"""Nodes that join a running job: all ranks stop at one step and save first, so a join costs no step."""

import pytest
from doubles.leader_history import Leader, rules

from muster._shared.contract import AskKind
from muster._shared.layouts import StatusPageLayout as Layout
from muster.agent.rendezvous.consensus.actions import Notify, RoundBreak
from muster.agent.rendezvous.consensus.events import Reported
from muster.agent.rendezvous.consensus.state import RoundRunning
from muster.agent.rendezvous.interface import (
    AllSucceeded,
    Asked,
    AskingRank,
    BreakKind,
    DrainAsked,
    DrainBegun,
    DrainCommitted,
    DrainDone,
    DrainReport,
    DrainReported,
    DrainWithdrawn,
)
from muster.agent.runtime.limits import JOIN_STOP_LIMIT_S


def begin_join() -> Leader:
    """Two nodes train, and a third one is ready to join."""
    leader = Leader(rules(1, 3))
    leader.stops_for_joins = True
    leader.form_by_last_call(2)
    leader.join(2, after_s=5.0)
    begun = leader.only(DrainBegun)
    assert (begun.ids, begun.is_asked, begun.is_join) == (("m0", "m1"), False, True)
    return leader


def report(leader: Leader, number: int, step: int, refusal: str | None = None) -> None:
    ranks = (AskingRank(global_rank=number, asked=step, stride=1),)
    sent = DrainReport(ceiling=step + 1, ranks=ranks, refusal=refusal)
    drain = leader.state.phase.drain.number
    reported = DrainReported(round_number=leader.state.round_number, drain=drain, report=sent)
    leader.feed(Reported(id=f"m{number}", message=reported))


def commit(leader: Leader) -> None:
    report(leader, 0, 40)
    report(leader, 1, 41)
    assert leader.only(DrainCommitted).step == 42


def stop(leader: Leader, *numbers: int) -> None:
    """Their ranks have stopped at the step."""
    for number in numbers:
        done = AllSucceeded(round_number=leader.state.round_number, drained_rank=number)
        leader.feed(Reported(id=f"m{number}", message=done))


def test_all_ranks_stop_at_one_step_and_the_next_round_has_the_new_node() -> None:
    leader = begin_join()
    commit(leader)
    stop(leader, 0, 1)
    broken = leader.only(RoundBreak)
    assert (broken.kind, broken.is_join, broken.is_leave, broken.leaving) == (BreakKind.DRAINED, True, False, ())
    assert broken.reason == "node 2 (h2) joins after step 42: the job continues"
    leader.stop_all(0, 1)
    assert leader.formed_of() == ["m0", "m1", "m2"]
    assert leader.formed().attempt == 0


def refuse_to_stop(leader: Leader) -> None:
    """They have never asked `should_stop`, so the leader asks for a wait with a snapshot."""
    report(leader, 0, 40)
    report(leader, 1, 41, refusal="rank 1 has done step 41 and never called should_stop")
    begun = leader.only(DrainBegun)
    assert (begun.drain, begun.kind, begun.ids) == (2, Layout.JOIN, ("m0", "m1"))


def follow(leader: Leader, number: int) -> None:
    """Its ranks wait, and have a snapshot."""
    done = DrainDone(round_number=leader.state.round_number, drain=2)
    leader.feed(Reported(id=f"m{number}", message=done))


def test_ranks_that_only_keep_snapshots_wait_at_one_step_until_all_do() -> None:
    leader = begin_join()
    refuse_to_stop(leader)
    commit(leader)
    follow(leader, 0)
    assert not any(isinstance(each, RoundBreak) for each in leader.actions)
    follow(leader, 1)
    broken = leader.only(RoundBreak)
    assert (broken.kind, broken.is_join) == (BreakKind.MEMBERSHIP, True)
    assert broken.reason == "node 2 (h2) joins after step 42: the job continues"
    leader.stop_all(0, 1)
    assert leader.formed_of() == ["m0", "m1", "m2"]
    assert leader.formed().attempt == 0


def test_a_job_that_ends_before_the_step_is_not_run_again() -> None:
    leader = begin_join()
    refuse_to_stop(leader)
    commit(leader)
    for number in range(2):
        done = AllSucceeded(round_number=leader.state.round_number, drained_rank=None)
        leader.feed(Reported(id=f"m{number}", message=done))
        assert not any(isinstance(each, RoundBreak) for each in leader.actions)
    assert not isinstance(leader.state.phase, RoundRunning)


def test_a_stop_ends_the_wait() -> None:
    leader = begin_join()
    refuse_to_stop(leader)
    commit(leader)
    asked = DrainAsked(round_number=leader.state.round_number, reason="received SIGTERM", limit_s=8.0)
    leader.feed(Reported(id="m1", message=asked))
    assert leader.only(DrainWithdrawn).drain == 2
    assert leader.only(DrainBegun).kind == Layout.STOP
    assert not leader.state.phase.drain.is_join


def test_if_no_step_is_agreed_on_the_round_breaks_at_once() -> None:
    leader = begin_join()
    refuse_to_stop(leader)
    report(leader, 0, 40, refusal="rank 0 has done step 40 and never called snapshots.save")
    broken = leader.only(RoundBreak)
    assert (broken.kind, broken.is_join) == (BreakKind.MEMBERSHIP, True)
    assert broken.reason.startswith("node 2 (h2) joins, but rank 1 has done step 41 ")


@pytest.mark.parametrize("is_committed", [False, True])
def test_ranks_that_do_not_stop_in_time_are_stopped_at_once(is_committed: bool) -> None:
    leader = begin_join()
    if is_committed:
        commit(leader)
    assert leader.next_due_s() == pytest.approx(leader.now_s + JOIN_STOP_LIMIT_S)
    leader.wait(JOIN_STOP_LIMIT_S)
    assert leader.only(RoundBreak).kind is BreakKind.MEMBERSHIP


def test_if_the_new_node_is_lost_before_the_step_is_agreed_on_the_ranks_go_on() -> None:
    leader = begin_join()
    report(leader, 0, 40)
    leader.lose(2)
    assert leader.only(DrainWithdrawn).ids == ("m0", "m1")
    report_is_late = DrainReported(
        round_number=leader.state.round_number, drain=1, report=DrainReport(ceiling=42, refusal=None)
    )
    assert not leader.feed(Reported(id="m1", message=report_is_late))
    leader.join(3, after_s=1.0)
    assert leader.only(DrainBegun).drain == 2


def test_if_it_is_lost_later_the_others_form_the_next_round() -> None:
    leader = begin_join()
    commit(leader)
    leader.lose(2)
    stop(leader, 0, 1)
    assert leader.only(RoundBreak).kind is BreakKind.DRAINED
    leader.stop_all(0, 1)
    assert leader.formed_of() == ["m0", "m1"]


def test_a_loss_while_a_join_is_planned_breaks_the_round_for_both() -> None:
    leader = begin_join()
    commit(leader)
    leader.lose(1)
    assert leader.only(RoundBreak).kind is BreakKind.MEMBERSHIP
    assert leader.reform(0) == ["m0", "m2"]


def test_a_preempted_node_leaves_with_the_same_step() -> None:
    leader = begin_join()
    commit(leader)
    asked = DrainAsked(round_number=leader.state.round_number, reason="received SIGTERM", limit_s=8.0)
    leader.feed(Reported(id="m1", message=asked))
    stop(leader, 0, 1)
    broken = leader.only(RoundBreak)
    assert (set(broken.ids), broken.leaving) == ({"m0", "m1", "m2"}, ("m1",))
    assert "node 1 (h1) leaves after step 42" in broken.reason


@pytest.mark.parametrize("kind", [AskKind.STOP, AskKind.CHECKPOINT])
def test_what_a_person_asks_for_meanwhile(kind: AskKind) -> None:
    leader = begin_join()
    asked = Asked(round_number=leader.state.round_number, request=1, kind=kind, limit_s=30.0)
    leader.feed(Reported(id="m1", message=asked))
    if kind is AskKind.STOP:
        assert leader.only(DrainBegun).is_asked
        assert not leader.state.phase.drain.is_join
    else:
        assert leader.state.phase.drain.is_join


def test_a_join_waits_until_a_checkpoint_that_was_asked_for_has_ended() -> None:
    leader = Leader(rules(1, 3))
    leader.stops_for_joins = True
    leader.form_by_last_call(2)
    asked = Asked(round_number=1, request=1, kind=AskKind.CHECKPOINT, limit_s=30.0)
    leader.feed(Reported(id="m1", message=asked))
    leader.join(2, after_s=1.0)
    report(leader, 0, 40, refusal="rank 0 called should_checkpoint with decreasing steps")
    assert [each.is_asked for each in leader.actions if isinstance(each, DrainBegun)] == [False]
    assert any("refused" in each.text for each in leader.actions if isinstance(each, Notify))
