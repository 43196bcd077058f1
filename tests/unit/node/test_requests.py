"""What persons ask for, as one node sees it: requests, answers, pauses and checkpoints."""

import pytest
from doubles.node_history import RunningNode
from doubles.samples import make_round

from muster._shared.contract import AskKind, AskOutcome
from muster._shared.fields import LateRank
from muster._shared.layouts import StatusPageLayout as Layout
from muster._shared.records import replace
from muster._shared.reports import Answer, Stack
from muster.agent.node import actions as do
from muster.agent.node import events as on
from muster.agent.node.state import Delaying, Joining, NodeRules, NodeState
from muster.agent.node.worker_decisions import OWN_REQUEST
from muster.agent.rendezvous import interface as rdzv
from muster.agent.rendezvous.drain_ceiling import RankSlot
from muster.agent.rendezvous.report_messages import RequestAnswer

ROUND = make_round(number=3, rank_offset=2)
ASKED = on.Requested(request=1, kind=AskKind.PAUSE, limit_s=30.0)
DONE = Answer(outcome=AskOutcome.DONE, line="done")


class Node(RunningNode):
    """In round 3."""

    def __init__(self) -> None:
        super().__init__(ROUND)

    def begin(self, kind: int):
        return self.send(rdzv.DrainBegun(round_number=3, drain=1, limit_s=30.0, kind=kind, is_asked=True))

    def commit(self, kind: int):
        self.begin(kind)
        look = on.TimerExpired(timer=on.RoundTimer(purpose=on.TimerPurpose.LOOK, round_number=3, number=1))
        [report] = self.send(read(10, 9), look, read(10, 10))
        assert isinstance(report, rdzv.DrainReported)
        return self.send(rdzv.DrainCommitted(round_number=3, drain=1, step=12))


def read(*asked: int, saved: int | None = None) -> on.SlotsRead:
    slots = tuple(
        RankSlot(global_rank=2 + rank, step=each, asked=each, stride=1, is_asking=True, saved=saved, silent_s=4.0)
        for rank, each in enumerate(asked)
    )
    return on.SlotsRead(round_number=3, drain=1, slots=slots)


def over() -> on.TimerExpired:
    return on.TimerExpired(timer=on.RoundTimer(purpose=on.TimerPurpose.DRAIN, round_number=3, number=1))


@pytest.fixture
def node():
    return Node()


@pytest.mark.parametrize("kind", [rdzv.RequestAnswered, RequestAnswer])
def test_a_request_goes_to_the_leader_and_its_answer_back(kind, node):
    """Also the answer as it has travelled."""
    assert node.send(ASKED) == [rdzv.Asked(round_number=ROUND.number, request=1, kind=AskKind.PAUSE, limit_s=30.0)]
    answered = kind(request=1, answer=DONE)
    assert node.send(answered) == [do.AnswerPerson(requests=(1,), answer=DONE)]
    assert node.send(answered) == []


def test_without_workers_a_request_is_refused(node):
    node.state = NodeState(rules=NodeRules(nproc=2), phase=Joining(last=ROUND))
    [refused] = node.send(ASKED)
    assert (refused.requests, refused.answer.outcome) == ((1,), AskOutcome.REFUSED)


def test_every_request_is_answered_when_the_leader_is_lost(node):
    node.send(ASKED)
    actions = node.send(rdzv.RoundBroken(round_number=3, kind=rdzv.BreakKind.FENCED, reason="the leader was lost"))
    [lost] = [each for each in actions if isinstance(each, do.AnswerPerson)]
    assert (lost.requests, lost.answer.outcome) == ((1,), AskOutcome.LOST)
    assert "leader was lost" in lost.answer.line
    assert node.send(rdzv.RequestAnswered(request=1, answer=DONE)) == [], "it has its answer"


def test_every_request_is_answered_when_another_leader_has_formed_a_round(node):
    node.send(ASKED)
    actions = node.send(rdzv.RoundFormed(round=replace(ROUND, number=4)))
    [lost] = [each for each in actions if isinstance(each, do.AnswerPerson)]
    assert (lost.requests, lost.answer.outcome, "leader was lost" in lost.answer.line) == ((1,), AskOutcome.LOST, True)


def test_a_pause_is_reported_when_all_ranks_wait(node):
    write, look = node.commit(Layout.PAUSE)
    assert write == do.WriteCommand(drain=1, step=12, is_committed=True, kind=Layout.PAUSE)
    assert look == do.ReadSlots(round_number=3, drain=1, kind=Layout.PAUSE)
    [again] = node.send(read(12, 11))
    assert node.send(on.TimerExpired(timer=again.timer)) == [look]
    assert node.send(read(12, 12)) == [rdzv.DrainFollowed(round_number=ROUND.number, drain=1)]
    assert node.send(on.TimerExpired(timer=again.timer)) == []
    assert node.send(over()) == []
    assert node.send(on.WorkersIdle(round_number=3, reason="idle")) == []
    assert node.send(rdzv.DrainWithdrawn(round_number=3, drain=1, reason="resumed")) == [do.WithdrawCommand()]
    assert [type(each) for each in node.send(on.WorkersIdle(round_number=3, reason="idle"))] == [do.ReportIdle]


