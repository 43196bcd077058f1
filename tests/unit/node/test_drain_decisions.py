"""A drain as one node sees it: its actions, in order."""

import re
import signal

import pytest
from doubles.node_history import RunningNode
from doubles.samples import make_round

from muster._shared.contract import ExitCode
from muster._shared.layouts import StatusPageLayout as Layout
from muster._shared.records import replace
from muster.agent.node import actions as do
from muster.agent.node import events as on
from muster.agent.node.state import (
    NO_FAILURES,
    Delaying,
    Ended,
    Rejoin,
    Running,
    StartNext,
    Stopping,
    StopStep,
    Succeeded,
)
from muster.agent.rendezvous import interface as rdzv
from muster.agent.rendezvous.drain_ceiling import RankSlot

ROUND = make_round(number=3, group_rank=1, group_world_size=2, rank_offset=2, world_size=4)
BEGUN = rdzv.DrainBegun(round_number=3, drain=1, limit_s=8.0)
COMMITTED = rdzv.DrainCommitted(round_number=3, drain=1, step=12)
WITHDRAWN = rdzv.DrainWithdrawn(round_number=3, drain=1, reason="no")


def slot(asked: int | None, *, stride: int = 1, step: int | None = None, is_asking: bool = True) -> RankSlot:
    return RankSlot(global_rank=0, step=step, asked=asked, stride=stride, is_asking=is_asking)


def read(*slots: RankSlot) -> on.SlotsRead:
    ranked = (replace(each, global_rank=2 + local_rank) for local_rank, each in enumerate(slots))
    return on.SlotsRead(round_number=3, drain=1, slots=tuple(ranked))


def exited(local_rank: int, code: int = 0, asked: int | None = 12) -> on.WorkerExited:
    return on.WorkerExited(round_number=3, local_rank=local_rank, code=code, asked=asked)


def expired(purpose: on.TimerPurpose, number: int = 3) -> on.TimerExpired:
    drain = 1 if purpose is on.TimerPurpose.LOOK else 0
    return on.TimerExpired(timer=on.RoundTimer(purpose=purpose, round_number=number, number=drain))


def term(at_s: float = 0.0, *, is_asked: bool = True, signum: int = signal.SIGTERM) -> on.SignalReceived:
    return on.SignalReceived(signum=signum, is_asked=is_asked, at_s=at_s)


class Node(RunningNode):
    """In round 3."""

    def __init__(self, **rules) -> None:
        super().__init__(ROUND, shutdown_timeout_s=20.0, **rules)

    def commit(self):
        return self.send(
            BEGUN, read(slot(10), slot(9)), expired(on.TimerPurpose.LOOK), read(slot(10), slot(10)), COMMITTED
        )


def kinds(actions) -> list[type]:
    return [type(each) for each in actions]


@pytest.fixture
def node():
    return Node()


def test_a_preempted_node_asks_for_a_drain_and_its_workers_run_on(node):
    line, ask, timer = node.send(term())
    assert "asking all ranks" in line.text
    assert ask == rdzv.DrainAsked(round_number=ROUND.number, reason="received SIGTERM", limit_s=10.0)
    assert (timer.timer.purpose, timer.delay_s) == (on.TimerPurpose.DRAIN, 10.0)
    line, *_ = Node(sigterm_senders="`scancel`").send(term())
    assert re.findall(r"\d+ s|`\w+`", line.text) == ["10 s", "`scancel`"]
    assert isinstance(node.state.phase, Running)


def test_a_preempted_node_whose_workers_stand_still_prints_what_they_do_beside_the_drain(node):
    assert do.CollectStacks not in kinds(Node().send(replace(term(), still_s=9.0)))
    actions = node.send(replace(term(), still_s=12.0))
    assert do.CollectStacks(round=ROUND, is_hang=True) in actions
    assert rdzv.DrainAsked in kinds(actions)
    stacks = {0: on.WorkerStack(text="stack")}
    assert node.send(on.StacksCollected(round_number=ROUND.number, stacks=stacks)) == [
        do.PrintPage(round=ROUND, stacks=stacks)
    ]
    assert isinstance(node.state.phase, Running), "the drain goes on"


@pytest.mark.parametrize(
    ("event", "rules"),
    [
        (term(is_asked=False), {}),
        (term(signum=signal.SIGINT), {}),
        (term(signum=signal.SIGHUP), {}),
        (term(), {"drain_limit_s": 0.0}),
        (on.SignalReceived(signum=signal.SIGTERM, is_asked=True, guard_died=True), {}),
    ],
)
def test_what_is_no_preemption_stops_the_workers_at_once(event, rules):
    node = Node(**rules)
    node.send(event)
    assert isinstance(node.state.phase, Stopping)
    assert node.state.phase.then.code == 128 + event.signum


