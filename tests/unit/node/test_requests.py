"""What persons ask for, as one node sees it: requests, answers, pauses and checkpoints."""

from typing import Any

import pytest
from doubles.node_history import RunningNode, show_history
from doubles.samples import make_round

from muster._shared.contract import AskKind, AskOutcome
from muster._shared.layouts import StatusPageLayout as Layout
from muster._shared.records import replace
from muster._shared.reports import Answer, Stack
from muster.agent.node import actions as do
from muster.agent.node import events as on
from muster.agent.node.state import Delaying, Joining
from muster.agent.node.worker_decisions import OWN_REQUEST
from muster.agent.rendezvous import interface as rdzv
from muster.agent.rendezvous.drain_ceiling import RankSlot
from muster.agent.rendezvous.report_messages import RequestAnswer

ROUND = make_round(number=3, rank_offset=2)
ASKED = on.Requested(request=1, kind=AskKind.PAUSE, limit_s=30.0)
DONE = Answer(outcome=AskOutcome.DONE, line="done")


def read(*asked: int, stride: int = 1, **more: Any) -> on.SlotsRead:
    slots = tuple(
        RankSlot(global_rank=2 + rank, step=each, asked=each, stride=stride, is_asking=True, silent_s=4.0, **more)
        for rank, each in enumerate(asked)
    )
    return on.SlotsRead(round_number=3, drain=1, slots=slots)


def expired(purpose: on.TimerPurpose) -> on.TimerExpired:
    return on.TimerExpired(timer=on.RoundTimer(purpose=purpose, round_number=3, number=1))


def begin(kind: int) -> rdzv.DrainBegun:
    return rdzv.DrainBegun(round_number=3, drain=1, limit_s=30.0, kind=kind, is_asked=True)


def commit(kind: int) -> tuple[Any, ...]:
    return begin(kind), read(10, 9), LOOK, read(10, 10), rdzv.DrainCommitted(round_number=3, drain=1, step=12)


def case(gives: str, *events: Any, before: tuple[Any, ...] = (), group_world_size: int = 1) -> Any:
    """What the node does at each of these events, and its phase after them."""
    return gives, events, before, group_world_size


