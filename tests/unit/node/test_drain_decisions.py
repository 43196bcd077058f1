"""A drain as one node sees it: its actions, in order."""

import signal

import pytest
from doubles.node_history import RunningNode
from doubles.samples import make_round

from muster._shared.contract import ExitCode
from muster._shared.layouts import StatusPageLayout as Layout
from muster._shared.records import replace
from muster.agent.node.actions import (
    CollectStacks,
    Finish,
    KillWorkers,
    ParkWorkers,
    PrintLine,
    PrintPage,
    ReadSlots,
    SettleFailure,
    SignalWorkers,
    StartTimer,
    WithdrawCommand,
    WriteCommand,
    WriteDeadline,
)
from muster.agent.node.events import (
    FailureSettled,
    RoundTimer,
    SignalReceived,
    SlotsRead,
    StacksCollected,
    TimerExpired,
    TimerPurpose,
    WorkerExited,
    WorkersGone,
    WorkerStack,
)
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
from muster.agent.rendezvous.drain_ceiling import RankSlot
from muster.agent.rendezvous.interface import (
    AllSucceeded,
    BreakKind,
    DrainAsked,
    DrainBegun,
    DrainCommitted,
    DrainReport,
    DrainReported,
    DrainWithdrawn,
    JobEnded,
    Leaving,
    RoundBroken,
)

ROUND = make_round(number=3, group_rank=1, group_world_size=2, rank_offset=2, world_size=4)
BEGUN = DrainBegun(round_number=3, drain=1, limit_s=8.0)
COMMITTED = DrainCommitted(round_number=3, drain=1, step=12)
WITHDRAWN = DrainWithdrawn(round_number=3, drain=1, reason="no")


def slot(asked: int | None, *, stride: int = 1, step: int | None = None, is_asking: bool = True) -> RankSlot:
    return RankSlot(global_rank=0, step=step, asked=asked, stride=stride, is_asking=is_asking)


def read(*slots: RankSlot) -> SlotsRead:
    ranked = (replace(each, global_rank=2 + local_rank) for local_rank, each in enumerate(slots))
    return SlotsRead(round_number=3, drain=1, slots=tuple(ranked))


def exited(local_rank: int, code: int = 0, asked: int | None = 12) -> WorkerExited:
    return WorkerExited(round_number=3, local_rank=local_rank, code=code, asked=asked)


def expired(purpose: TimerPurpose, number: int = 3) -> TimerExpired:
    drain = 1 if purpose is TimerPurpose.LOOK else 0
    return TimerExpired(timer=RoundTimer(purpose=purpose, round_number=number, number=drain))


def term(at_s: float = 0.0, *, is_asked: bool = True, signum: int = signal.SIGTERM) -> SignalReceived:
    return SignalReceived(signum=signum, is_asked=is_asked, at_s=at_s)


class Node(RunningNode):
    """In round 3."""

    def __init__(self, **rules) -> None:
        super().__init__(ROUND, shutdown_timeout_s=20.0, **rules)

    def commit(self):
        return self.send(
            BEGUN, read(slot(10), slot(9)), expired(TimerPurpose.LOOK), read(slot(10), slot(10)), COMMITTED
        )


def kinds(actions) -> list[type]:
    return [type(each) for each in actions]


def test_a_preempted_node_asks_for_a_drain_and_its_workers_run_on():
    node = Node()
    line, ask, timer = node.send(term())
    assert "asking all ranks" in line.text
    assert ask == DrainAsked(round_number=ROUND.number, reason="received SIGTERM", limit_s=10.0)
    assert (timer.timer.purpose, timer.delay_s) == (TimerPurpose.DRAIN, 10.0)
    line, *_ = Node(sigterm_senders="`scancel`").send(term())
    assert line.text.endswith("10 s (usually sent by `scancel`)")
    assert isinstance(node.state.phase, Running)


def test_a_preempted_node_whose_workers_stand_still_prints_what_they_do_beside_the_drain():
    node = Node()
    assert CollectStacks not in kinds(Node().send(replace(term(), still_s=9.0)))
    actions = node.send(replace(term(), still_s=12.0))
    assert CollectStacks(round=ROUND, is_hang=True) in actions
    assert DrainAsked in kinds(actions)
    stacks = {0: WorkerStack(text="stack")}
    assert node.send(StacksCollected(round_number=ROUND.number, stacks=stacks)) == [
        PrintPage(round=ROUND, stacks=stacks)
    ]
    assert isinstance(node.state.phase, Running), "the drain goes on"