def test_another_signal_may_announce_a_preemption():
    node = Node(preempt_signals=frozenset({signal.SIGTERM, signal.SIGUSR1}))
    assert rdzv.DrainAsked in kinds(node.send(term(signum=signal.SIGUSR1)))
    unasked = Node(preempt_signals=frozenset({signal.SIGTERM, signal.SIGUSR1}))
    actions = unasked.send(term(signum=signal.SIGUSR1, is_asked=False))
    assert do.SignalWorkers(signum=signal.SIGUSR1) in actions
    assert unasked.state.phase.then.code == ExitCode.TERMINATED


def test_a_second_signal_hastens_but_not_a_copy_of_the_first(node):
    node.send(term(5.0))
    assert node.send(term(5.5)) == []
    actions = node.send(term(6.5))
    assert do.SignalWorkers(signum=signal.SIGTERM) in actions
    assert rdzv.Leaving in kinds(actions)


def test_the_ceiling_is_written_looked_at_again_and_reported(node):
    deadline, timer, look = node.send(BEGUN)
    assert deadline == do.WriteDeadline(delay_s=28.0)
    assert (timer.timer.purpose, timer.delay_s, look) == (
        on.TimerPurpose.DRAIN,
        8.0,
        do.ReadSlots(round_number=3, drain=1),
    )
    write, wait = node.send(read(slot(10), slot(9)))
    assert write == do.WriteCommand(drain=1, step=11, is_committed=False)
    assert wait.timer.purpose is on.TimerPurpose.LOOK
    assert node.send(expired(on.TimerPurpose.LOOK)) == [do.ReadSlots(round_number=3, drain=1)]
    write, wait = node.send(read(slot(11), slot(9)))
    assert (write.step, wait.timer.purpose) == (13, on.TimerPurpose.LOOK)
    [report] = node.send(read(slot(12), slot(9)))
    assert isinstance(report, rdzv.DrainReported)
    assert report.report.ceiling == 13
    assert [(rank.global_rank, rank.asked) for rank in report.report.ranks] == [(2, 12), (3, 9)]
    assert node.send(expired(on.TimerPurpose.LOOK)) == []
    assert node.send(COMMITTED) == [do.WriteCommand(drain=1, step=12, is_committed=True)]
    assert node.send(WITHDRAWN) == [], "a committed drain cannot be withdrawn"
    assert node.send(rdzv.DrainCommitted(round_number=3, drain=1, step=14)) == []


def test_a_rank_that_asked_once_is_looked_at_again_until_its_stride_is_known(node):
    node.send(BEGUN, read(slot(0, stride=0), slot(4, stride=4)))
    [wait] = node.send(read(slot(0, stride=0), slot(4, stride=4)))
    assert isinstance(wait, do.StartTimer)
    [report] = node.send(read(slot(4, stride=4), slot(4, stride=4)))
    assert [rank.stride for rank in report.report.ranks] == [4, 4]


@pytest.mark.parametrize(
    ("event", "refusal"),
    [
        (read(slot(3), slot(None, is_asking=False)), "rank 3 called should_stop with decreasing steps"),
        (read(slot(3), slot(None, step=3)), "rank 3 has done step 3 and never called should_stop"),
        (on.SlotsRead(round_number=3, drain=1, slots=None), "a node has no status page"),
    ],
)
def test_a_rank_with_which_no_step_can_be_agreed_on_is_reported(event, refusal, node):
    [action] = node.send(BEGUN, event)
    assert action == rdzv.DrainReported(
        round_number=ROUND.number, drain=1, report=rdzv.DrainReport(ceiling=0, refusal=refusal)
    )


def test_ranks_that_have_ended_are_left_out(node):
    node.send(exited(0, asked=None), BEGUN, read(slot(50), slot(9)))
    [report] = node.send(read(slot(50), slot(9)))
    assert report.report.ceiling == 10
    assert [rank.global_rank for rank in report.report.ranks] == [3]


def test_events_of_other_rounds_and_drains_change_nothing(node):
    other_round = rdzv.DrainBegun(round_number=2, drain=1, limit_s=1.0)
    assert node.send(other_round) == []
    assert node.send(COMMITTED) == [], "none has begun"
    assert node.send(BEGUN, rdzv.DrainCommitted(round_number=3, drain=2, step=4)) == []
    assert node.send(rdzv.DrainWithdrawn(round_number=3, drain=9, reason="old")) == []
    assert node.send(BEGUN) == []
    assert node.send(expired(on.TimerPurpose.DRAIN, number=2)) == []