LOOK, LATE = expired(on.TimerPurpose.LOOK), expired(on.TimerPurpose.DRAIN)
IDLE = on.WorkersIdle(round_number=3, reason="idle")
WITHDRAWN = rdzv.DrainWithdrawn(round_number=3, drain=1, reason="resumed")
FENCED = rdzv.RoundBroken(round_number=3, kind=rdzv.BreakKind.FENCED, reason="the leader was lost")
NEXT = rdzv.RoundFormed(round=replace(ROUND, number=4))
STACKS = on.StacksRequested()
REFUSED = rdzv.RequestAnswered(request=OWN_REQUEST, answer=Answer(outcome=AskOutcome.REFUSED, line="it cannot"))
PAUSE, CHECKPOINT, STOP, JOIN = Layout.PAUSE, Layout.CHECKPOINT, Layout.STOP, Layout.JOIN
CASES = {
    # Also the answer as it has travelled.
    **{
        f"a request goes to the leader, and its answer back, once: {kind.__name__}": case(
            "Asked(pause, 30 s) | Answer(1 done) | - | Running", ASKED, *[kind(request=1, answer=DONE)] * 2
        )
        for kind in (rdzv.RequestAnswered, RequestAnswer)
    },
    "every request is answered when the leader is lost, once": case(
        "Answer(1 lost) line KillWorkers | - | Stopping, then Rejoin",
        FENCED,
        rdzv.RequestAnswered(request=1, answer=DONE),
        before=(ASKED,),
    ),
    "when another leader has formed a round": case(
        "Answer(1 lost) KillWorkers | Stopping, then StartNext", NEXT, before=(ASKED,)
    ),
    "a pause is reported when all ranks wait; a hang counts again when it is over": case(
        *(
            "LOOK:0.02 | Read(1, pause) | Done() | - | - | - | WithdrawCommand | ReportIdle | Running",
            read(12, 11),
            LOOK,
            read(12, 12),
            LOOK,
            LATE,
            IDLE,
            WITHDRAWN,
            IDLE,
        ),
        before=commit(PAUSE),
    ),
    "ranks that are late are named at the end of the limit": case(
        "Read(1, pause) | Done(3: 7 since 4) | Running", LATE, read(12, 7), before=commit(PAUSE)
    ),
    "those that have not saved, too": case(
        "Read(1, checkpoint) | Done(2: 12 since 4, 3: 12 since 4) | Running",
        LATE,
        read(12, 12, saved=11),
        before=commit(CHECKPOINT),
    ),
    "a checkpoint has no deadline": case("DRAIN:30 Read(1, checkpoint) | Running", begin(CHECKPOINT)),
    "and stops no worker": case(
        "Write(1: 12, committed, checkpoint) | WithdrawCommand | Running",
        commit(CHECKPOINT)[-1],
        WITHDRAWN,
        before=commit(CHECKPOINT)[:-1],
    ),
    "a pause looks whether all ranks wait": case(
        "Write(1: 12, committed, pause) Read(1, pause) | Running", commit(PAUSE)[-1], before=commit(PAUSE)[:-1]
    ),
    "a wait for nodes that join is reported when all ranks have their snapshots": case(
        "LOOK:0.02 | Read(1, join) | Done() | Running",
        read(12, 12),
        LOOK,
        read(12, 12, waiting=12),
        before=commit(JOIN),
    ),
    "stacks are collected for the leader": case(
        "SendStacks(5) | - | Running",
        rdzv.StacksWanted(round_number=3, number=5),
        rdzv.StacksWanted(round_number=2, number=6),
    ),
    "SIGQUIT asks the leader for those of all nodes; what it refuses, the node prints of its own": case(
        "Asked(stacks, 4 s) | PrintStacks | Running", STACKS, REFUSED, group_world_size=2
    ),
    "what was asked for stacks is no person": case(
        "KillWorkers | Stopping, then StartNext", NEXT, before=(STACKS,), group_world_size=2
    ),
    # It is not known how far they will ask: they have asked once.
    "ranks that let no step be agreed on are named at the end of the limit": case(
        "Read(1, pause) | Done(2: 10 since 4, 3: 10 since 4) | Running",
        LATE,
        read(10, 10, stride=0),
        before=(begin(PAUSE), read(10, 10, stride=0)),
    ),
    "a node that has reported names no rank when others let none be agreed on": case(
        "Read(1, pause) | Done() | Running", LATE, read(10, 10), before=commit(PAUSE)[:-1]
    ),
    "what was read after a pause was withdrawn changes nothing": case(
        "- | - | Running", read(10, 10), LOOK, before=(begin(PAUSE), WITHDRAWN)
    ),
    "a stop that a person asked for reports its late ranks and gives them the grace period": case(
        "Read(1) TOLD:30 | Running", LATE, before=commit(STOP)
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_history(name: str) -> None:
    gives, events, before, group_world_size = CASES[name]
    node = RunningNode(replace(ROUND, group_world_size=group_world_size))
    node.send(*before)
    assert show_history(node, *events) == gives


@pytest.mark.parametrize("event", [FENCED, NEXT])
def test_the_answer_that_a_lost_leader_owes_says_so(event: Any) -> None:
    node = RunningNode(ROUND)
    node.send(ASKED)
    [lost] = [each for each in node.send(event) if isinstance(each, do.AnswerPerson)]
    assert "leader was lost" in lost.answer.line


def test_without_workers_a_request_is_refused_and_the_leader_gets_no_stacks() -> None:
    node = RunningNode(ROUND)
    node.state = replace(node.state, phase=Joining(last=ROUND))
    assert show_history(node, ASKED) == "Answer(1 refused) | Joining"
    node.state = replace(node.state, phase=Delaying(round=ROUND, is_held=True))
    assert show_history(node, rdzv.StacksWanted(round_number=3, number=7)) == "SendStacks(7) | Delaying", "it has none"


def test_a_node_that_gets_sigquit_prints_what_the_leader_has_collected() -> None:
    node = RunningNode(replace(ROUND, group_world_size=2))
    node.send(STACKS)
    stack = Stack(global_rank=3, node=1, local_rank=1, text="File x")
    answer = Answer(outcome=AskOutcome.LATE, line="stacks of 1", stacks=(stack,))
    printed = node.send(rdzv.RequestAnswered(request=OWN_REQUEST, answer=answer))
    assert [line.text for line in printed] == ["stacks of 1", "stacks of rank 3:", "  File x"]
