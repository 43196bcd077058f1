"""A drain as one node sees it: its actions, in order."""

import signal
from typing import Any

import pytest
from doubles.node_history import RunningNode, show_history
from doubles.samples import make_round

from muster._shared.layouts import StatusPageLayout as Layout
from muster._shared.records import replace
from muster.agent.node import events as on
from muster.agent.node.state import NO_FAILURES, Delaying, StartNext, Stopping, StopStep
from muster.agent.rendezvous import interface as rdzv
from muster.agent.rendezvous.drain_ceiling import RankSlot

ROUND = make_round(number=3, group_rank=1, group_world_size=2, rank_offset=2, world_size=4)
BEGUN = rdzv.DrainBegun(round_number=3, drain=1, limit_s=8.0)
COMMITTED = rdzv.DrainCommitted(round_number=3, drain=1, step=12)
WITHDRAWN = rdzv.DrainWithdrawn(round_number=3, drain=1, reason="no")


def slot(asked: int | None, *, stride: int = 1, step: int | None = None, is_asking: bool = True) -> RankSlot:
    return RankSlot(global_rank=0, step=step, asked=asked, stride=stride, is_asking=is_asking)


def read(*slots: RankSlot, drain: int = 1) -> on.SlotsRead:
    ranked = (replace(each, global_rank=2 + local_rank) for local_rank, each in enumerate(slots))
    return on.SlotsRead(round_number=3, drain=drain, slots=tuple(ranked))


def exited(local_rank: int, code: int = 0, asked: int | None = 12) -> on.WorkerExited:
    return on.WorkerExited(round_number=3, local_rank=local_rank, code=code, asked=asked)


def expired(purpose: on.TimerPurpose, number: int = 3, drain: int | None = None) -> on.TimerExpired:
    drain = int(purpose is on.TimerPurpose.LOOK) if drain is None else drain
    return on.TimerExpired(timer=on.RoundTimer(purpose=purpose, round_number=number, number=drain))


def term(at_s: float = 0.0, *, is_asked: bool = True, signum: int = signal.SIGTERM, **more: Any) -> on.SignalReceived:
    return on.SignalReceived(signum=signum, is_asked=is_asked, at_s=at_s, **more)


def broken(kind: rdzv.BreakKind, *, leaves: bool = False) -> rdzv.RoundBroken:
    return rdzv.RoundBroken(round_number=3, kind=kind, reason="node 0 was lost", leaves=leaves)


def case(gives: str, *events: Any, before: tuple[Any, ...] = (), **rules: Any) -> Any:
    """What the node does at each of these events, and its phase after them."""
    return before, events, gives, rules