def test_what_was_read_for_the_last_drain_verifies_no_ceiling_of_this_one(node):
    """A stop may take a pause's place while the pause's look is under way, all in one turn of the loop."""
    node.send(BEGUN, read(slot(10), slot(9)))
    old = read(slot(10), slot(9))
    node.send(WITHDRAWN, rdzv.DrainBegun(round_number=3, drain=2, limit_s=8.0))
    assert node.send(old) == []
    first = replace(read(slot(10), slot(9)), drain=2)
    write, wait = node.send(first)
    assert write == do.WriteCommand(drain=2, step=11, is_committed=False)
    assert node.send(expired(on.TimerPurpose.LOOK)) == [], "of the last drain: too early"
    assert node.send(on.TimerExpired(timer=wait.timer)) == [do.ReadSlots(round_number=3, drain=2)]


@pytest.mark.parametrize(
    "phase",
    [
        Delaying(round=ROUND, is_held=True),
        Stopping(
            round=replace(ROUND, number=2),
            step=StopStep.KILLING,
            signum=signal.SIGTERM,
            alive=frozenset(),
            failures=NO_FAILURES,
            then=StartNext(round=ROUND, is_held=False),
        ),
    ],
)
def test_before_its_workers_are_started_a_node_refuses(phase, node):
    """The ranks of the other nodes would wait for its report for ever."""
    node.state = replace(node.state, phase=phase)
    [action] = node.send(BEGUN)
    refusal = "a node has not started its workers yet"
    assert action == rdzv.DrainReported(
        round_number=ROUND.number, drain=1, report=rdzv.DrainReport(ceiling=0, refusal=refusal)
    )
    assert node.send(replace(BEGUN, round_number=4)) == []


def test_withdrawn_the_workers_go_on_and_the_preempted_node_leaves():
    other = Node()
    other.send(BEGUN, read(slot(3), slot(3)))
    assert other.send(WITHDRAWN) == [do.WithdrawCommand(), do.WriteDeadline(delay_s=None)]
    assert isinstance(other.state.phase, Running)
    node = Node()
    node.send(term(), BEGUN, read(slot(3), slot(3)))
    actions = node.send(WITHDRAWN)
    assert kinds(actions)[:2] == [do.WithdrawCommand, do.WriteDeadline]
    assert do.SignalWorkers(signum=signal.SIGTERM) in actions
    assert rdzv.Leaving(reason="received SIGTERM", is_told=True) in actions
    assert node.state.phase.then == do.Finish(code=143)


def test_a_backend_that_cannot_agree_answers_at_once(node):
    node.send(term())
    actions = node.send(rdzv.DrainWithdrawn(round_number=3, drain=0, reason="--rdzv-backend x cannot agree on a step"))
    assert actions[0] == do.PrintLine(text="no common last step: --rdzv-backend x cannot agree on a step")
    assert do.SignalWorkers(signum=signal.SIGTERM) in actions


def test_a_node_that_is_preempted_while_a_failure_of_its_own_is_reported_leaves_at_once(node):
    """The round ends anyway, and no drain with it."""
    node.send(exited(1, code=1, asked=None))
    assert rdzv.Leaving in kinds(node.send(term()))
    reported = Node()
    reported.send(exited(1, code=1, asked=None), on.FailureSettled(round_number=3, local_rank=1))
    assert rdzv.Leaving in kinds(reported.send(term()))


def test_a_node_whose_ranks_know_the_step_says_that_it_leaves_with_them(node):
    node.commit()
    [line, *_] = node.send(term())
    assert "SIGTERM: leaving when" in line.text
    early = Node()
    early.send(BEGUN)
    [line, *_] = early.send(term())
    assert "asking all ranks" in line.text


def test_each_drain_has_one_limit_on_a_node(node):
    """A node that is preempted has set that of the stop; a checkpoint before it has its own."""
    node.send(term())
    assert do.StartTimer not in kinds(node.send(BEGUN))
    node = Node()
    node.send(term())
    assert do.StartTimer in kinds(node.send(replace(BEGUN, kind=Layout.CHECKPOINT)))


def test_a_later_drain_takes_the_place_of_one_whose_end_was_not_told(node):
    node.send(BEGUN)
    assert do.ReadSlots(round_number=3, drain=2) in node.send(replace(BEGUN, drain=2))


def test_a_preempted_node_leaves_in_time_also_during_a_pause(node):
    node.send(term(), replace(BEGUN, kind=Layout.PAUSE))
    assert rdzv.Leaving in kinds(node.send(expired(on.TimerPurpose.DRAIN)))


