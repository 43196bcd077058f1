"""Histories of events through the node's state machine: its actions, in order."""

import signal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muster._contract import ExitCode
from muster.agent.node.actions import Finish, LocalFailure, ReportFailed, ReportStopped, StartWorkers
from muster.agent.node.decisions import decide
from muster.agent.node.events import (
    FailureSettled,
    Fenced,
    GraceExpired,
    SignalReceived,
    SpawnFailed,
    StacksCollected,
    WorkerExited,
    WorkersGone,
    WorkersIdle,
    WorkerStarted,
)
from muster.agent.node.state import NodePhase, NodeState
from muster.agent.rendezvous.interface import (
    BreakKind,
    GlobalRank0Started,
    JobEnded,
    RendezvousFailed,
    RoundBroken,
    RoundFormed,
)
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


def settled(local_rank: int, number: int = 1) -> FailureSettled:
    return FailureSettled(number=number, local_rank=local_rank)


def hung(*local_ranks: int, number: int = 1) -> WorkersIdle:
    return WorkersIdle(number=number, local_ranks=local_ranks, reason="idle")


def broken(number: int = 1, kind: BreakKind = BreakKind.FAILURE, want_stacks: bool = False) -> RoundBroken:
    return RoundBroken(number=number, kind=kind, reason="why", want_stacks=want_stacks)


def play(*events: object, nproc: int = 2) -> tuple[NodeState, list[tuple[str, ...]]]:
    """Run a history; the end state and, per event, the names of the actions."""
    state = NodeState(nproc=nproc)
    history = []
    for event in events:
        state, actions = decide(state, event)
        history.append(tuple(type(action).__name__ for action in actions))
    return state, history