LATE, TOLD, LOOK = (expired(each) for each in (on.TimerPurpose.DRAIN, on.TimerPurpose.TOLD, on.TimerPurpose.LOOK))
OWN_LATE = expired(on.TimerPurpose.DRAIN, drain=1)
COMMIT = (BEGUN, read(slot(10), slot(9)), LOOK, read(slot(10), slot(10)), COMMITTED)
STOPPED = (*COMMIT, exited(0), exited(1))
KINDS = rdzv.BreakKind
USR1 = {"preempt_signals": frozenset({signal.SIGTERM, signal.SIGUSR1})}
AT_ZERO = rdzv.DrainCommitted(round_number=3, drain=1, step=0)
WORDS = {
    "LEAVES": "line Leaving(signal) STOPS",
    "ASKS": "line DrainAsked(10) DRAIN:10",
    "STOPS": "SIGTERM GRACE:20 SLOW:5",
    "BEGINS": "Deadline(28.0) DRAIN:8 Read(1)",
    "WITHDRAWS": "WithdrawCommand Deadline(None)",
    "ENDS": "Stopping, then 143",
    "REJOINS": "Stopping, then Rejoin",
}
CASES = {
    # -- the node that is preempted
    "it asks for a drain, and its workers run on": case("ASKS | Running", term()),
    "of workers that stand still it prints what they do beside the drain": case(
        "line CollectStacks(hang) DrainAsked(10) DRAIN:10 | PrintPage | Running",
        term(still_s=12.0),
        on.StacksCollected(round_number=3, stacks={}),
    ),
    "of those that stand still for a moment it does not": case("ASKS | Running", term(still_s=9.0)),
    "no preemption: nobody asked": case("LEAVES | ENDS", term(is_asked=False)),
    "no preemption: SIGINT": case(
        "line Leaving(Ctrl-C) SIGINT GRACE:20 SLOW:5 | Stopping, then 130", term(signum=signal.SIGINT)
    ),
    "no preemption: SIGHUP": case(
        "line Leaving(signal) SIGHUP GRACE:20 SLOW:5 | Stopping, then 129", term(signum=signal.SIGHUP)
    ),
    "no preemption: switched off": case("LEAVES | ENDS", term(), drain_limit_s=0.0),
    "no preemption: the guard died": case("line Leaving(own) KillWorkers | ENDS", term(guard_died=True)),
    "another signal may announce it": case("ASKS | Running", term(signum=signal.SIGUSR1), **USR1),
    "another signal that was not asked for": case(
        "line Leaving(signal) SIGUSR1 GRACE:20 SLOW:5 | ENDS", term(signum=signal.SIGUSR1, is_asked=False), **USR1
    ),
    "a second signal hastens, but not a copy of the first": case(
        "ASKS | - | LEAVES | ENDS", term(5.0), term(5.5), term(6.5)
    ),
    "withdrawn, it leaves": case(
        "ASKS | Deadline(28.0) Read(1) | Write(1: 4) LOOK:0.002 | WITHDRAWS LEAVES | ENDS",
        term(),
        BEGUN,
        read(slot(3), slot(3)),
        WITHDRAWN,
    ),
    "a backend that cannot agree answers at once": case(
        "ASKS | line LEAVES | ENDS", term(), rdzv.DrainWithdrawn(round_number=3, drain=0, reason="it cannot")
    ),
    "while a failure of its own is being settled it leaves at once: no drain will end the round": case(
        "SettleFailure | LEAVES | ENDS", exited(1, code=1, asked=None), term()
    ),
    "or is reported": case(
        "SettleFailure | ReportFailed | LEAVES | ENDS",
        exited(1, code=1, asked=None),
        on.FailureSettled(round_number=3, local_rank=1),
        term(),
    ),
    "each drain has one limit on a node: that of the stop is set": case(
        "ASKS | Deadline(28.0) Read(1) | Running", term(), BEGUN
    ),
    "a checkpoint before it has its own": case(
        "ASKS | DRAIN:8 Read(1, checkpoint) | Running", term(), replace(BEGUN, kind=Layout.CHECKPOINT)
    ),
    "it leaves in time also during a pause": case(
        "ASKS | DRAIN:8 Read(1, pause) | line LEAVES | ENDS", term(), replace(BEGUN, kind=Layout.PAUSE), LATE
    ),
    "without a step in time it leaves": case("ASKS | line LEAVES | ENDS", term(), LATE),
    "when the round ends it leaves": case(
        "Leaving(signal) STOPS | ENDS", broken(KINDS.MEMBERSHIP), before=(term(), BEGUN)
    ),
    "when its round fails": case("Leaving(signal) STOPS | ENDS", broken(KINDS.FAILURE), before=(term(), BEGUN)),
    "when it is fenced": case("Leaving(signal) KillWorkers | ENDS", broken(KINDS.FENCED), before=(term(), BEGUN)),
    # -- agreeing on a step
    "the ceiling is written, looked at again and reported": case(
        "BEGINS | Write(1: 11) LOOK:0.002 | Read(1) | Write(1: 13) LOOK:0.002 | Report(13; 2: 12, 3: 9) | - | "
        "Write(1: 12, committed) | - | - | Running",
        *(BEGUN, read(slot(10), slot(9)), LOOK, read(slot(11), slot(9)), read(slot(12), slot(9)), LOOK),
        *(COMMITTED, WITHDRAWN, rdzv.DrainCommitted(round_number=3, drain=1, step=14)),
    ),
    "a rank that asked once is looked at again until its stride is known": case(
        "BEGINS | Write(1: 8) LOOK:0.002 | LOOK:0.02 | Report(8; 2: 4, 3: 4) | Running",
        *(BEGUN, *[read(slot(0, stride=0), slot(4, stride=4))] * 2, read(slot(4, stride=4), slot(4, stride=4))),
    ),
    "ranks that have ended are left out": case(
        "- | BEGINS | Write(1: 10) LOOK:0.002 | Report(10; 3: 9) | Running",
        exited(0, asked=None),
        BEGUN,
        read(slot(50), slot(9)),
        read(slot(50), slot(9)),
    ),
    "events of other rounds and drains": case(
        "- | - | BEGINS | - | - | - | - | Running",
        *(replace(BEGUN, round_number=2), COMMITTED, BEGUN, replace(COMMITTED, drain=2), replace(WITHDRAWN, drain=9)),
        *(BEGUN, expired(on.TimerPurpose.DRAIN, number=2)),
    ),
    "what was read for the last drain verifies no ceiling of this one": case(
        "WITHDRAWS | Deadline(28.0) DRAIN:8 Read(2) | - | Write(2: 11) LOOK:0.002 | - | Read(2) | Running",
        *(WITHDRAWN, replace(BEGUN, drain=2), read(slot(10), slot(9)), read(slot(10), slot(9), drain=2), LOOK),
        expired(on.TimerPurpose.LOOK, drain=2),
        before=(BEGUN, read(slot(10), slot(9))),
    ),
    "withdrawn, the workers go on": case("WITHDRAWS | Running", WITHDRAWN, before=(BEGUN, read(slot(3), slot(3)))),
    "a later drain takes the place of one whose end was not told": case(
        "BEGINS | Deadline(28.0) DRAIN:8 Read(2) | Running", BEGUN, replace(BEGUN, drain=2)
    ),
    "without a step in time the others wait for the node that leaves": case(
        "- | Running", LATE, before=(BEGUN, read(slot(3), slot(3)))
    ),
    "its own limit of a drain without a step: the preempted node leaves, and the round ends": case(
        "BEGINS | - | Running", BEGUN, OWN_LATE
    ),
    # -- the agreed step
    "a node that is not preempted keeps the limit of the stop, too": case("TOLD:20 | Running", OWN_LATE, before=COMMIT),
    "and when its ranks have stopped": case("TOLD:20 | Succeeded told", OWN_LATE, before=STOPPED),
    "ranks that have stopped at the step stay told": case("- | Succeeded told", WITHDRAWN, before=STOPPED),
    "a node whose ranks know the step leaves with them": case("ASKS | Running", term(), before=COMMIT),
    "workers that end after the step end the drain whatever their code": case(
        "line | AllSucceeded(2) | RecordJobFailure KillWorkers | Finish(143) | Ended",
        *(exited(1, code=1), exited(0), rdzv.JobEnded(succeeded=False, is_drained=True)),
        on.WorkersGone(round_number=3),
        before=COMMIT,
    ),
    "those that end before it have succeeded": case(
        "- | AllSucceeded(None) | Succeeded told", exited(1, asked=11), exited(0, asked=None), before=COMMIT
    ),
    "or failed as ever": case("SettleFailure | Running", exited(1, code=1, asked=11), before=COMMIT),
    "told ranks get the grace period and no signal": case(
        "TOLD:20 | line KillWorkers | ENDS", LATE, TOLD, before=COMMIT
    ),
    "a node whose ranks have stopped waits for the others as long": case(
        "TOLD:20 | line KillWorkers | ENDS", LATE, TOLD, before=STOPPED
    ),
    "step 0 is a step": case(
        "Write(1: 0, committed) | - | AllSucceeded(3) | Succeeded told",
        *(AT_ZERO, exited(0, asked=0), exited(1, asked=0)),
        before=(BEGUN, *[read(slot(None), slot(None))] * 2),
    ),
    "a signal after the workers have stopped waits for the others, too": case(
        "ASKS | - | line Leaving(signal) KillWorkers | ENDS",
        term(is_asked=False),
        term(at_s=0.5),
        term(at_s=3.0),
        before=STOPPED,
    ),
    "a node whose workers ended before is told, too": case(
        "- | Succeeded told", COMMITTED, before=(BEGUN, exited(0, asked=3), exited(1, asked=3))
    ),
    # -- the round ends after the step was committed
    "every node exits with 143": case("Leaving(told) STOPS | ENDS", broken(KINDS.MEMBERSHIP), before=COMMIT),
    "also when its ranks have stopped": case(
        "Leaving(told) KillWorkers | ENDS", broken(KINDS.MEMBERSHIP), before=STOPPED
    ),
    "a job that has failed for good is reported as ever": case("STOPS | REJOINS", broken(KINDS.FINAL), before=COMMIT),
    "a node of a fixed job goes on with a spare": case(
        "line ParkWorkers KillWorkers | REJOINS", broken(KINDS.DRAINED), before=STOPPED
    ),
    # -- in an elastic job
    "one that stays goes on": case(
        "line ParkWorkers STOPS | REJOINS", broken(KINDS.MEMBERSHIP), before=COMMIT, is_elastic=True
    ),
    "though a rank failed": case("ParkWorkers STOPS | REJOINS", broken(KINDS.FAILURE), before=COMMIT, is_elastic=True),
    "though it was fenced": case("line KillWorkers | REJOINS", broken(KINDS.FENCED), before=COMMIT, is_elastic=True),
    "though the round was drained": case(
        "line ParkWorkers STOPS | REJOINS", broken(KINDS.DRAINED), before=COMMIT, is_elastic=True
    ),
    "one whose ranks have stopped": case(
        "line ParkWorkers KillWorkers | REJOINS", broken(KINDS.MEMBERSHIP), before=STOPPED, is_elastic=True
    ),
    "though a rank of another failed": case(
        "ParkWorkers KillWorkers | REJOINS", broken(KINDS.FAILURE), before=STOPPED, is_elastic=True
    ),
    "fenced, its ranks have stopped": case(
        "line KillWorkers | REJOINS", broken(KINDS.FENCED), before=STOPPED, is_elastic=True
    ),
    "drained, its ranks have stopped": case(
        "line ParkWorkers KillWorkers | REJOINS", broken(KINDS.DRAINED), before=STOPPED, is_elastic=True
    ),
    "the leader says that it leaves": case(
        "Leaving(told) KillWorkers | ENDS", broken(KINDS.DRAINED, leaves=True), before=STOPPED, is_elastic=True
    ),
    "so when another is lost": case(
        "Leaving(told) KillWorkers | ENDS", broken(KINDS.MEMBERSHIP, leaves=True), before=STOPPED, is_elastic=True
    ),
    "it is preempted": case(
        "Leaving(signal) KillWorkers | ENDS", broken(KINDS.DRAINED), before=(term(), *STOPPED), is_elastic=True
    ),
    "it is preempted, another is lost": case(
        "Leaving(signal) KillWorkers | ENDS", broken(KINDS.MEMBERSHIP), before=(term(), *STOPPED), is_elastic=True
    ),
    "when the time is over one that stays goes on": case(
        "TOLD:20 | - | Running", LATE, TOLD, before=COMMIT, is_elastic=True
    ),
    "and only the preempted node ends": case(
        "TOLD:20 | line KillWorkers | ENDS", LATE, TOLD, before=(term(), *COMMIT), is_elastic=True
    ),
    "the grace period of the drain does not shorten that of a later stop": case(
        "TOLD:20 | ParkWorkers STOPS | - | KillWorkers | REJOINS",
        *(LATE, broken(KINDS.FAILURE), TOLD, expired(on.TimerPurpose.GRACE)),
        before=COMMIT,
        is_elastic=True,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_history(name: str) -> None:
    before, events, gives, rules = CASES[name]
    node = RunningNode(ROUND, shutdown_timeout_s=20.0, **rules)
    node.send(*before)
    for word, meaning in WORDS.items():
        gives = gives.replace(word, meaning)
    assert show_history(node, *events) == gives


@pytest.mark.parametrize(("before", "word"), [((), "asking"), ((BEGUN,), "asking"), (COMMIT, "leaving")])
def test_the_line_of_a_preempted_node_says_what_it_waits_for(before: tuple[Any, ...], word: str) -> None:
    node = RunningNode(ROUND, shutdown_timeout_s=20.0, sigterm_senders="`scancel`")
    node.send(*before)
    line = node.send(term())[0].text
    assert ("SIGTERM: " in line, f" {word} " in line, " 10 s (usually" in line, "`scancel`" in line) == (True,) * 4


def test_the_line_of_a_rank_that_fails_after_the_step_names_the_step() -> None:
    node = RunningNode(ROUND, shutdown_timeout_s=20.0)
    node.send(*COMMIT)
    [line] = node.send(exited(1, code=1))
    assert "at step 12: " in line.text


@pytest.mark.parametrize(
    ("event", "refusal"),
    [
        (read(slot(3), slot(None, is_asking=False)), "rank 3 called should_stop with decreasing steps"),
        (read(slot(3), slot(None, step=3)), "rank 3 has done step 3 and never called should_stop"),
        (on.SlotsRead(round_number=3, drain=1, slots=None), "a node has no status page"),
    ],
)
def test_a_rank_with_which_no_step_can_be_agreed_on_is_reported(event: on.SlotsRead, refusal: str) -> None:
    report = rdzv.DrainReport(ceiling=0, refusal=refusal)
    answer = rdzv.DrainReported(round_number=ROUND.number, drain=1, report=report)
    assert RunningNode(ROUND).send(BEGUN, event) == [answer]


STOPS = Stopping(
    round=replace(ROUND, number=2),
    step=StopStep.KILLING,
    signum=signal.SIGTERM,
    alive=frozenset(),
    failures=NO_FAILURES,
    then=StartNext(round=ROUND, is_held=False),
)


@pytest.mark.parametrize(
    ("is_join", "can_leave", "kept", "refuses"),
    [(True, {0, 1}, 2, True), (False, {0, 1}, 2, False), (True, {0}, 2, False), (True, {0, 1}, 1, False)],
)
def test_ranks_that_can_leave_the_round_do_not_stop_for_a_join(is_join, can_leave, kept: int, refuses: bool) -> None:
    """They wait at a snapshot instead, and take part in the next round. So all must keep some."""
    node = RunningNode(ROUND)
    node.send(on.WorkersCanLeave(round_number=3, local_ranks=frozenset(can_leave)))
    node.send(replace(BEGUN, is_join=is_join))
    sent = node.send(read(*(replace(slot(10), keeps=each < kept) for each in range(2))))
    reports = [each.report for each in sent if isinstance(each, rdzv.DrainReported)]
    assert [bool(each.refusal) for each in reports] == ([True] if refuses else [])


@pytest.mark.parametrize("phase", [Delaying(round=ROUND, is_held=True), STOPS], ids=["held", "stopping the last round"])
def test_before_its_workers_are_started_a_node_refuses(phase: Delaying | Stopping) -> None:
    """The ranks of the other nodes would wait for its report for ever."""
    node = RunningNode(ROUND)
    node.state = replace(node.state, phase=phase)
    [action] = node.send(BEGUN)
    assert (action.round_number, action.drain, action.report.ceiling) == (ROUND.number, 1, 0)
    assert action.report.refusal
    assert node.send(replace(BEGUN, round_number=4)) == []