@pytest.mark.parametrize(
    ("event", "rules"),
    [
        (term(is_asked=False), {}),
        (term(signum=signal.SIGINT), {}),
        (term(signum=signal.SIGHUP), {}),
        (term(), {"drain_limit_s": 0.0}),
        (SignalReceived(signum=signal.SIGTERM, is_asked=True, guard_died=True), {}),
    ],
)
def test_what_is_no_preemption_stops_the_workers_at_once(event, rules):
    node = Node(**rules)
    node.send(event)
    assert isinstance(node.state.phase, Stopping)
    assert node.state.phase.then.code == 128 + event.signum


def test_another_signal_may_announce_a_preemption():
    node = Node(preempt_signals=frozenset({signal.SIGTERM, signal.SIGUSR1}))
    assert DrainAsked in kinds(node.send(term(signum=signal.SIGUSR1)))
    unasked = Node(preempt_signals=frozenset({signal.SIGTERM, signal.SIGUSR1}))
    actions = unasked.send(term(signum=signal.SIGUSR1, is_asked=False))
    assert SignalWorkers(signum=signal.SIGUSR1) in actions
    assert unasked.state.phase.then.code == ExitCode.TERMINATED


def test_a_second_signal_hastens_but_not_a_copy_of_the_first():
    node = Node()
    node.send(term(5.0))
    assert node.send(term(5.5)) == []
    actions = node.send(term(6.5))
    assert SignalWorkers(signum=signal.SIGTERM) in actions
    assert Leaving in kinds(actions)


def test_the_ceiling_is_written_looked_at_again_and_reported():
    node = Node()
    deadline, timer, look = node.send(BEGUN)
    assert deadline == WriteDeadline(delay_s=28.0)
    assert (timer.timer.purpose, timer.delay_s, look) == (TimerPurpose.DRAIN, 8.0, ReadSlots(round_number=3, drain=1))
    write, wait = node.send(read(slot(10), slot(9)))
    assert write == WriteCommand(drain=1, step=11, is_committed=False)
    assert wait.timer.purpose is TimerPurpose.LOOK
    assert node.send(expired(TimerPurpose.LOOK)) == [ReadSlots(round_number=3, drain=1)]
    write, wait = node.send(read(slot(11), slot(9)))
    assert (write.step, wait.timer.purpose) == (13, TimerPurpose.LOOK)
    [report] = node.send(read(slot(12), slot(9)))
    assert isinstance(report, DrainReported)
    assert report.report.ceiling == 13
    assert [(rank.global_rank, rank.asked) for rank in report.report.ranks] == [(2, 12), (3, 9)]
    assert node.send(expired(TimerPurpose.LOOK)) == []
    assert node.send(COMMITTED) == [WriteCommand(drain=1, step=12, is_committed=True)]
    assert node.send(WITHDRAWN) == [], "a committed drain cannot be withdrawn"
    assert node.send(DrainCommitted(round_number=3, drain=1, step=14)) == []


def test_a_rank_that_asked_once_is_looked_at_again_until_its_stride_is_known():
    node = Node()
    node.send(BEGUN, read(slot(0, stride=0), slot(4, stride=4)))
    [wait] = node.send(read(slot(0, stride=0), slot(4, stride=4)))
    assert isinstance(wait, StartTimer)
    [report] = node.send(read(slot(4, stride=4), slot(4, stride=4)))
    assert [rank.stride for rank in report.report.ranks] == [4, 4]


@pytest.mark.parametrize(
    ("event", "refusal"),
    [
        (read(slot(3), slot(None, is_asking=False)), "rank 3 called should_stop with decreasing steps"),
        (read(slot(3), slot(None, step=3)), "rank 3 has done step 3 and never called should_stop"),
        (SlotsRead(round_number=3, drain=1, slots=None), "a node has no status page"),
    ],
)
def test_a_rank_with_which_no_step_can_be_agreed_on_is_reported(event, refusal):
    node = Node()
    [action] = node.send(BEGUN, event)
    assert action == DrainReported(round_number=ROUND.number, drain=1, report=DrainReport(ceiling=0, refusal=refusal))


def test_ranks_that_have_ended_are_left_out():
    node = Node()
    node.send(exited(0, asked=None), BEGUN, read(slot(50), slot(9)))
    [report] = node.send(read(slot(50), slot(9)))
    assert report.report.ceiling == 10
    assert [rank.global_rank for rank in report.report.ranks] == [3]