def test_a_node_that_is_not_preempted_keeps_the_limit_of_the_stop_too():
    own = on.TimerExpired(timer=on.RoundTimer(purpose=on.TimerPurpose.DRAIN, round_number=3, number=1))
    node = Node()
    node.commit()
    [timer] = node.send(own)
    assert timer.timer.purpose is on.TimerPurpose.TOLD
    ended = Node()
    ended.commit()
    ended.send(exited(0), exited(1))
    assert isinstance(ended.state.phase, Succeeded)
    [timer] = ended.send(own)
    assert timer.timer.purpose is on.TimerPurpose.TOLD
    waits = Node()
    waits.send(BEGUN)
    assert waits.send(own) == [], "the node that is preempted leaves; its round ends with it"


def test_ranks_that_have_stopped_at_the_step_stay_told(node):
    node.commit()
    node.send(exited(0), exited(1), WITHDRAWN)
    assert node.state.phase == Succeeded(round=ROUND, is_told=True)


def test_without_a_step_in_time_the_preempted_node_leaves_and_the_others_wait_for_that():
    other = Node()
    other.send(BEGUN, read(slot(3), slot(3)))
    assert other.send(expired(on.TimerPurpose.DRAIN)) == []
    node = Node()
    node.send(term())
    actions = node.send(expired(on.TimerPurpose.DRAIN))
    assert actions[0] == do.PrintLine(text="no step was agreed on in time")
    assert do.SignalWorkers(signum=signal.SIGTERM) in actions


@pytest.mark.parametrize("kind", [rdzv.BreakKind.MEMBERSHIP, rdzv.BreakKind.FENCED, rdzv.BreakKind.FAILURE])
def test_when_the_round_ends_the_preempted_node_leaves(kind, node):
    node.send(term(), BEGUN)
    actions = node.send(rdzv.RoundBroken(round_number=3, kind=kind, reason="node 0 was lost"))
    assert rdzv.Leaving in kinds(actions)
    assert (do.KillWorkers in kinds(actions)) == (kind is rdzv.BreakKind.FENCED)
    assert node.state.phase.then == do.Finish(code=143)


def test_workers_that_end_after_the_step_end_the_drain_whatever_their_code(node):
    node.commit()
    [line] = node.send(exited(1, code=1))
    assert "stop at step 12: " in line.text
    assert node.send(exited(0)) == [rdzv.AllSucceeded(round_number=ROUND.number, drained_rank=2)]
    assert node.state.phase == Succeeded(round=ROUND, is_told=True)
    actions = node.send(rdzv.JobEnded(succeeded=False, is_drained=True), on.WorkersGone(round_number=3))
    assert actions[-1].code == 143
    assert isinstance(node.state.phase, Ended)


def test_workers_that_end_before_the_step_have_succeeded_or_failed_as_ever(node):
    node.commit()
    assert node.send(exited(1, asked=11)) == []
    assert node.send(exited(0, asked=None)) == [rdzv.AllSucceeded(round_number=ROUND.number)]
    failing = Node()
    failing.commit()
    assert do.SettleFailure in kinds(failing.send(exited(1, code=1, asked=11)))


def test_ranks_that_were_told_the_step_get_the_grace_period_and_no_signal(node):
    node.commit()
    [timer] = node.send(expired(on.TimerPurpose.DRAIN))
    assert (timer.timer.purpose, timer.delay_s) == (on.TimerPurpose.TOLD, 20.0)
    actions = node.send(expired(on.TimerPurpose.TOLD))
    assert kinds(actions) == [do.PrintLine, do.KillWorkers]
    assert node.state.phase.then == do.Finish(code=143)


def test_a_node_whose_ranks_have_stopped_waits_for_the_others_as_long(node):
    node.commit()
    node.send(exited(0), exited(1))
    [timer] = node.send(expired(on.TimerPurpose.DRAIN))
    assert isinstance(node.state.phase, Succeeded)
    assert timer.delay_s == 20.0
    assert do.KillWorkers in kinds(node.send(expired(on.TimerPurpose.TOLD)))
    assert node.state.phase.then == do.Finish(code=143)


def test_step_0_is_a_step(node):
    node.send(BEGUN, read(slot(None), slot(None)), read(slot(None), slot(None)))
    node.send(rdzv.DrainCommitted(round_number=3, drain=1, step=0))
    node.send(exited(0, asked=0))
    assert node.send(exited(1, asked=0)) == [rdzv.AllSucceeded(round_number=ROUND.number, drained_rank=3)]


