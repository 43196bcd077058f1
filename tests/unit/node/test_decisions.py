"""Histories of events through the node's state machine: what it does, in which order."""

import signal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muster._contract import ExitCode
from muster.agent.node.actions import Finish, StartWorkers
from muster.agent.node.decisions import decide
from muster.agent.node.events import (
    Fenced,
    GraceOver,
    Hung,
    SignalCame,
    SpawnFailed,
    StacksTaken,
    TreeGone,
    WorkerExited,
    WorkerStarted,
)
from muster.agent.node.state import Phase, State
from muster.agent.rendezvous.interface import BreakKind, JobEnded, RendezvousLost, RoundBroken, RoundFormed, RoundOpened
from muster.agent.round import Round


def make_round(number: int = 1, attempt: int = 0) -> Round:
    return Round(
        number=number,
        attempt=attempt,
        restarts_left=3,
        group_rank=0,
        group_world_size=1,
        rank_offset=0,
        world_size=2,
        role_rank_offset=0,
        role_world_size=2,
        master_addr="127.0.0.1",
        master_port=29500,
    )


def formed(number: int = 1, attempt: int = 0, *, is_held: bool = False) -> RoundFormed:
    return RoundFormed(round=make_round(number, attempt), is_held=is_held)


def started(local_rank: int, number: int = 1) -> WorkerStarted:
    return WorkerStarted(number=number, local_rank=local_rank)


def exited(local_rank: int, code: int = 0, number: int = 1) -> WorkerExited:
    return WorkerExited(number=number, local_rank=local_rank, code=code)


def broken(number: int = 1, kind: BreakKind = BreakKind.FAILURE, want_stacks: bool = False) -> RoundBroken:
    return RoundBroken(number=number, kind=kind, reason="why", want_stacks=want_stacks)


def play(*events: object, nproc: int = 2) -> tuple[State, list[tuple[str, ...]]]:
    """Feed a history; the end state and, per event, the names of the actions."""
    state = State(nproc=nproc)
    history = []
    for event in events:
        state, actions = decide(state, event)
        history.append(tuple(type(action).__name__ for action in actions))
    return state, history