RUNNING = (formed(), started(0), started(1))
CASES = {
    "a round starts the workers, the last start is reported": (
        RUNNING,
        [("StartWorkers",), (), ("ReportStarted",)],
        NodePhase.RUNNING,
    ),
    "held workers start when global rank 0 has been started": (
        (formed(is_held=True), GlobalRank0Started(number=1), started(0), started(1)),
        [("StartWorkers",), ("ReleaseStarts",), (), ("ReportStarted",)],
        NodePhase.RUNNING,
    ),
    "the start of global rank 0 in a broken round starts no worker": (
        (formed(is_held=True), broken(kind=BreakKind.MEMBERSHIP), GlobalRank0Started(number=1), WorkersGone()),
        [("StartWorkers",), ("CancelStarts", "KillWorkers"), (), ("ReportStopped",)],
        NodePhase.JOINING,
    ),
    "all succeeded: reported once, nothing stopped": (
        (*RUNNING, exited(0), exited(1)),
        [("StartWorkers",), (), ("ReportStarted",), (), ("ReportSucceeded",)],
        NodePhase.SUCCEEDED,
    ),
    "a failure is reported, and nothing happens before the leader answers": (
        (*RUNNING, exited(1, 1), settled(1)),
        [("StartWorkers",), (), ("ReportStarted",), ("SettleFailure",), ("ReportFailed",)],
        NodePhase.RUNNING,
    ),
    "a break signals, then kills, then reports": (
        (*RUNNING, exited(1, 1), settled(1), broken(), exited(0, -15), WorkersGone()),
        [
            ("StartWorkers",),
            (),
            ("ReportStarted",),
            ("SettleFailure",),
            ("ReportFailed",),
            ("SignalWorkers", "StartGracePeriod"),
            ("KillWorkers",),
            ("ReportStopped",),
        ],
        NodePhase.JOINING,
    ),
    "grace period over: killed; the ends of the killed change nothing": (
        (*RUNNING, broken(), GraceExpired(), exited(0, -9), exited(1, -9), WorkersGone()),
        [
            ("StartWorkers",),
            (),
            ("ReportStarted",),
            ("SignalWorkers", "StartGracePeriod"),
            ("KillWorkers",),
            (),
            (),
            ("ReportStopped",),
        ],
        NodePhase.JOINING,
    ),
    "stacks first when wanted": (
        (*RUNNING, broken(want_stacks=True), StacksCollected(number=1)),
        [("StartWorkers",), (), ("ReportStarted",), ("CollectStacks",), ("SignalWorkers", "StartGracePeriod")],
        NodePhase.STOPPING,
    ),
    "the last worker ends while stacks are collected: killed afterwards": (
        (*RUNNING, broken(want_stacks=True), exited(0, 1), exited(1, 1), StacksCollected(number=1)),
        [("StartWorkers",), (), ("ReportStarted",), ("CollectStacks",), (), (), ("KillWorkers",)],
        NodePhase.STOPPING,
    ),
    "stacks of another round do not end the wait for those of this one": (
        (*RUNNING, broken(want_stacks=True), StacksCollected(number=0)),
        [("StartWorkers",), (), ("ReportStarted",), ("CollectStacks",), ()],
        NodePhase.STOPPING,
    ),
    "a signal while stacks are collected: it is sent at once, and only once": (
        (*RUNNING, broken(want_stacks=True), SignalReceived(signum=signal.SIGTERM), StacksCollected(number=1)),
        [
            ("StartWorkers",),
            (),
            ("ReportStarted",),
            ("CollectStacks",),
            ("LeaveJob", "SignalWorkers", "StartGracePeriod"),
            (),
        ],
        NodePhase.STOPPING,
    ),
    "a signal while stacks are collected of workers that have ended: killed at once": (
        (
            *RUNNING,
            broken(want_stacks=True),
            exited(0, 1),
            exited(1, 1),
            SignalReceived(signum=signal.SIGTERM),
            StacksCollected(number=1),
        ),
        [("StartWorkers",), (), ("ReportStarted",), ("CollectStacks",), (), (), ("LeaveJob", "KillWorkers"), ()],
        NodePhase.STOPPING,
    ),
    "fenced: no grace period": (
        (*RUNNING, broken(kind=BreakKind.FENCED)),
        [("StartWorkers",), (), ("ReportStarted",), ("KillWorkers",)],
        NodePhase.STOPPING,
    ),
    "fenced during the grace period: killed": (
        (*RUNNING, broken(), broken(kind=BreakKind.FENCED)),
        [("StartWorkers",), (), ("ReportStarted",), ("SignalWorkers", "StartGracePeriod"), ("KillWorkers",)],
        NodePhase.STOPPING,
    ),
    "the guard fences: killed, reported, joined again": (
        (*RUNNING, Fenced(), exited(0, -9), exited(1, -9), WorkersGone()),
        [("StartWorkers",), (), ("ReportStarted",), ("KillWorkers",), (), (), ("ReportStopped",)],
        NodePhase.JOINING,
    ),
    "a break while workers are being started cancels the rest": (
        (formed(), started(0), broken()),
        [("StartWorkers",), (), ("CancelStarts", "SignalWorkers", "StartGracePeriod")],
        NodePhase.STOPPING,
    ),
    "a break before any worker exists": (
        (formed(), broken()),
        [("StartWorkers",), ("CancelStarts", "KillWorkers")],
        NodePhase.STOPPING,
    ),
    "a node that has succeeded takes part again": (
        (*RUNNING, exited(0), exited(1), broken(), WorkersGone(), formed(2, 1)),
        [
            ("StartWorkers",),
            (),
            ("ReportStarted",),
            (),
            ("ReportSucceeded",),
            ("KillWorkers",),
            ("ReportStopped",),
            ("StartWorkers",),
        ],
        NodePhase.RUNNING,
    ),
    "a break without workers is answered at once": (
        (broken(),),
        [("ReportStopped",)],
        NodePhase.JOINING,
    ),
    "a worker that cannot be started is a failure": (
        (formed(), SpawnFailed(number=1, local_rank=0, reason="no such file"), settled(0)),
        [("StartWorkers",), ("SettleFailure",), ("ReportFailed",)],
        NodePhase.RUNNING,
    ),
    "events of an older round change nothing": (
        (*RUNNING, exited(0, 1, number=0), started(0, number=0), broken(number=0), formed(1)),
        [("StartWorkers",), (), ("ReportStarted",), (), (), (), ()],
        NodePhase.RUNNING,
    ),
    "a newer round while the old workers run (change of leader): they are killed first": (
        (*RUNNING, formed(3), exited(0, -9), exited(1, -9), WorkersGone()),
        [("StartWorkers",), (), ("ReportStarted",), ("KillWorkers",), (), (), ("StartWorkers",)],
        NodePhase.RUNNING,
    ),
    "idle workers are reported and not stopped": (
        (*RUNNING, WorkersIdle(number=1, local_ranks=(0, 1), reason="idle"), WorkersIdle(number=1)),
        [("StartWorkers",), (), ("ReportStarted",), ("ReportIdle",), ("ReportIdle",)],
        NodePhase.RUNNING,
    ),
    "a second signal does not end the grace period": (
        (*RUNNING, SignalReceived(signum=signal.SIGTERM), SignalReceived(signum=signal.SIGTERM)),
        [("StartWorkers",), (), ("ReportStarted",), ("LeaveJob", "SignalWorkers", "StartGracePeriod"), ()],
        NodePhase.STOPPING,
    ),
    "a second Ctrl-C does": (
        (*RUNNING, SignalReceived(signum=signal.SIGINT), SignalReceived(signum=signal.SIGINT)),
        [
            ("StartWorkers",),
            (),
            ("ReportStarted",),
            ("LeaveJob", "SignalWorkers", "StartGracePeriod"),
            ("KillWorkers",),
        ],
        NodePhase.STOPPING,
    ),
    "after the guard's death there is no grace period": (
        (*RUNNING, SignalReceived(signum=signal.SIGTERM, guard_died=True)),
        [("StartWorkers",), (), ("ReportStarted",), ("LeaveJob", "KillWorkers")],
        NodePhase.STOPPING,
    ),
    "a signal while a round is being stopped ends the node after it": (
        (*RUNNING, broken(), SignalReceived(signum=signal.SIGTERM), exited(0), exited(1), WorkersGone()),
        [
            ("StartWorkers",),
            (),
            ("ReportStarted",),
            ("SignalWorkers", "StartGracePeriod"),
            ("LeaveJob",),
            (),
            ("KillWorkers",),
            ("Finish",),
        ],
        NodePhase.ENDED,
    ),
    "a signal before the first round ends at once": (
        (SignalReceived(signum=signal.SIGTERM),),
        [("LeaveJob", "Finish")],
        NodePhase.ENDED,
    ),
    "the job's end kills what the workers left running": (
        (*RUNNING, exited(0), exited(1), JobEnded(succeeded=True), WorkersGone()),
        [("StartWorkers",), (), ("ReportStarted",), (), ("ReportSucceeded",), ("KillWorkers",), ("Finish",)],
        NodePhase.ENDED,
    ),
    "after the end events change nothing": (
        (JobEnded(succeeded=True), formed(), SignalReceived(signum=signal.SIGTERM)),
        [("Finish",), (), ()],
        NodePhase.ENDED,
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
        (RendezvousFailed(reason="no leader"), ExitCode.RENDEZVOUS),
        (RendezvousFailed(reason="no token", usage=True), ExitCode.USAGE),
        (SignalReceived(signum=signal.SIGTERM), 143),
        (SignalReceived(signum=signal.SIGINT), 130),
        (SignalReceived(signum=signal.SIGHUP), 129),
    ],
)
def test_exit_code(event: object, code: int) -> None:
    for before in ((), RUNNING, (*RUNNING, broken()), (*RUNNING, exited(0), exited(1))):
        state, finish = NodeState(nproc=2), None
        for step in (*before, event, exited(0), exited(1), WorkersGone()):
            state, actions = decide(state, step)
            finish = next((a for a in actions if isinstance(a, Finish)), finish)
        assert finish is not None
        assert finish.code == code