@pytest.mark.parametrize("has_ended", [False, True])
def test_when_the_round_ends_after_the_step_was_committed_every_node_exits_with_143(has_ended, node):
    node.commit()
    if has_ended:
        node.send(exited(0), exited(1))
    actions = node.send(rdzv.RoundBroken(round_number=3, kind=rdzv.BreakKind.MEMBERSHIP, reason="node 0 was lost"))
    assert rdzv.Leaving(reason="its ranks were told to stop", is_told=True) in actions
    assert node.state.phase.then == do.Finish(code=143)


@pytest.mark.parametrize(
    "kind", [rdzv.BreakKind.MEMBERSHIP, rdzv.BreakKind.FENCED, rdzv.BreakKind.FAILURE, rdzv.BreakKind.DRAINED]
)
@pytest.mark.parametrize("has_ended", [False, True])
def test_in_an_elastic_job_a_node_that_stays_goes_on(has_ended, kind):
    node = Node(is_elastic=True)
    node.commit()
    if has_ended:
        node.send(exited(0), exited(1))
    actions = node.send(rdzv.RoundBroken(round_number=3, kind=kind, reason="node 0 left"))
    assert rdzv.Leaving not in kinds(actions)
    assert node.state.phase.then == Rejoin(round=ROUND)
    assert (do.ParkWorkers in kinds(actions)) == (kind is not rdzv.BreakKind.FENCED)


def test_after_a_drained_round_a_node_of_a_fixed_job_goes_on_with_a_spare(node):
    node.commit()
    node.send(exited(0), exited(1))
    node.send(rdzv.RoundBroken(round_number=3, kind=rdzv.BreakKind.DRAINED, reason="node 0 leaves"))
    assert node.state.phase.then == Rejoin(round=ROUND)


@pytest.mark.parametrize("kind", [rdzv.BreakKind.MEMBERSHIP, rdzv.BreakKind.DRAINED])
def test_a_node_leaves_when_the_leader_says_so_or_when_it_is_preempted(kind):
    for is_preempted in (False, True):
        node = Node(is_elastic=True)
        node.send(*([term()] if is_preempted else []))
        node.commit()
        node.send(exited(0), exited(1))
        broken = rdzv.RoundBroken(round_number=3, kind=kind, reason="node 0 leaves", leaves=not is_preempted)
        assert rdzv.Leaving in kinds(node.send(broken))
        assert node.state.phase.then == do.Finish(code=143)


def test_in_an_elastic_job_only_the_preempted_node_ends_when_the_time_is_over():
    for is_preempted in (False, True):
        node = Node(is_elastic=True)
        node.send(*([term()] if is_preempted else []))
        node.commit()
        node.send(expired(on.TimerPurpose.DRAIN))
        assert (do.KillWorkers in kinds(node.send(expired(on.TimerPurpose.TOLD)))) == is_preempted


def test_the_grace_period_of_a_drain_does_not_shorten_that_of_a_later_stop():
    node = Node(is_elastic=True)
    node.commit()
    (told,) = [each for each in node.send(expired(on.TimerPurpose.DRAIN)) if isinstance(each, do.StartTimer)]
    actions = node.send(rdzv.RoundBroken(round_number=3, kind=rdzv.BreakKind.FAILURE, reason="rank 0 failed"))
    graces = [each for each in actions if isinstance(each, do.StartTimer) and each.delay_s == told.delay_s]
    assert node.send(on.TimerExpired(timer=told.timer)) == []
    assert do.KillWorkers in kinds(node.send(on.TimerExpired(timer=graces[0].timer)))


def test_a_signal_after_the_workers_have_stopped_waits_for_the_others_too(node):
    node.commit()
    node.send(exited(0), exited(1))
    line, ask, _ = node.send(term(is_asked=False))
    assert "SIGTERM: leaving when" in line.text
    assert isinstance(ask, rdzv.DrainAsked)
    assert node.send(term(at_s=0.5)) == [], "the same signal once more"
    assert rdzv.Leaving in kinds(node.send(term(at_s=3.0)))


def test_a_job_that_has_failed_for_good_is_reported_as_ever(node):
    node.commit()
    actions = node.send(rdzv.RoundBroken(round_number=3, kind=rdzv.BreakKind.FINAL, reason="rank 0 failed"))
    assert rdzv.Leaving not in kinds(actions)


def test_a_node_whose_workers_ended_before_is_told_too(node):
    node.send(BEGUN, exited(0, asked=3), exited(1, asked=3))
    assert node.send(COMMITTED) == []
    assert node.state.phase == Succeeded(round=ROUND, is_told=True)