RUNNING = (formed(), started(0), started(1))
CASES = {
    "a round starts the workers, the last start is told": (
        RUNNING,
        [("StartWorkers",), (), ("TellStarted",)],
        Phase.RUNNING,
    ),
    "held workers start when global rank 0 has been started": (
        (formed(is_held=True), RoundOpened(number=1), started(0), started(1)),
        [("StartWorkers",), ("OpenStarts",), (), ("TellStarted",)],
        Phase.RUNNING,
    ),
    "a round that is over is not opened any more": (
        (formed(is_held=True), broken(kind=BreakKind.MEMBERSHIP), RoundOpened(number=1), TreeGone()),
        [("StartWorkers",), ("CancelStarts", "KillTree"), (), ("TellStopped",)],
        Phase.JOINING,
    ),
    "all done: told once, nothing stopped": (
        (*RUNNING, exited(0), exited(1)),
        [("StartWorkers",), (), ("TellStarted",), (), ("TellSucceeded",)],
        Phase.SUCCEEDED,
    ),
    "a failure is told, and nothing happens before the leader answers": (
        (*RUNNING, exited(1, 1)),
        [("StartWorkers",), (), ("TellStarted",), ("TellFailed",)],
        Phase.RUNNING,
    ),
    "a break stops politely, then sweeps, then tells": (
        (*RUNNING, exited(1, 1), broken(), exited(0, -15), TreeGone()),
        [
            ("StartWorkers",),
            (),
            ("TellStarted",),
            ("TellFailed",),
            ("SignalWorkers", "ArmGrace"),
            ("KillTree",),
            ("TellStopped",),
        ],
        Phase.JOINING,
    ),
    "grace over: killed; the ends of the killed add nothing": (
        (*RUNNING, broken(), GraceOver(), exited(0, -9), exited(1, -9), TreeGone()),
        [
            ("StartWorkers",),
            (),
            ("TellStarted",),
            ("SignalWorkers", "ArmGrace"),
            ("KillTree",),
            (),
            (),
            ("TellStopped",),
        ],
        Phase.JOINING,
    ),
    "stacks first when wanted": (
        (*RUNNING, broken(want_stacks=True), StacksTaken()),
        [("StartWorkers",), (), ("TellStarted",), ("TakeStacks",), ("SignalWorkers", "ArmGrace")],
        Phase.STOPPING,
    ),
    "the last worker ends while stacks are taken: swept afterwards": (
        (*RUNNING, broken(want_stacks=True), exited(0, 1), exited(1, 1), StacksTaken()),
        [("StartWorkers",), (), ("TellStarted",), ("TakeStacks",), (), (), ("KillTree",)],
        Phase.STOPPING,
    ),
    "fenced: no grace": (
        (*RUNNING, broken(kind=BreakKind.FENCED)),
        [("StartWorkers",), (), ("TellStarted",), ("KillTree",)],
        Phase.STOPPING,
    ),
    "fenced while stopping politely: hurried": (
        (*RUNNING, broken(), broken(kind=BreakKind.FENCED)),
        [("StartWorkers",), (), ("TellStarted",), ("SignalWorkers", "ArmGrace"), ("KillTree",)],
        Phase.STOPPING,
    ),
    "the guard fences: swept, told, joined again": (
        (*RUNNING, Fenced(), exited(0, -9), exited(1, -9), TreeGone()),
        [("StartWorkers",), (), ("TellStarted",), ("KillTree",), (), (), ("TellStopped",)],
        Phase.JOINING,
    ),
    "a break while workers are being started cancels the rest": (
        (formed(), started(0), broken()),
        [("StartWorkers",), (), ("CancelStarts", "SignalWorkers", "ArmGrace")],
        Phase.STOPPING,
    ),
    "a break before any worker exists": (
        (formed(), broken()),
        [("StartWorkers",), ("CancelStarts", "KillTree")],
        Phase.STOPPING,
    ),
    "a finished node takes part again": (
        (*RUNNING, exited(0), exited(1), broken(), TreeGone(), formed(2, 1)),
        [
            ("StartWorkers",),
            (),
            ("TellStarted",),
            (),
            ("TellSucceeded",),
            ("KillTree",),
            ("TellStopped",),
            ("StartWorkers",),
        ],
        Phase.RUNNING,
    ),
    "a break without workers is answered at once": (
        (broken(),),
        [("TellStopped",)],
        Phase.JOINING,
    ),
    "a worker that cannot be started is a failure": (
        (formed(), SpawnFailed(number=1, local_rank=0, reason="no such file")),
        [("StartWorkers",), ("TellFailed",)],
        Phase.RUNNING,
    ),
    "events of an older round change nothing": (
        (*RUNNING, exited(0, 1, number=0), started(0, number=0), broken(number=0), formed(1)),
        [("StartWorkers",), (), ("TellStarted",), (), (), (), ()],
        Phase.RUNNING,
    ),
    "a newer round while the old workers run (change of leader): they are swept first": (
        (*RUNNING, formed(3), exited(0, -9), exited(1, -9), TreeGone()),
        [("StartWorkers",), (), ("TellStarted",), ("KillTree",), (), (), ("StartWorkers",)],
        Phase.RUNNING,
    ),
    "whether idle workers hang is for all nodes to say": (
        (*RUNNING, Hung(number=1, local_ranks=(0, 1), reason="idle"), Hung(number=1)),
        [("StartWorkers",), (), ("TellStarted",), ("TellIdle",), ("TellIdle",)],
        Phase.RUNNING,
    ),
    "a second signal does not cut the grace short": (
        (*RUNNING, SignalCame(signum=signal.SIGTERM), SignalCame(signum=signal.SIGTERM)),
        [("StartWorkers",), (), ("TellStarted",), ("TellLeave", "SignalWorkers", "ArmGrace"), ()],
        Phase.STOPPING,
    ),
    "a second Ctrl-C does": (
        (*RUNNING, SignalCame(signum=signal.SIGINT), SignalCame(signum=signal.SIGINT)),
        [("StartWorkers",), (), ("TellStarted",), ("TellLeave", "SignalWorkers", "ArmGrace"), ("KillTree",)],
        Phase.STOPPING,
    ),
    "the guard's death leaves no grace": (
        (*RUNNING, SignalCame(signum=signal.SIGTERM, guard_died=True)),
        [("StartWorkers",), (), ("TellStarted",), ("TellLeave", "KillTree")],
        Phase.STOPPING,
    ),
    "a signal while a round is being stopped only says where it ends": (
        (*RUNNING, broken(), SignalCame(signum=signal.SIGTERM), exited(0), exited(1), TreeGone()),
        [
            ("StartWorkers",),
            (),
            ("TellStarted",),
            ("SignalWorkers", "ArmGrace"),
            ("TellLeave",),
            (),
            ("KillTree",),
            ("Finish",),
        ],
        Phase.ENDED,
    ),
    "a signal before the first round ends at once": (
        (SignalCame(signum=signal.SIGTERM),),
        [("TellLeave", "Finish")],
        Phase.ENDED,
    ),
    "the job's end sweeps what the workers left running": (
        (*RUNNING, exited(0), exited(1), JobEnded(succeeded=True), TreeGone()),
        [("StartWorkers",), (), ("TellStarted",), (), ("TellSucceeded",), ("KillTree",), ("Finish",)],
        Phase.ENDED,
    ),
    "after the end nothing matters": (
        (JobEnded(succeeded=True), formed(), SignalCame(signum=signal.SIGTERM)),
        [("Finish",), (), ()],
        Phase.ENDED,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_history(name: str) -> None:
    events, actions, phase = CASES[name]
    state, history = play(*events)
    assert history == actions
    assert state.phase is phase


@pytest.mark.parametrize(
    ("event", "code"),
    [
        (JobEnded(succeeded=True), ExitCode.SUCCEEDED),
        (JobEnded(succeeded=False), ExitCode.WORKERS_FAILED),
        (RendezvousLost(reason="no leader"), ExitCode.RENDEZVOUS),
        (RendezvousLost(reason="no token", usage=True), ExitCode.USAGE),
        (SignalCame(signum=signal.SIGTERM), 143),
        (SignalCame(signum=signal.SIGINT), 130),
        (SignalCame(signum=signal.SIGHUP), 129),
    ],
)
def test_exit_code(event: object, code: int) -> None:
    for before in ((), RUNNING, (*RUNNING, broken()), (*RUNNING, exited(0), exited(1))):
        state, finish = State(nproc=2), None
        for step in (*before, event, exited(0), exited(1), TreeGone()):
            state, actions = decide(state, step)
            finish = next((a for a in actions if isinstance(a, Finish)), finish)
        assert finish is not None
        assert finish.code == code


def test_a_signal_outranks_the_end_that_follows_from_it() -> None:
    state, finish = State(nproc=2), None
    for event in (*RUNNING, SignalCame(signum=signal.SIGTERM), JobEnded(succeeded=False), TreeGone()):
        state, actions = decide(state, event)
        finish = next((a for a in actions if isinstance(a, Finish)), finish)
    assert finish == Finish(code=143, ended=JobEnded(succeeded=False))


def test_an_unknown_event_is_our_bug() -> None:
    with pytest.raises(TypeError, match="'surprise'"):
        decide(State(nproc=1), "surprise")


def any_event() -> st.SearchStrategy[object]:
    number = st.integers(0, 3)
    rank = st.integers(0, 1)
    return st.one_of(
        st.builds(formed, number, st.integers(0, 2)),
        st.builds(broken, number, st.sampled_from(BreakKind), st.booleans()),
        st.builds(started, rank, number),
        st.builds(exited, rank, st.sampled_from([0, 1, -9, -15]), number),
        st.builds(lambda n, r: SpawnFailed(number=n, local_rank=r, reason="x"), number, rank),
        st.builds(lambda n: Hung(number=n, local_ranks=(0,), reason="x"), number),
        st.sampled_from([StacksTaken(), GraceOver(), TreeGone(), Fenced()]),
        st.builds(
            lambda s, g: SignalCame(signum=s, guard_died=g),
            st.sampled_from([signal.SIGTERM, signal.SIGINT]),
            st.booleans(),
        ),
        st.builds(lambda ok: JobEnded(succeeded=ok), st.booleans()),
        st.just(RendezvousLost(reason="x")),
    )


@settings(max_examples=300)
@given(st.lists(any_event(), max_size=25))
def test_whatever_happens_the_promises_hold(events: list[object]) -> None:
    """Workers start only when none is left of an older round; a finish is final and given out once."""
    state, finishes = State(nproc=2), 0
    for event in events:
        before = state
        state, actions = decide(state, event)
        names = [type(action).__name__ for action in actions]
        if "StartWorkers" in names:
            assert before.phase in (Phase.JOINING, Phase.SUCCEEDED) or isinstance(event, TreeGone)
            assert not before.alive or isinstance(event, TreeGone)
        if "TellStopped" in names:
            assert state.phase is Phase.JOINING
        finishes += names.count("Finish")
        assert finishes <= 1
        assert (state.phase is Phase.ENDED) == (finishes == 1)
        assert not (state.awaited & state.alive)


@settings(max_examples=200)
@given(st.lists(any_event(), max_size=20), st.sampled_from([signal.SIGTERM, signal.SIGINT]))
def test_a_signal_always_leads_to_the_end(events: list[object], signum: int) -> None:
    """Whatever came before: once the grace is over and the tree gone, the agent finishes."""
    state, finished = State(nproc=2), False
    for event in (
        *events,
        SignalCame(signum=signum),
        StacksTaken(),
        GraceOver(),
        TreeGone(),
    ):
        state, actions = decide(state, event)
        finished = finished or any(isinstance(a, Finish) for a in actions)
    assert finished


@pytest.mark.parametrize("opened", [True, False])
def test_a_round_opened_while_the_last_one_is_stopped_is_not_held(opened: bool) -> None:
    state, _ = play(*RUNNING, formed(2, is_held=True), *([RoundOpened(number=2)] if opened else []))
    _, actions = decide(state, TreeGone())
    starts = [action for action in actions if isinstance(action, StartWorkers)]
    assert [start.is_held for start in starts] == [not opened]