def test_events_of_other_rounds_and_drains_change_nothing():
    node = Node()
    other_round = DrainBegun(round_number=2, drain=1, limit_s=1.0)
    assert node.send(other_round) == []
    assert node.send(COMMITTED) == [], "none has begun"
    assert node.send(BEGUN, DrainCommitted(round_number=3, drain=2, step=4)) == []
    assert node.send(DrainWithdrawn(round_number=3, drain=9, reason="old")) == []
    assert node.send(BEGUN) == []
    assert node.send(expired(TimerPurpose.DRAIN, number=2)) == []


def test_what_was_read_for_the_last_drain_verifies_no_ceiling_of_this_one():
    """A stop may take a pause's place while the pause's look is under way, all in one turn of the loop."""
    node = Node()
    node.send(BEGUN, read(slot(10), slot(9)))
    old = read(slot(10), slot(9))
    node.send(WITHDRAWN, DrainBegun(round_number=3, drain=2, limit_s=8.0))
    assert node.send(old) == []
    first = replace(read(slot(10), slot(9)), drain=2)
    write, wait = node.send(first)
    assert write == WriteCommand(drain=2, step=11, is_committed=False)
    assert node.send(expired(TimerPurpose.LOOK)) == [], "of the last drain: too early"
    assert node.send(TimerExpired(timer=wait.timer)) == [ReadSlots(round_number=3, drain=2)]


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
def test_before_its_workers_are_started_a_node_refuses(phase):
    """The ranks of the other nodes would wait for its report for ever."""
    node = Node()
    node.state = replace(node.state, phase=phase)
    [action] = node.send(BEGUN)
    refusal = "a node has not started its workers yet"
    assert action == DrainReported(round_number=ROUND.number, drain=1, report=DrainReport(ceiling=0, refusal=refusal))
    assert node.send(replace(BEGUN, round_number=4)) == []


def test_withdrawn_the_workers_go_on_and_the_preempted_node_leaves():
    other = Node()
    other.send(BEGUN, read(slot(3), slot(3)))
    assert other.send(WITHDRAWN) == [WithdrawCommand(), WriteDeadline(delay_s=None)]
    assert isinstance(other.state.phase, Running)
    node = Node()
    node.send(term(), BEGUN, read(slot(3), slot(3)))
    actions = node.send(WITHDRAWN)
    assert kinds(actions)[:2] == [WithdrawCommand, WriteDeadline]
    assert SignalWorkers(signum=signal.SIGTERM) in actions
    assert Leaving(reason="received SIGTERM", is_told=True) in actions
    assert node.state.phase.then == Finish(code=143)


def test_a_backend_that_cannot_agree_answers_at_once():
    node = Node()
    node.send(term())
    actions = node.send(DrainWithdrawn(round_number=3, drain=0, reason="--rdzv-backend x cannot agree on a step"))
    assert actions[0] == PrintLine(text="no common last step: --rdzv-backend x cannot agree on a step")
    assert SignalWorkers(signum=signal.SIGTERM) in actions


def test_a_node_that_is_preempted_while_a_failure_of_its_own_is_reported_leaves_at_once():
    """The round ends anyway, and no drain with it."""
    node = Node()
    node.send(exited(1, code=1, asked=None))
    assert Leaving in kinds(node.send(term()))
    reported = Node()
    reported.send(exited(1, code=1, asked=None), FailureSettled(round_number=3, local_rank=1))
    assert Leaving in kinds(reported.send(term()))


def test_a_node_whose_ranks_know_the_step_says_that_it_leaves_with_them():
    node = Node()
    node.commit()
    [line, *_] = node.send(term())
    assert "SIGTERM: leaving when" in line.text
    early = Node()
    early.send(BEGUN)
    [line, *_] = early.send(term())
    assert "asking all ranks" in line.text


def test_each_drain_has_one_limit_on_a_node():
    """A node that is preempted has set that of the stop; a checkpoint before it has its own."""
    node = Node()
    node.send(term())
    assert StartTimer not in kinds(node.send(BEGUN))
    node = Node()
    node.send(term())
    assert StartTimer in kinds(node.send(replace(BEGUN, kind=Layout.CHECKPOINT)))


def test_a_later_drain_takes_the_place_of_one_whose_end_was_not_told():
    node = Node()
    node.send(BEGUN)
    assert ReadSlots(round_number=3, drain=2) in node.send(replace(BEGUN, drain=2))