def test_ranks_that_are_late_are_named_at_the_end_of_the_limit():
    late = LateRank(global_rank=3, step=7, silent_s=4.0)
    node = Node()
    node.commit(Layout.PAUSE)
    assert node.send(over()) == [do.ReadSlots(round_number=3, drain=1, kind=Layout.PAUSE)]
    assert node.send(read(12, 7)) == [rdzv.DrainFollowed(round_number=ROUND.number, drain=1, late=(late,))]
    node = Node()
    node.commit(Layout.CHECKPOINT)
    node.send(over())
    [report] = node.send(read(12, 12, saved=11))
    assert [rank.global_rank for rank in report.late] == [2, 3]


def test_a_checkpoint_has_no_deadline_and_stops_no_worker(node):
    assert do.WriteDeadline not in map(type, node.begin(Layout.CHECKPOINT))
    node = Node()
    [write] = node.commit(Layout.CHECKPOINT)
    assert write.kind == Layout.CHECKPOINT
    assert not node.state.phase.drain.is_told
    assert node.send(rdzv.DrainWithdrawn(round_number=3, drain=1, reason="all have saved")) == [do.WithdrawCommand()]


def test_stacks_are_collected_for_the_leader(node):
    assert node.send(rdzv.StacksWanted(round_number=3, number=5)) == [do.SendStacks(round=ROUND, number=5)]
    assert node.send(rdzv.StacksWanted(round_number=2, number=6)) == []
    node.state = replace(node.state, phase=Delaying(round=ROUND, is_held=True))
    assert node.send(rdzv.StacksWanted(round_number=3, number=7)) == [do.SendStacks(round=ROUND, number=7)], (
        "it has none"
    )


def test_a_node_that_gets_sigquit_prints_what_the_leader_has_collected(node):
    node.state = replace(node.state, phase=replace(node.state.phase, round=replace(ROUND, group_world_size=2)))
    [asked] = node.send(on.StacksRequested())
    assert (asked.request, asked.kind) == (OWN_REQUEST, AskKind.STACKS)
    stack = Stack(global_rank=3, node=1, local_rank=1, text="File x")
    answer = Answer(outcome=AskOutcome.LATE, line="stacks of 1", stacks=(stack,))
    printed = node.send(rdzv.RequestAnswered(request=OWN_REQUEST, answer=answer))
    assert [line.text for line in printed] == ["stacks of 1", "stacks of rank 3:", "  File x"]


def test_a_node_whose_leader_refuses_prints_its_own_stacks(node):
    formed = replace(ROUND, group_world_size=2)
    node.state = replace(node.state, phase=replace(node.state.phase, round=formed))
    node.send(on.StacksRequested())
    refused = Answer(outcome=AskOutcome.REFUSED, line="this backend cannot")
    assert node.send(rdzv.RequestAnswered(request=OWN_REQUEST, answer=refused)) == [do.PrintStacks(round=formed)]


def test_what_was_asked_for_stacks_is_no_person(node):
    node.state = replace(node.state, phase=replace(node.state.phase, round=replace(ROUND, group_world_size=2)))
    node.send(on.StacksRequested())
    assert do.AnswerPerson not in map(type, node.send(rdzv.RoundFormed(round=replace(ROUND, number=4))))


def test_ranks_that_let_no_step_be_agreed_on_are_named_at_the_end_of_the_limit(node):
    """It is not known how far they will ask: they have asked once."""
    node.begin(Layout.PAUSE)
    once = on.SlotsRead(round_number=3, drain=1, slots=tuple(replace(slot, stride=0) for slot in read(10, 10).slots))
    node.send(once)
    assert node.send(over()) == [do.ReadSlots(round_number=3, drain=1, kind=Layout.PAUSE)]
    [report] = node.send(once)
    assert isinstance(report, rdzv.DrainFollowed)
    assert [(late.global_rank, late.step) for late in report.late] == [(2, 10), (3, 10)]


def test_a_node_that_has_reported_names_no_rank_when_others_let_no_step_be_agreed_on(node):
    node.begin(Layout.PAUSE)
    look = on.TimerExpired(timer=on.RoundTimer(purpose=on.TimerPurpose.LOOK, round_number=3, number=1))
    [report] = node.send(read(10, 9), look, read(10, 10))
    assert isinstance(report, rdzv.DrainReported)
    node.send(over())
    assert node.send(read(10, 10)) == [rdzv.DrainFollowed(round_number=ROUND.number, drain=1)]


def test_what_was_read_after_a_pause_was_withdrawn_changes_nothing(node):
    node.begin(Layout.PAUSE)
    node.send(rdzv.DrainWithdrawn(round_number=3, drain=1, reason="resumed"))
    assert node.send(read(10, 10)) == []
    assert node.send(on.TimerExpired(timer=on.RoundTimer(purpose=on.TimerPurpose.LOOK, round_number=3, number=1))) == []


def test_a_stop_that_a_person_asked_for_reports_its_late_ranks_and_gives_them_the_grace_period(node):
    node.commit(Layout.STOP)
    look, grace = node.send(over())
    assert look == do.ReadSlots(round_number=3, drain=1, kind=Layout.STOP)
    assert grace.timer.purpose is on.TimerPurpose.TOLD