def test_a_signal_sets_the_exit_code_before_the_jobs_end() -> None:
    state, finish = NodeState(nproc=2), None
    for event in (*RUNNING, SignalReceived(signum=signal.SIGTERM), JobEnded(succeeded=False), WorkersGone()):
        state, actions = decide(state, event)
        finish = next((a for a in actions if isinstance(a, Finish)), finish)
    assert finish == Finish(code=143, ended=JobEnded(succeeded=False))


def any_event() -> st.SearchStrategy[object]:
    number = st.integers(0, 3)
    rank = st.integers(0, 1)
    return st.one_of(
        st.builds(formed, number, st.integers(0, 2)),
        st.builds(broken, number, st.sampled_from(BreakKind), st.booleans()),
        st.builds(started, rank, number),
        st.builds(exited, rank, st.sampled_from([0, 1, -9, -15]), number),
        st.builds(settled, rank, number),
        st.builds(lambda n, r: SpawnFailed(number=n, local_rank=r, reason="x"), number, rank),
        st.builds(lambda n: WorkersIdle(number=n, local_ranks=(0,), reason="x"), number),
        st.sampled_from(
            [StacksCollected(number=1), StacksCollected(number=2), GraceExpired(), WorkersGone(), Fenced()]
        ),
        st.builds(
            lambda s, g: SignalReceived(signum=s, guard_died=g),
            st.sampled_from([signal.SIGTERM, signal.SIGINT]),
            st.booleans(),
        ),
        st.builds(lambda ok: JobEnded(succeeded=ok), st.booleans()),
        st.just(RendezvousFailed(reason="x")),
    )


def list_reports(*events: object) -> tuple[list[LocalFailure], list[LocalFailure]]:
    """Run a history; the failures reported at once, and those reported with the round's end."""
    state, prompt, late = NodeState(nproc=2), [], []
    for event in events:
        state, actions = decide(state, event)
        prompt += [action.failure for action in actions if isinstance(action, ReportFailed)]
        late += [each for action in actions if isinstance(action, ReportStopped) for each in action.late]
    return prompt, late