def test_a_preempted_node_leaves_in_time_also_during_a_pause():
    node = Node()
    node.send(term(), replace(BEGUN, kind=Layout.PAUSE))
    assert Leaving in kinds(node.send(expired(TimerPurpose.DRAIN)))


def test_a_node_that_is_not_preempted_keeps_the_limit_of_the_stop_too():
    own = TimerExpired(timer=RoundTimer(purpose=TimerPurpose.DRAIN, round_number=3, number=1))
    node = Node()
    node.commit()
    [timer] = node.send(own)
    assert timer.timer.purpose is TimerPurpose.TOLD
    ended = Node()
    ended.commit()
    ended.send(exited(0), exited(1))
    assert isinstance(ended.state.phase, Succeeded)
    [timer] = ended.send(own)
    assert timer.timer.purpose is TimerPurpose.TOLD
    waits = Node()
    waits.send(BEGUN)
    assert waits.send(own) == [], "the node that is preempted leaves; its round ends with it"


def test_ranks_that_have_stopped_at_the_step_stay_told():
    node = Node()
    node.commit()
    node.send(exited(0), exited(1), WITHDRAWN)
    assert node.state.phase == Succeeded(round=ROUND, is_told=True)


def test_without_a_step_in_time_the_preempted_node_leaves_and_the_others_wait_for_that():
    other = Node()
    other.send(BEGUN, read(slot(3), slot(3)))
    assert other.send(expired(TimerPurpose.DRAIN)) == []
    node = Node()
    node.send(term())
    actions = node.send(expired(TimerPurpose.DRAIN))
    assert actions[0] == PrintLine(text="no step was agreed on in time")
    assert SignalWorkers(signum=signal.SIGTERM) in actions


@pytest.mark.parametrize("kind", [BreakKind.MEMBERSHIP, BreakKind.FENCED, BreakKind.FAILURE])
def test_when_the_round_ends_the_preempted_node_leaves(kind):
    node = Node()
    node.send(term(), BEGUN)
    actions = node.send(RoundBroken(round_number=3, kind=kind, reason="node 0 was lost"))
    assert Leaving in kinds(actions)
    assert (KillWorkers in kinds(actions)) == (kind is BreakKind.FENCED)
    assert node.state.phase.then == Finish(code=143)


def test_workers_that_end_after_the_step_end_the_drain_whatever_their_code():
    node = Node()
    node.commit()
    [line] = node.send(exited(1, code=1))
    assert "stop at step 12: " in line.text
    assert node.send(exited(0)) == [AllSucceeded(round_number=ROUND.number, drained_rank=2)]
    assert node.state.phase == Succeeded(round=ROUND, is_told=True)
    actions = node.send(JobEnded(succeeded=False, is_drained=True), WorkersGone(round_number=3))
    assert actions[-1].code == 143
    assert isinstance(node.state.phase, Ended)


def test_workers_that_end_before_the_step_have_succeeded_or_failed_as_ever():
    node = Node()
    node.commit()
    assert node.send(exited(1, asked=11)) == []
    assert node.send(exited(0, asked=None)) == [AllSucceeded(round_number=ROUND.number)]
    failing = Node()
    failing.commit()
    assert SettleFailure in kinds(failing.send(exited(1, code=1, asked=11)))


def test_ranks_that_were_told_the_step_get_the_grace_period_and_no_signal():
    node = Node()
    node.commit()
    [timer] = node.send(expired(TimerPurpose.DRAIN))
    assert (timer.timer.purpose, timer.delay_s) == (TimerPurpose.TOLD, 20.0)
    actions = node.send(expired(TimerPurpose.TOLD))
    assert kinds(actions) == [PrintLine, KillWorkers]
    assert node.state.phase.then == Finish(code=143)


def test_a_node_whose_ranks_have_stopped_waits_for_the_others_as_long():
    node = Node()
    node.commit()
    node.send(exited(0), exited(1))
    [timer] = node.send(expired(TimerPurpose.DRAIN))
    assert isinstance(node.state.phase, Succeeded)
    assert timer.delay_s == 20.0
    assert KillWorkers in kinds(node.send(expired(TimerPurpose.TOLD)))
    assert node.state.phase.then == Finish(code=143)


def test_step_0_is_a_step():
    node = Node()
    node.send(BEGUN, read(slot(None), slot(None)), read(slot(None), slot(None)))
    node.send(DrainCommitted(round_number=3, drain=1, step=0))
    node.send(exited(0, asked=0))
    assert node.send(exited(1, asked=0)) == [AllSucceeded(round_number=ROUND.number, drained_rank=3)]


