"""Workers that can leave a round stay for the next one; all others end as ever."""

import signal

import pytest
from doubles.node_history import RunningNode, show_history
from doubles.samples import make_round

from muster._shared.records import replace
from muster.agent.node import actions as do
from muster.agent.node import events as on
from muster.agent.node.events import RoundTimer, TimerPurpose
from muster.agent.rendezvous import interface as rdzv

ROUND = make_round(number=7)


def can_leave(*ranks: int) -> on.WorkersCanLeave:
    return on.WorkersCanLeave(round_number=7, local_ranks=frozenset(ranks))


def left(rank: int) -> on.WorkerLeft:
    return on.WorkerLeft(round_number=7, local_rank=rank)


def exited(rank: int, code: int = -9) -> on.WorkerExited:
    return on.WorkerExited(round_number=7, local_rank=rank, code=code)


def broken(kind: rdzv.BreakKind = rdzv.BreakKind.FAILURE) -> rdzv.RoundBroken:
    return rdzv.RoundBroken(round_number=7, kind=kind, reason="the reason")


LATE = on.TimerExpired(timer=RoundTimer(purpose=TimerPurpose.LEAVE, round_number=7))
NEXT = rdzv.RoundFormed(round=replace(ROUND, number=8))
TERM = on.SignalReceived(signum=signal.SIGTERM)
GONE = on.WorkersGone(round_number=7)
ENDED = rdzv.JobEnded(succeeded=False)

LEAVE_BOTH = "line ParkWorkers(0) Leave(0, 1) LEAVE:2"


HISTORIES = {
    "both leave": ((broken(), left(0), left(1), GONE), f"{LEAVE_BOTH} | - | KillWorkers | ReportStopped"),
    "a lost one is not asked": (
        (exited(1), broken(), left(0)),
        "SettleFailure | line ParkWorkers(1) Leave(0) LEAVE:2 | KillWorkers",
    ),
    "one that is late is killed": (
        (broken(), left(0), LATE, exited(1)),
        f"{LEAVE_BOTH} | - | SIGKILL(1) | KillWorkers",
    ),
    "none is late": ((broken(), left(0), left(1), LATE), f"{LEAVE_BOTH} | - | KillWorkers | -"),
    "a join": ((broken(rdzv.BreakKind.MEMBERSHIP), left(0)), f"{LEAVE_BOTH} | -"),
    "the next leader's round": ((NEXT,), "Leave(0, 1) LEAVE:2"),
    "a fenced node keeps nobody": ((broken(rdzv.BreakKind.FENCED),), "line KillWorkers"),
    "the job ends": ((ENDED,), "RecordJobFailure KillWorkers"),
    "the job ends meanwhile": (
        (broken(), left(0), ENDED),
        f"{LEAVE_BOTH} | - | RecordJobFailure KillWorkers",
    ),
    "a signal ends this node": ((TERM,), "line Leaving(signal) SIGTERM GRACE:30 SLOW:5"),
}


@pytest.mark.parametrize(("events", "shown"), HISTORIES.values(), ids=HISTORIES)
def test_those_that_can_leave_are_asked_to(events, shown: str) -> None:
    node = RunningNode(ROUND)
    node.send(can_leave(0, 1))
    assert show_history(node, *events).rpartition(" | ")[0] == shown


def test_those_that_cannot_leave_get_the_signal() -> None:
    node = RunningNode(ROUND)
    node.send(can_leave(0))
    shown = show_history(node, broken(), exited(1, -15), left(0))
    assert shown == (
        "line ParkWorkers(1) Leave(0) LEAVE:2 SIGTERM(1) GRACE:30 SLOW:5 | - | KillWorkers | Stopping, then Rejoin"
    )


@pytest.mark.parametrize(("event", "keeps"), [(broken(rdzv.BreakKind.FENCED), True), (ENDED, False)])
def test_those_that_have_left_are_kept_if_a_round_follows(event, keeps: bool) -> None:
    [killed] = [each for each in RunningNode(ROUND).send(event) if isinstance(each, do.KillWorkers)]
    assert killed.keeps is keeps