RANK_1 = LocalFailure(local_rank=1)
STOPPED = (broken(), exited(0, 0), WorkersGone())


@pytest.mark.parametrize(
    ("events", "prompt", "late"),
    [
        pytest.param((exited(1, 7), settled(1), *STOPPED), [RANK_1], [], id="at once"),
        pytest.param((hung(0, 1), exited(1, 7), settled(1), *STOPPED), [RANK_1], [], id="idle before"),
        pytest.param((hung(0, 1), hung(), exited(1, 7), settled(1), *STOPPED), [RANK_1], [], id="alive again before"),
        pytest.param((exited(1, 7), settled(1), hung(0), hung(), *STOPPED), [RANK_1], [], id="idle afterwards"),
        pytest.param((exited(1, 7), hung(0), settled(1), *STOPPED), [RANK_1], [], id="idle meanwhile"),
        pytest.param((exited(1, 7), *STOPPED, settled(1)), [], [RANK_1], id="gone before it has settled"),
        pytest.param((exited(1, 7), broken(), settled(1), exited(0), WorkersGone()), [RANK_1], [], id="while stopping"),
        pytest.param((broken(), exited(1, -15), exited(0), WorkersGone()), [], [RANK_1], id="of the stop"),
        pytest.param(
            (hung(0, 1), broken(), exited(1, 7), exited(0), WorkersGone()), [], [RANK_1], id="idle, then late"
        ),
    ],
)
def test_a_failure_is_reported_exactly_once(events, prompt, late) -> None:
    """Also the failure of a worker that was reported idle before: idleness alone ends no round while others work."""
    assert list_reports(*RUNNING, *events) == (prompt, late)


@settings(max_examples=300)
@given(st.lists(any_event(), max_size=25))
def test_no_failure_is_reported_twice(events: list[object]) -> None:
    reported: dict[int, list[int]] = {}
    state = NodeState(nproc=2)
    for event in events:
        before = state
        state, actions = decide(state, event)
        for action in actions:
            if isinstance(action, ReportFailed):
                reported.setdefault(action.number, []).append(action.failure.local_rank)
            elif isinstance(action, ReportStopped) and before.phase is NodePhase.STOPPING:
                reported.setdefault(action.number, []).extend(each.local_rank for each in action.late)
    assert all(len(ranks) == len(set(ranks)) for ranks in reported.values())


def test_an_unknown_event_is_refused() -> None:
    with pytest.raises(TypeError, match="'surprise'"):
        decide(NodeState(nproc=1), "surprise")


@settings(max_examples=300)
@given(st.lists(any_event(), max_size=25))
def test_the_invariants_hold_for_every_history(events: list[object]) -> None:
    """Workers start only when none is left of an older round; a finish is final and returned once."""
    state, finishes = NodeState(nproc=2), 0
    for event in events:
        before = state
        state, actions = decide(state, event)
        names = [type(action).__name__ for action in actions]
        if "StartWorkers" in names:
            assert before.phase in (NodePhase.JOINING, NodePhase.SUCCEEDED) or isinstance(event, WorkersGone)
            assert not before.alive or isinstance(event, WorkersGone)
        if "ReportStopped" in names:
            assert state.phase is NodePhase.JOINING
        finishes += names.count("Finish")
        assert finishes <= 1
        assert (state.phase is NodePhase.ENDED) == (finishes == 1)
        assert not (state.awaited & state.alive)


@settings(max_examples=200)
@given(st.lists(any_event(), max_size=20), st.sampled_from([signal.SIGTERM, signal.SIGINT]))
def test_a_signal_always_leads_to_the_end(events: list[object], signum: int) -> None:
    """For every history: once the grace period is over and the workers are gone, the agent finishes."""
    state, finished = NodeState(nproc=2), False
    for event in (*events, SignalReceived(signum=signum), StacksCollected(number=1), GraceExpired(), WorkersGone()):
        state, actions = decide(state, event)
        finished = finished or any(isinstance(a, Finish) for a in actions)
    assert finished


@pytest.mark.parametrize("rank0_started", [True, False])
def test_a_round_whose_rank_0_starts_during_a_stop_is_not_held(rank0_started: bool) -> None:
    state, _ = play(*RUNNING, formed(2, is_held=True), *([GlobalRank0Started(number=2)] if rank0_started else []))
    _, actions = decide(state, WorkersGone())
    starts = [action for action in actions if isinstance(action, StartWorkers)]
    assert [start.is_held for start in starts] == [not rank0_started]