@pytest.mark.parametrize("has_ended", [False, True])
def test_when_the_round_ends_after_the_step_was_committed_every_node_exits_with_143(has_ended):
    node = Node()
    node.commit()
    if has_ended:
        node.send(exited(0), exited(1))
    actions = node.send(RoundBroken(round_number=3, kind=BreakKind.MEMBERSHIP, reason="node 0 was lost"))
    assert Leaving(reason="its ranks were told to stop", is_told=True) in actions
    assert node.state.phase.then == Finish(code=143)


@pytest.mark.parametrize("kind", [BreakKind.MEMBERSHIP, BreakKind.FENCED, BreakKind.FAILURE, BreakKind.DRAINED])
@pytest.mark.parametrize("has_ended", [False, True])
def test_in_an_elastic_job_a_node_that_stays_goes_on(has_ended, kind):
    node = Node(is_elastic=True)
    node.commit()
    if has_ended:
        node.send(exited(0), exited(1))
    actions = node.send(RoundBroken(round_number=3, kind=kind, reason="node 0 left"))
    assert Leaving not in kinds(actions)
    assert node.state.phase.then == Rejoin(round=ROUND)
    assert (ParkWorkers in kinds(actions)) == (kind is not BreakKind.FENCED)


def test_after_a_drained_round_a_node_of_a_fixed_job_goes_on_with_a_spare():
    node = Node()
    node.commit()
    node.send(exited(0), exited(1))
    node.send(RoundBroken(round_number=3, kind=BreakKind.DRAINED, reason="node 0 leaves"))
    assert node.state.phase.then == Rejoin(round=ROUND)


@pytest.mark.parametrize("kind", [BreakKind.MEMBERSHIP, BreakKind.DRAINED])
def test_a_node_leaves_when_the_leader_says_so_or_when_it_is_preempted(kind):
    for is_preempted in (False, True):
        node = Node(is_elastic=True)
        node.send(*([term()] if is_preempted else []))
        node.commit()
        node.send(exited(0), exited(1))
        broken = RoundBroken(round_number=3, kind=kind, reason="node 0 leaves", leaves=not is_preempted)
        assert Leaving in kinds(node.send(broken))
        assert node.state.phase.then == Finish(code=143)


def test_in_an_elastic_job_only_the_preempted_node_ends_when_the_time_is_over():
    for is_preempted in (False, True):
        node = Node(is_elastic=True)
        node.send(*([term()] if is_preempted else []))
        node.commit()
        node.send(expired(TimerPurpose.DRAIN))
        assert (KillWorkers in kinds(node.send(expired(TimerPurpose.TOLD)))) == is_preempted


def test_the_grace_period_of_a_drain_does_not_shorten_that_of_a_later_stop():
    node = Node(is_elastic=True)
    node.commit()
    (told,) = [each for each in node.send(expired(TimerPurpose.DRAIN)) if isinstance(each, StartTimer)]
    actions = node.send(RoundBroken(round_number=3, kind=BreakKind.FAILURE, reason="rank 0 failed"))
    graces = [each for each in actions if isinstance(each, StartTimer) and each.delay_s == told.delay_s]
    assert node.send(TimerExpired(timer=told.timer)) == []
    assert KillWorkers in kinds(node.send(TimerExpired(timer=graces[0].timer)))


def test_a_signal_after_the_workers_have_stopped_waits_for_the_others_too():
    node = Node()
    node.commit()
    node.send(exited(0), exited(1))
    line, ask, _ = node.send(term(is_asked=False))
    assert "SIGTERM: leaving when" in line.text
    assert isinstance(ask, DrainAsked)
    assert node.send(term(at_s=0.5)) == [], "the same signal once more"
    assert Leaving in kinds(node.send(term(at_s=3.0)))


def test_a_job_that_has_failed_for_good_is_reported_as_ever():
    node = Node()
    node.commit()
    actions = node.send(RoundBroken(round_number=3, kind=BreakKind.FINAL, reason="rank 0 failed"))
    assert Leaving not in kinds(actions)


def test_a_node_whose_workers_ended_before_is_told_too():
    node = Node()
    node.send(BEGUN, exited(0, asked=3), exited(1, asked=3))
    assert node.send(COMMITTED) == []
    assert node.state.phase == Succeeded(round=ROUND, is_told=True)
