"""Histories of events through the node's state machine: its actions, in order."""

import re
import signal
from functools import partial
from typing import Any, get_args

import pytest
from doubles import samples
from doubles.sent import unwrap
from hypothesis import given, settings
from hypothesis import strategies as st

from muster._shared.contract import AskKind, AskOutcome, ExitCode
from muster._shared.records import replace
from muster._shared.reports import Answer
from muster.agent.node import actions as do
from muster.agent.node import events as on
from muster.agent.node.decisions import HOLD_S, TABLE, decide
from muster.agent.node.request_decisions import TERMINAL_REQUEST
from muster.agent.node.state import (
    Delaying,
    Ended,
    Joining,
    NodeDrain,
    NodeRules,
    NodeState,
    Running,
    Starting,
    Stopping,
    StopStep,
    Succeeded,
)
from muster.agent.rendezvous import interface as rdzv
from muster.agent.round import Checkpoint, PartMemory

make_round = partial(samples.make_round, restarts_left=3)


def formed(number: int = 1, attempt: int = 0, *, is_held: bool = False) -> rdzv.RoundFormed:
    return rdzv.RoundFormed(round=make_round(number=number, attempt=attempt), is_held=is_held)


def started(local_rank: int, number: int = 1) -> on.WorkerStarted:
    return on.WorkerStarted(round_number=number, local_rank=local_rank)


def exited(local_rank: int, code: int = 0, number: int = 1) -> on.WorkerExited:
    return on.WorkerExited(round_number=number, local_rank=local_rank, code=code)


def settled(local_rank: int, number: int = 1) -> on.FailureSettled:
    return on.FailureSettled(round_number=number, local_rank=local_rank)


def hung(number: int = 1) -> on.WorkersIdle:
    return on.WorkersIdle(round_number=number, reason="idle")


def active(number: int = 1) -> on.WorkersActive:
    return on.WorkersActive(round_number=number)


def gone(number: int = 1) -> on.WorkersGone:
    return on.WorkersGone(round_number=number)


def expired(purpose: on.TimerPurpose, number: int = 1) -> on.TimerExpired:
    return on.TimerExpired(timer=on.RoundTimer(purpose=purpose, round_number=number))


def grace_over(number: int = 1) -> on.TimerExpired:
    return expired(on.TimerPurpose.GRACE, number)


def fenced(local_rank: int, number: int = 1) -> on.WorkerExited:
    """The guard has killed it."""
    return on.WorkerExited(round_number=number, local_rank=local_rank, code=-9, fencings=1)


def stacks(number: int = 1) -> on.StacksCollected:
    return on.StacksCollected(round_number=number, stacks={0: on.WorkerStack(text="stack")})


def new_state(nproc: int = 2, **rules: Any) -> NodeState:
    """Waiting for the first round."""
    return NodeState(rules=NodeRules(nproc=nproc, **rules), phase=Joining(), is_prepared=True)


def broken(
    number: int = 1, kind: rdzv.BreakKind = rdzv.BreakKind.FAILURE, want_stacks: bool = False
) -> rdzv.RoundBroken:
    return rdzv.RoundBroken(round_number=number, kind=kind, reason="why", want_stacks=want_stacks)


def run(*events: on.Event, state: NodeState | None = None) -> tuple[NodeState, list[tuple[do.Action, ...]]]:
    """Run a history; the end state and the actions of each event."""
    state = state or new_state()
    history = []
    for event in events:
        state, actions = decide(state, event)
        history.append(tuple(unwrap(actions)))
    return state, history


def collect(kind: type, *events: on.Event, state: NodeState | None = None) -> list[Any]:
    """The actions of this kind in a history."""
    _, history = run(*events, state=state)
    return [action for actions in history for action in actions if isinstance(action, kind)]


def lines(*events: on.Event, state: NodeState | None = None) -> list[str]:
    return [each.text for each in collect(do.PrintLine, *events, state=state)]


def formed_as(**changes: Any) -> rdzv.RoundFormed:
    return rdzv.RoundFormed(round=make_round(**changes))


RUNNING = (formed(), started(0), started(1))
HELD, MOVED, RANK_0 = (
    formed(is_held=True),
    broken(kind=rdzv.BreakKind.MEMBERSHIP),
    rdzv.GlobalRank0Started(round_number=1),
)
WORDS = {
    "RUN": "BEGIN | - | AllStarted",
    "BEGIN": "BeginRound StartWorkers",
    "HOLD": "BeginRound StartTimer",
    "CANCEL": "ParkWorkers CancelStarts SIGNAL",
    "STOP": "ParkWorkers SIGNAL",
    "SIGNAL": "SignalWorkers StartTimer StartTimer",
    "STACKS": "ParkWorkers StartTimer CollectStacks",
}
SIGTERM = on.SignalReceived(signum=signal.SIGTERM)
SIGINT = on.SignalReceived(signum=signal.SIGINT)
CASES: dict[str, tuple[tuple[on.Event, ...], str]] = {
    "a round starts the workers, the last start is reported": (RUNNING, "RUN | Running"),
    "held workers start when global rank 0 has been started": (
        (HELD, RANK_0, started(0), started(1)),
        "HOLD | StartWorkers | - | AllStarted | Running",
    ),
    "held workers start when the limit has passed, once": (
        (HELD, expired(on.TimerPurpose.START), RANK_0),
        "HOLD | StartWorkers | - | Running",
    ),
    "the start of global rank 0 in a broken round starts no worker, nor does the timer": (
        (HELD, MOVED, RANK_0, expired(on.TimerPurpose.START)),
        "HOLD | ParkWorkers ReportStopped | - | - | Joining",
    ),
    "a timer of the round before starts no held worker": (
        (HELD, MOVED, formed(2, is_held=True), expired(on.TimerPurpose.START, 1), expired(on.TimerPurpose.START, 2)),
        "HOLD | ParkWorkers ReportStopped | HOLD | - | StartWorkers | Running",
    ),
    "a newer round replaces one whose workers were not started": ((HELD, formed(2)), "HOLD | BEGIN | Running"),
    "a signal before the workers of a round are started ends at once": (
        (HELD, SIGTERM),
        "HOLD | Leaving Finish | Ended",
    ),
    "all succeeded: reported once, nothing stopped": (
        (*RUNNING, exited(0), exited(1)),
        "RUN | - | AllSucceeded | Succeeded",
    ),
    "a failure is reported, and nothing happens before the leader answers": (
        (*RUNNING, exited(1, 1), settled(1)),
        "RUN | SettleFailure | ReportFailed | Running",
    ),
    "a break signals, then kills, then reports": (
        (*RUNNING, exited(1, 1), settled(1), broken(), exited(0, -15), gone()),
        "RUN | SettleFailure | ReportFailed | STOP | KillWorkers | ReportStopped | Joining",
    ),
    "grace period over: killed; the ends of the killed change nothing": (
        (*RUNNING, broken(), grace_over(), exited(0, -9), exited(1, -9), gone()),
        "RUN | STOP | KillWorkers | - | - | ReportStopped | Joining",
    ),
    "the grace period of the round before kills no worker of this one": (
        (*RUNNING, broken(), exited(0), exited(1), gone(), formed(2), started(0, 2), broken(2), grace_over(1)),
        "RUN | STOP | - | KillWorkers | ReportStopped | BEGIN | - | CANCEL | - | Stopping",
    ),
    "stacks first when wanted": ((*RUNNING, broken(want_stacks=True), stacks()), "RUN | STACKS | SIGNAL | Stopping"),
    "stacks that do not come: the stop goes on after their limit; late ones change nothing": (
        (*RUNNING, broken(want_stacks=True), expired(on.TimerPurpose.STACKS), stacks()),
        "RUN | STACKS | SIGNAL | - | Stopping",
    ),
    "the last worker ends while stacks are collected: killed afterwards": (
        (*RUNNING, broken(want_stacks=True), exited(0, 1), exited(1, 1), stacks()),
        "RUN | STACKS | - | - | KillWorkers | Stopping",
    ),
    "stacks of another round do not end the wait for those of this one": (
        (*RUNNING, broken(want_stacks=True), stacks(0)),
        "RUN | STACKS | - | Stopping",
    ),
    "a signal while stacks are collected: it is sent at once, and only once": (
        (*RUNNING, broken(want_stacks=True), SIGTERM, stacks()),
        "RUN | STACKS | Leaving SIGNAL | - | Stopping",
    ),
    "a signal while stacks are collected of workers that have ended: killed at once": (
        (*RUNNING, broken(want_stacks=True), exited(0, 1), exited(1, 1), SIGTERM, stacks()),
        "RUN | STACKS | - | - | Leaving KillWorkers | - | Stopping",
    ),
    "stacks are printed on request, also during a stop, and only of workers": (
        (on.StacksRequested(), *RUNNING, on.StacksRequested(), broken(), on.StacksRequested()),
        "- | RUN | PrintStacks | STOP | PrintStacks | Stopping",
    ),
    "fenced: no grace period": ((*RUNNING, broken(kind=rdzv.BreakKind.FENCED)), "RUN | KillWorkers | Stopping"),
    "fenced during the grace period: killed": (
        (*RUNNING, broken(), broken(kind=rdzv.BreakKind.FENCED)),
        "RUN | STOP | KillWorkers | Stopping",
    ),
    "the guard fences: killed, reported, joined again": (
        (*RUNNING, fenced(0), fenced(1), gone()),
        "RUN | RecordFencing KillWorkers | - | ReportStopped | Joining",
    ),
    "the guard fences during the grace period": (
        (*RUNNING, broken(), fenced(0), fenced(1), gone()),
        "RUN | STOP | RecordFencing KillWorkers | - | ReportStopped | Joining",
    ),
    "a break while workers are being started cancels the rest": (
        (formed(), started(0), broken()),
        "BEGIN | - | CANCEL | Stopping",
    ),
    "a worker whose start was on its way when the stop began gets its grace period, too": (
        (formed(), started(0), broken(), started(1), exited(0), exited(1)),
        "BEGIN | - | CANCEL | - | - | KillWorkers | Stopping",
    ),
    "a break before any worker exists": (
        (formed(), broken()),
        "BEGIN | ParkWorkers CancelStarts KillWorkers | Stopping",
    ),
    "a node that has succeeded takes part again": (
        (*RUNNING, exited(0), exited(1), broken(), gone(), formed(2, 1)),
        "RUN | - | AllSucceeded | ParkWorkers KillWorkers | ReportStopped | BEGIN | Running",
    ),
    "a break of a round whose workers are gone is answered at once": (
        (*RUNNING, fenced(0), gone(), broken(kind=rdzv.BreakKind.FINAL)),
        "RUN | RecordFencing KillWorkers | ReportStopped | ReportStopped | Joining",
    ),
    "a break of a round that this node takes no part in changes nothing": ((broken(),), "- | Joining"),
    "a worker that cannot be started is a failure": (
        (formed(), on.SpawnFailed(round_number=1, local_rank=0, reason="no such file"), settled(0)),
        "BEGIN | SettleFailure | ReportFailed | Running",
    ),
    "a rank fails once, by its store or by its exit": (
        (*RUNNING, on.StoreLost(round_number=1, reason="lost its store"), settled(0), exited(0, 1)),
        "RUN | SettleFailure | ReportFailed | - | Running",
    ),
    "a rank whose failure is being settled fails because of its store, once": (
        (*RUNNING, exited(0, 1), on.StoreLost(round_number=1, reason="lost its store"), settled(0)),
        "RUN | SettleFailure | - | ReportFailed | Running",
    ),
    "events of an older round change nothing": (
        (*RUNNING, exited(0, 1, number=0), started(0, number=0), broken(number=0), formed(1), hung(0)),
        "RUN | - | - | - | - | - | Running",
    ),
    "a newer round while the old workers run (change of leader): they are killed first": (
        (*RUNNING, formed(3), exited(0, -9), exited(1, -9), gone()),
        "RUN | KillWorkers | - | - | BEGIN | Running",
    ),
    "a newer round that is broken before the old workers are gone is not started, and its break is answered": (
        (*RUNNING, formed(3), broken(3), gone()),
        "RUN | KillWorkers | ParkWorkers | ReportStopped | Joining",
    ),
    "idle workers are reported and not stopped": (
        (*RUNNING, hung(), active()),
        "RUN | ReportIdle | ReportIdle | Running",
    ),
    "a crash on an idle node is a failure": (
        (*RUNNING, hung(), exited(1, 7), settled(1)),
        "RUN | ReportIdle | SettleFailure | ReportFailed | Running",
    ),
    "a second signal does not end the grace period": (
        (*RUNNING, SIGTERM, SIGTERM),
        "RUN | Leaving SIGNAL | - | Stopping",
    ),
    "a second Ctrl-C does": ((*RUNNING, SIGINT, SIGINT), "RUN | Leaving SIGNAL | KillWorkers | Stopping"),
    "after the guard's death there is no grace period": (
        (*RUNNING, on.SignalReceived(signum=signal.SIGTERM, guard_died=True)),
        "RUN | Leaving KillWorkers | Stopping",
    ),
    "a signal while a round is being stopped ends the node after it": (
        (*RUNNING, broken(), SIGTERM, exited(0), exited(1), gone()),
        "RUN | STOP | Leaving | - | KillWorkers | Finish | Ended",
    ),
    "a signal before the first round ends at once": ((SIGTERM,), "Leaving Finish | Ended"),
    "a signal without a name is like any other": (
        (on.SignalReceived(signum=signal.SIGRTMIN + 6),),
        "Leaving Finish | Ended",
    ),
    "the job's end kills what the workers left running": (
        (*RUNNING, exited(0), exited(1), rdzv.JobEnded(succeeded=True), gone()),
        "RUN | - | AllSucceeded | KillWorkers | Finish | Ended",
    ),
    "workers that cannot be ended: the node leaves, the others go on": (
        (*RUNNING, broken(), grace_over(), on.WorkersNotEnded(round_number=1, pids=(7, 8)), gone()),
        "RUN | STOP | KillWorkers | Leaving Finish | - | Ended",
    ),
    "workers of a round before that could not be ended change nothing": (
        (*RUNNING, broken(), grace_over(), on.WorkersNotEnded(round_number=0, pids=(7,))),
        "RUN | STOP | KillWorkers | - | Stopping",
    ),
    "after the end events change nothing": (
        (rdzv.JobEnded(succeeded=True), formed(), SIGTERM),
        "Finish | - | - | Ended",
    ),
}


@pytest.mark.parametrize(("nodes", "is_hang", "said"), [(2, True, [(0, 1)]), (2, False, []), (1, True, [])])
def test_in_a_hang_the_report_gets_the_workers_that_others_wait_for(nodes, is_hang, said) -> None:
    """They may be busy, so that this node has not reported them. Of one node all that hang are known."""
    state, _ = run(rdzv.RoundFormed(round=make_round(group_world_size=nodes)), started(0), started(1))
    event = rdzv.RoundBroken(
        round_number=1, kind=rdzv.BreakKind.FAILURE, reason="why", want_stacks=True, is_hang=is_hang
    )
    actions = decide(state, event)[1]
    assert [each.local_ranks for each in actions if isinstance(each, do.ReportIdle)] == said
    assert [each.is_hang for each in actions if isinstance(each, do.CollectStacks)] == [is_hang]


STILL_INT = on.SignalReceived(signum=signal.SIGINT, still_s=12.0)


def test_a_stop_of_workers_that_stand_still_prints_what_they_do_first() -> None:
    state, history = run(*RUNNING, STILL_INT, stacks())
    assert [type(each).__name__ for each in history[3] if not isinstance(each, do.PrintLine)] == [
        "StartTimer",
        "CollectStacks",
    ]
    page, leave, signalled = history[4][:3]
    assert isinstance(leave, rdzv.Leaving), "later than the page: the workers of other nodes end then"
    assert page == do.PrintPage(round=make_round(), stacks={0: on.WorkerStack(text="stack")})
    assert signalled == do.SignalWorkers(signum=signal.SIGINT)
    assert isinstance(state.phase, Stopping)
    assert decide(state, stacks())[1] == (), "once"


@pytest.mark.parametrize(
    ("event", "follows"),
    [(expired(on.TimerPurpose.STACKS), "SignalWorkers"), (on.SignalReceived(signum=signal.SIGINT), "KillWorkers")],
)
def test_the_page_delays_neither_the_stop_for_long_nor_the_second_ctrl_c(event: on.Event, follows: str) -> None:
    state, history = run(*RUNNING, STILL_INT, event)
    names = [type(each).__name__ for each in history[-1]]
    assert "Leaving" in names[: names.index(follows)]
    assert not any(isinstance(each, do.PrintPage) for each in decide(state, stacks())[1])


def test_workers_that_stand_still_are_reported_but_not_in_a_drain() -> None:
    still, moves = (rdzv.StoodStill(round_number=1, for_s=for_s) for for_s in (50.0, 0.0))
    state, history = run(*RUNNING, still, moves)
    assert history[3:] == [(rdzv.StoodStill(round_number=1, for_s=for_s),) for for_s in (50.0, 0.0)]
    assert decide(state, replace(still, round_number=2))[1] == ()
    paused = replace(state, phase=replace(state.phase, drain=NodeDrain(number=1)))
    assert [decide(paused, each)[1] != () for each in (still, moves)] == [False, True]


@pytest.mark.parametrize("handle", ["local_cwd://torchx/x", ""])
def test_the_line_about_a_job_that_stands_still_has_the_commands(handle: str) -> None:
    """An agent that was started by hand knows no handle."""
    stop = f"muster stop {handle}" if handle else ""
    state = new_state(stacks_command="kill -USR2 7", stop_command=stop)
    told = "why; all stacks: kill -USR2 7" + (f"; to end the job: {stop}" if handle else "")
    for kind, text in ((rdzv.NoticeKind.STILL, told), (rdzv.NoticeKind.LINE, "why")):
        assert decide(state, rdzv.Notice(text="why", kind=kind))[1] == (do.PrintLine(text=text),)


def test_the_first_line_of_each_hang_says_how_to_end_the_job() -> None:
    hang, over = rdzv.NoticeKind.HANG, rdzv.NoticeKind.HANG_OVER
    notices = [rdzv.Notice(text="it hangs", kind=kind) for kind in (hang, hang, rdzv.NoticeKind.STACK, over, hang)]
    _, history = run(*RUNNING, *notices, state=new_state(stop_command="muster stop x"))
    plain, first = do.PrintLine(text="it hangs"), do.PrintLine(text="it hangs; to end the job: muster stop x")
    assert history[3:] == [(each,) for each in (first, plain, plain, plain, first)]
    _, history = run(*RUNNING, *notices)
    assert history[3:] == [(plain,)] * 5


@pytest.mark.parametrize("name", CASES)
def test_history(name: str) -> None:
    """Expected are the actions of each event, without printed lines, and the last phase."""
    events, expected = CASES[name]
    state, history = run(*events)
    names = [[type(each).__name__ for each in actions if not isinstance(each, do.PrintLine)] for actions in history]
    for word, meaning in WORDS.items():
        expected = expected.replace(word, meaning)
    assert " | ".join([*(" ".join(each) or "-" for each in names), type(state.phase).__name__]) == expected


@pytest.mark.parametrize(
    ("events", "late"),
    [
        pytest.param((broken(), exited(0, 1)), "rank 1 ", id="one of two"),
        pytest.param((SIGTERM,), "ranks 0-1 ", id="both"),
        pytest.param((broken(), exited(0), exited(1)), None, id="only what they left behind is being ended"),
        pytest.param((broken(), grace_over()), None, id="killed"),
        pytest.param((), None, id="no stop"),
    ],
)
def test_a_stop_says_which_workers_it_waits_for(events: tuple[on.Event, ...], late: str | None) -> None:
    _, history = run(*RUNNING, *events, expired(on.TimerPurpose.SLOW))
    told = [action.text for action in history[-1] if isinstance(action, do.PrintLine)]
    assert [each.partition("did")[0] for each in told] == ([late] if late else [])
    assert all(re.findall(r"SIG\w+|\d+ s", each) == ["5 s", "SIGTERM", "SIGKILL", "25 s"] for each in told)


def test_no_one_asks_which_workers_a_stop_waits_for_that_is_shorter() -> None:
    timers = collect(do.StartTimer, *RUNNING, broken(), state=new_state(shutdown_timeout_s=5.0))
    assert [each.timer.purpose for each in timers] == [on.TimerPurpose.GRACE]


def finish_of(*events: on.Event) -> do.Finish:
    """What the history ends with."""
    [found] = collect(do.Finish, *events)
    return found


@pytest.mark.parametrize(
    ("event", "code"),
    [
        (rdzv.JobEnded(succeeded=True), ExitCode.SUCCEEDED),
        (rdzv.JobEnded(succeeded=False), ExitCode.WORKERS_FAILED),
        (rdzv.RendezvousFailed(reason="no leader"), ExitCode.RENDEZVOUS),
        (rdzv.RendezvousFailed(reason="no token", usage=True), ExitCode.USAGE),
        (SIGTERM, 143),
        (SIGINT, 130),
        (on.SignalReceived(signum=signal.SIGHUP), 129),
    ],
)
def test_exit_code(event: on.Event, code: int) -> None:
    for before in ((), RUNNING, (*RUNNING, broken()), (*RUNNING, exited(0), exited(1))):
        assert finish_of(*before, event, exited(0), exited(1), gone()).code == code


@pytest.mark.parametrize(
    ("event", "code"),
    [(rdzv.JobEnded(succeeded=True), 1), (rdzv.JobEnded(succeeded=False), 1), (SIGTERM, 143), (broken(), 69)],
)
def test_workers_that_cannot_be_ended_are_never_a_success(event: on.Event, code: int) -> None:
    not_ended = on.WorkersNotEnded(round_number=1, pids=(7,))
    assert finish_of(*RUNNING, event, grace_over(), not_ended, gone()).code == code


def test_a_signal_sets_the_exit_code_before_the_jobs_end() -> None:
    ended = rdzv.JobEnded(succeeded=False)
    assert finish_of(*RUNNING, SIGTERM, ended, gone()) == do.Finish(code=143, ended=ended)


def test_stacks_are_reported_with_the_end_of_their_round() -> None:
    _, history = run(*RUNNING, broken(want_stacks=True), stacks(), exited(0), exited(1), gone())
    assert history[-1] == (do.ReportStopped(round=make_round(), stacks={0: on.WorkerStack(text="stack")}),)


def test_the_agent_joins_once_it_has_started() -> None:
    state = NodeState(rules=NodeRules(nproc=2))
    assert isinstance(state.phase, Starting)
    for events, expected in (
        ((on.AgentStarted(), on.WorkersPrepared()), [("JoinJob",), ("Prepared",)]),
        ((on.WorkersPrepared(), on.AgentStarted()), [(), ("JoinJob",)]),
    ):
        _, history = run(*events, state=state)
        assert [tuple(type(action).__name__ for action in actions) for actions in history] == expected
        joined = [action for actions in history for action in actions if isinstance(action, do.JoinJob)]
        assert joined == [do.JoinJob(is_prepared=isinstance(events[0], on.WorkersPrepared))]


SENT_BY = new_state(sigterm_senders="`scancel`")
"""Readers did not know where SIGTERM came from."""
GUARD_DIED = on.SignalReceived(signum=signal.SIGTERM, guard_died=True)
NOT_ENDED = on.WorkersNotEnded(round_number=1, pids=(7, 8))


@pytest.mark.parametrize(
    ("events", "facts", "state"),
    [
        ((SIGTERM,), ["SIGTERM"], None),
        ((*RUNNING, SIGTERM, rdzv.Notice(text="lost the leader"), broken()), ["SIGTERM", "30 s"], None),
        ((*RUNNING, GUARD_DIED), ["muster-agent process"], None),
        ((*RUNNING, SIGINT, SIGINT), ["30 s", "Ctrl-C"], None),
        ((on.SignalReceived(signum=signal.SIGRTMIN + 6),), [f"signal {signal.SIGRTMIN + 6}"], None),
        ((*RUNNING, rdzv.JobEnded(succeeded=True), NOT_ENDED), ["processes 7, 8"], None),
        ((*RUNNING, SIGTERM), ["SIGTERM", "30 s", "`scancel`"], SENT_BY),
        ((SIGTERM,), ["SIGTERM", "`scancel`"], SENT_BY),
        ((*RUNNING, SIGINT), ["30 s", "Ctrl-C"], SENT_BY),
        ((on.SignalReceived(signum=signal.SIGHUP),), ["SIGHUP"], SENT_BY),
    ],
)
def test_one_line_about_an_end_names_what_it_is_of(events, facts: list[str], state: NodeState | None) -> None:
    [line] = lines(*events, state=state)
    assert re.findall(r"SIG\w+|signal \d+|\d+ s\b|Ctrl-C|`\w+`|processes \d, \d|muster-agent process", line) == facts


@pytest.mark.parametrize(
    ("events", "told"),
    [
        ((rdzv.Notice(text="searching"),), ["searching"]),
        ((*RUNNING, broken()), ["why; restart 1 of 3"]),
        ((*RUNNING, broken(kind=rdzv.BreakKind.MEMBERSHIP)), ["why"]),
        ((*RUNNING, broken(kind=rdzv.BreakKind.FINAL)), []),  # the report shows it
    ],
)
def test_a_break_is_printed_as_the_leader_words_it(events, told: list[str]) -> None:
    assert lines(*events) == told


def together(node_index: int) -> NodeState:
    """A node of a job whose nodes share a console and are stopped together."""
    return new_state(stops_together=True, node_index=node_index)


LEFT = rdzv.RoundBroken(round_number=1, kind=rdzv.BreakKind.MEMBERSHIP, reason="node 1 left")
FENCED = rdzv.RoundBroken(round_number=1, kind=rdzv.BreakKind.FENCED, reason="the leader was lost")
LEADER_LOST = rdzv.Notice(text="the leader was lost", is_leader_lost=True)
LINES_DUE = expired(on.TimerPurpose.LINES)


def test_nodes_that_are_stopped_together_print_one_line() -> None:
    assert [len(lines(*RUNNING, SIGTERM, state=together(node))) for node in (0, 1)] == [1, 0]
    assert lines(SIGTERM, state=together(1)) == []
    for ends in (LEFT, broken(kind=rdzv.BreakKind.FENCED), LEADER_LOST):
        assert lines(*RUNNING, ends, SIGTERM, LINES_DUE, state=together(1)) == [], "the whole job is being stopped"


@pytest.mark.parametrize("stops_together", [True, False])
@pytest.mark.parametrize("events", [(SIGTERM,), (SIGINT,), (LEFT,), (LEFT, SIGTERM), (broken(),)])
def test_workers_that_still_stop_are_killed_at_once_if_the_leader_is_lost(events, stops_together) -> None:
    """A leader that is stopped keeps leading until they have ended. This one is lost, so others may continue."""
    _, history = run(*RUNNING, *events, FENCED, state=new_state(stops_together=stops_together))
    assert any(isinstance(each, do.KillWorkers) for each in history[-1])


@pytest.mark.parametrize(
    ("events", "at_once"),
    [
        ((SIGTERM,), False),
        ((SIGTERM, SIGTERM), False),
        ((SIGINT,), False),
        ((SIGINT, SIGINT), True),
        ((SIGTERM, SIGINT), True),
        ((on.SignalReceived(signum=signal.SIGTERM, guard_died=True),), True),
    ],
)
def test_a_second_ctrl_c_and_the_guards_death_wait_for_no_other_node(
    events: tuple[on.Event, ...], at_once: bool
) -> None:
    assert finish_of(*RUNNING, *events, exited(0), exited(1), gone()).at_once is at_once


@pytest.mark.parametrize("stops_together", [True, False])
@pytest.mark.parametrize("is_interrupt", [True, False])
def test_a_ctrl_c_has_one_signal_on_all_nodes_that_stop_together(stops_together: bool, is_interrupt: bool) -> None:
    """The break by the node that got it first may come first; a node on a terminal of its own gets no Ctrl-C."""
    left = replace(LEFT, is_interrupt=is_interrupt)
    sent = collect(do.SignalWorkers, *RUNNING, left, SIGINT, state=new_state(stops_together=stops_together))
    assert [each.signum for each in sent] == [signal.SIGINT if stops_together and is_interrupt else signal.SIGTERM]


@pytest.mark.parametrize("guard_died", [False, True])
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_node_says_whether_a_ctrl_c_ends_it_and_whether_it_was_told_to_leave(signum: int, guard_died: bool) -> None:
    [leave] = collect(rdzv.Leaving, *RUNNING, on.SignalReceived(signum=signum, guard_died=guard_died))
    assert ("process was killed" in leave.reason) is guard_died, "the others hear of it"
    assert (leave.is_interrupt, leave.is_planned) == (signum == signal.SIGINT, not guard_died)


@pytest.mark.parametrize("node_index", [0, 1, 2])
def test_the_end_of_another_node_is_told_by_one(node_index: int) -> None:
    state = together(node_index)
    assert lines(*RUNNING, LEFT, LINES_DUE, LINES_DUE, state=state) == ["node 1 left"]
    assert lines(*RUNNING, LEFT, exited(0), exited(1), gone(), formed(2), LINES_DUE, state=state) == ["node 1 left"]
    assert lines(*RUNNING, replace(LEFT, is_leader=False), LINES_DUE, state=state) == []
    for after in (LINES_DUE, rdzv.RendezvousFailed(reason="x"), rdzv.JobEnded(succeeded=False)):
        assert lines(LEADER_LOST, after, state=state) == ([LEADER_LOST.text] if node_index < 2 else [])


# -- a node at fault ---------------------------------------------------------------------------------------------------

AT_FAULT = replace(broken(), leaves=True, reason="rank 1 on node 1 (h) exited with code 77")


def test_a_node_at_fault_stops_its_workers_and_leaves_with_69() -> None:
    state, history = run(*RUNNING, AT_FAULT, exited(0, -15), exited(1, -15), gone())
    assert isinstance(state.phase, Ended)
    assert [type(each) for actions in history[3:] for each in actions].count(rdzv.Leaving) == 1
    [finish] = [action for action in history[-1] if isinstance(action, do.Finish)]
    assert (finish.code, AT_FAULT.reason in finish.rendezvous_failed.reason) == (69, True)


def test_a_node_that_has_stopped_its_workers_leaves_at_once_and_a_signal_that_came_first_decides_the_code() -> None:
    """All failures of the round are known only then."""
    ends = (exited(0, -15), exited(1, -15), gone())
    assert finish_of(*RUNNING, broken(), *ends, AT_FAULT).code == 69
    assert finish_of(*RUNNING, SIGTERM, AT_FAULT, *ends).code == 143


# -- delays ------------------------------------------------------------------------------------------------------------


def test_back_off_begins_with_the_second_restart_and_doubles() -> None:
    rules = NodeRules(nproc=1, restart_backoff_s=0.5)
    found = [rules.find_longest_backoff_s(repeats) for repeats in (0, 1, 2, 3, 12, 40)]
    assert found == [0.0, 0.0, 0.5, 1.0, 32.0, 32.0]
    assert NodeRules(nproc=1).find_longest_backoff_s(5) == 0.0


@pytest.mark.parametrize("is_held", [True, False])
def test_the_node_of_global_rank_0_backs_off_and_the_others_wait_for_it(is_held: bool) -> None:
    state = new_state(restart_backoff_s=2.0, backoff_share=0.75)
    event = replace(formed_as(attempt=3, repeats=3), is_held=is_held)
    assert [each.delay_s for each in collect(do.StartTimer, event, state=state)] == [4.0 + HOLD_S if is_held else 3.0]
    told = [re.findall(r"\d[.\d]*", line) for line in lines(event, state=state)]
    assert told == ([] if is_held else [["3.0", "3"]]), "how long, before which attempt"


@pytest.mark.parametrize("rank0_started", [True, False])
def test_a_round_whose_rank_0_starts_during_a_stop_is_not_held(rank0_started: bool) -> None:
    early = [rdzv.GlobalRank0Started(round_number=2)] if rank0_started else []
    state, _ = run(*RUNNING, formed(2, is_held=True), *early, gone())
    assert isinstance(state.phase, Running if rank0_started else Delaying)


@pytest.mark.parametrize(
    ("repeats", "use_agent_store", "is_delayed"), [(0, False, True), (0, True, False), (3, True, True)]
)
def test_where_an_agent_hosts_the_store_only_a_back_off_is_waited_for(repeats, use_agent_store, is_delayed) -> None:
    event = replace(formed_as(repeats=repeats, use_agent_store=use_agent_store), is_held=True)
    state, _ = run(event, state=new_state(restart_backoff_s=2.0))
    assert isinstance(state.phase, Delaying if is_delayed else Running)


# -- the store ---------------------------------------------------------------------------------------------------------


def lost(number: int = 1) -> on.StoreLost:
    return on.StoreLost(round_number=number, reason="lost its store")


LOST = do.LocalFailure(local_rank=0, reason="lost its store")


@pytest.mark.parametrize(
    ("events", "prompt", "late"),
    [
        pytest.param((*RUNNING, lost(), settled(0), exited(0, 1), settled(0), broken(), gone()), [LOST], [], id="once"),
        pytest.param((formed(), lost(), settled(0)), [LOST], [], id="before the workers have started"),
        pytest.param(
            (formed(is_held=True), lost(), expired(on.TimerPurpose.START), settled(0)), [LOST], [], id="held back"
        ),
        pytest.param((*RUNNING, exited(0, 1), lost(), settled(0)), [LOST], [], id="together with rank 0"),
        pytest.param((*RUNNING, lost(0), settled(0)), [], [], id="of an older round"),
        pytest.param((*RUNNING, exited(0), exited(1), lost(), settled(0)), [], [], id="after the success"),
        pytest.param((*RUNNING, broken(), lost(), exited(0), exited(1), gone()), [], [], id="during a stop"),
        pytest.param(
            (*RUNNING, exited(1, 1), settled(1), broken(), lost(), exited(0, -15), gone()),
            [do.LocalFailure(local_rank=1)],
            [LOST],
            id="known late",
        ),
        pytest.param(
            (*RUNNING, exited(1, 1), settled(1), broken(), exited(0, 1), lost(), gone()),
            [do.LocalFailure(local_rank=1)],
            [LOST],
            id="the cause",
        ),
    ],
)
def test_a_lost_store_is_a_failure_of_rank_0_while_workers_run(events, prompt: list, late: list) -> None:
    assert list_reports(*events) == (prompt, late)


# -- fencing -----------------------------------------------------------------------------------------------------------


def test_a_worker_that_the_guard_killed_has_not_failed() -> None:
    assert list_reports(*RUNNING, fenced(0), fenced(1), gone()) == ([], [])


def test_a_kill_is_a_failure_unless_the_guard_fenced_this_rounds_workers() -> None:
    assert list_reports(*RUNNING, exited(1, -9), settled(1)) == ([RANK_1], [])


# -- every history -----------------------------------------------------------------------------------------------------


def any_event() -> st.SearchStrategy[on.Event]:
    number = st.integers(0, 3)
    rank = st.integers(0, 1)
    return st.one_of(
        st.builds(formed, number, st.integers(0, 2), is_held=st.booleans()),
        st.builds(broken, number, st.sampled_from(rdzv.BreakKind), st.booleans()),
        st.builds(lambda n: rdzv.GlobalRank0Started(round_number=n), number),
        st.builds(started, rank, number),
        st.builds(exited, rank, st.sampled_from([0, 1, -9, -15]), number),
        st.builds(fenced, rank, number),
        st.builds(settled, rank, number),
        st.builds(lambda n, r: on.SpawnFailed(round_number=n, local_rank=r, reason="x"), number, rank),
        st.builds(lost, number),
        st.builds(hung, number),
        st.builds(active, number),
        st.builds(lambda n, s: rdzv.StoodStill(round_number=n, for_s=s), number, st.sampled_from([0.0, 50.0])),
        st.builds(stacks, number),
        st.builds(gone, number),
        st.builds(lambda n: on.WorkersNotEnded(round_number=n, pids=(7,)), number),
        st.builds(expired, st.sampled_from(on.TimerPurpose), number),
        st.sampled_from(
            [on.StacksRequested(), on.WorkersPrepared(), rdzv.Notice(text="x"), rdzv.RendezvousFailed(reason="x")]
        ),
        st.builds(
            lambda s, g, a, p, t, q: on.SignalReceived(
                signum=s, guard_died=g, is_asked=a, is_at_terminal=p, at_s=t, still_s=q
            ),
            st.sampled_from([signal.SIGTERM, signal.SIGINT]),
            st.booleans(),
            st.booleans(),
            st.booleans(),
            st.floats(0.0, 3.0),
            st.sampled_from([0.0, 50.0]),
        ),
        st.builds(
            lambda n, k, a: rdzv.DrainBegun(round_number=n, drain=1, limit_s=5.0, kind=k, is_asked=a),
            number,
            st.integers(0, 2),
            st.booleans(),
        ),
        st.builds(lambda k: on.Requested(request=1, kind=k, limit_s=5.0), st.sampled_from(AskKind)),
        st.builds(
            lambda n, o: rdzv.RequestAnswered(request=n, answer=Answer(outcome=o, line="x")),
            st.sampled_from([1, TERMINAL_REQUEST]),
            st.sampled_from(AskOutcome),
        ),
        st.builds(lambda c: on.PersonChose(choice=c), st.none() | st.sampled_from(on.Choice)),
        st.builds(lambda n, r: on.WorkersCanLeave(round_number=n, local_ranks=frozenset(r)), number, st.sets(rank)),
        st.builds(lambda n, r: on.WorkerLeft(round_number=n, local_rank=r), number, rank),
        st.builds(lambda n: rdzv.StacksWanted(round_number=n, number=1), number),
        st.builds(lambda n, s: rdzv.DrainCommitted(round_number=n, drain=1, step=s), number, st.integers(0, 3)),
        st.builds(lambda n: rdzv.DrainWithdrawn(round_number=n, drain=1, reason="x"), number),
        st.builds(lambda n, s: on.SlotsRead(round_number=n, drain=1, slots=s), number, st.none() | st.just(())),
        st.builds(lambda n: rdzv.Saved(round_number=n, step=4, path="/4"), number),
        st.builds(lambda n: rdzv.PartReport(round_number=n, feature="x", content="{}"), number),
        st.builds(lambda n: rdzv.PartOrder(round_number=n, feature="x", content="{}"), number),
        st.builds(lambda n: rdzv.PartRemembered(round_number=n, memory=PartMemory(feature="x", content="{}")), number),
        st.builds(lambda n: rdzv.CheckpointCompleted(checkpoint=Checkpoint(number=n, step=4, path="/4")), number),
        st.builds(lambda ok: rdzv.JobEnded(succeeded=ok), st.booleans()),
    )


def test_any_event_builds_every_kind_of_event() -> None:
    """But `AgentStarted`, which comes once."""
    built: set[type] = set()

    @settings(max_examples=500, database=None)
    @given(any_event())
    def collect(event: on.Event) -> None:
        built.add(type(event))

    collect()
    assert {kind.__name__ for kind in get_args(on.Event)} - {kind.__name__ for kind in built} == {"AgentStarted"}


def list_reports(*events: on.Event) -> tuple[list[do.LocalFailure], list[do.LocalFailure]]:
    """Run a history; the failures reported at once, and those reported with the round's end."""
    prompt = [action.failure for action in collect(do.ReportFailed, *events)]
    return prompt, [each for action in collect(do.ReportStopped, *events) for each in action.late]


RANK_1 = do.LocalFailure(local_rank=1)
STOPPED = (broken(), exited(0, 0), gone())


@pytest.mark.parametrize(
    ("events", "prompt", "late"),
    [
        pytest.param((exited(1, 7), settled(1), *STOPPED), [RANK_1], [], id="at once"),
        pytest.param((hung(), exited(1, 7), settled(1), *STOPPED), [RANK_1], [], id="idle before"),
        pytest.param((hung(), active(), exited(1, 7), settled(1), *STOPPED), [RANK_1], [], id="alive again before"),
        pytest.param((exited(1, 7), settled(1), hung(), active(), *STOPPED), [RANK_1], [], id="idle afterwards"),
        pytest.param((exited(1, 7), hung(), settled(1), *STOPPED), [RANK_1], [], id="idle meanwhile"),
        pytest.param((exited(1, 7), *STOPPED, settled(1)), [], [RANK_1], id="gone before it has settled"),
        pytest.param((exited(1, 7), broken(), settled(1), exited(0), gone()), [RANK_1], [], id="while stopping"),
        pytest.param((broken(), exited(1, -15), exited(0), gone()), [], [RANK_1], id="of the stop"),
        pytest.param((hung(), broken(), exited(1, 7), exited(0), gone()), [], [RANK_1], id="idle, then late"),
    ],
)
def test_a_failure_is_reported_exactly_once(events, prompt, late) -> None:
    """Also the failure of a worker that was reported idle before: idleness alone ends no round while others work."""
    assert list_reports(*RUNNING, *events) == (prompt, late)


def test_a_value_that_is_no_event_is_refused() -> None:
    with pytest.raises(TypeError, match="'surprise'"):
        decide(new_state(), "surprise")  # type: ignore[arg-type]


@settings(max_examples=200)
@given(st.lists(any_event(), max_size=30))
def test_the_invariants_hold_for_every_history(events: list[on.Event]) -> None:
    """Rounds are started in the order of their numbers, each once; the end comes once, and nothing after it.

    A phase drops an event that it does not accept.
    """
    state, finishes, last = new_state(), 0, -1
    for event in events:
        before = state
        state, actions = decide(state, event)
        assert type(before.phase) in TABLE[type(event)] or (state, actions) == (before, ())
        assert not (finishes and actions)
        for action in actions:
            if isinstance(action, do.StartWorkers):
                assert action.round.number > last
                last = action.round.number
            elif isinstance(action, do.ReportStopped):
                assert isinstance(state.phase, Joining)
            elif isinstance(action, do.Finish):
                finishes += 1
        assert finishes == int(isinstance(state.phase, Ended))
        assert finishes <= 1
        if isinstance(state.phase, Running):
            assert not (state.phase.awaited & state.phase.alive)


@settings(max_examples=200)
@given(st.lists(any_event(), max_size=30))
def test_every_start_is_followed_by_a_kill_before_the_next_start_and_before_the_end(events: list[on.Event]) -> None:
    """So no worker outlives its round, and `WorkersGone` is what lets the next start happen. No failure comes twice."""
    _, history = run(*events)
    is_running = False
    reported: list[tuple[int, int]] = []
    for action in (action for actions in history for action in actions):
        if isinstance(action, do.StartWorkers):
            assert not is_running
            is_running = True
        elif isinstance(action, do.KillWorkers):
            is_running = False
        elif isinstance(action, do.ReportFailed):
            reported.append((action.round.number, action.failure.local_rank))
        elif isinstance(action, do.Finish | do.ReportStopped):
            assert not is_running
            reported += [(action.round.number, each.local_rank) for each in getattr(action, "late", ())]
    assert len(reported) == len(set(reported))


@settings(max_examples=200)
@given(st.lists(any_event(), max_size=20), st.sampled_from([signal.SIGTERM, signal.SIGINT]))
def test_a_signal_always_leads_to_the_end(events: list[on.Event], signum: int) -> None:
    """For every history: once the grace period is over and the workers are gone, the agent finishes."""
    state, _ = run(*events)
    number = state.round.number if state.round else 0
    after = (on.SignalReceived(signum=signum), stacks(number), grace_over(number), gone(number))
    state, _ = run(*after, state=state)
    assert isinstance(state.phase, Ended)


@settings(max_examples=200)
@given(st.lists(any_event(), max_size=20))
def test_a_stop_ends_even_if_only_its_timers_and_the_kernel_go_on(events: list[on.Event]) -> None:
    """For every history: a node that stops its workers is not waiting for what may never come."""
    state, _ = run(*events)
    phase = state.phase
    if not isinstance(phase, Stopping):
        return
    number = phase.round.number
    state, _ = run(expired(on.TimerPurpose.STACKS, number), grace_over(number), state=state)
    assert isinstance(state.phase, Stopping)
    assert state.phase.step is StopStep.KILLING
    left, _ = run(gone(number), state=state)
    assert not isinstance(left.phase, Stopping)
    left, _ = run(on.WorkersNotEnded(round_number=number, pids=(7,)), state=state)
    assert isinstance(left.phase, Ended)


def test_the_first_node_says_once_which_number_of_threads_workers_get() -> None:
    again = (broken(), exited(0), exited(1), gone(), formed(number=2, attempt=1))

    def count(*events: on.Event, threads: int | None = 3) -> int:
        told = lines(*events, state=new_state(omp_num_threads=threads))
        return sum(line.startswith("OMP_NUM_THREADS ") and "each worker gets 3 " in line for line in told)

    assert count(*RUNNING, *again) == 1
    assert count(formed_as(group_rank=1)) == 0
    assert count(*RUNNING, threads=None) == 0


@pytest.mark.parametrize(
    ("changes", "count"),
    [
        ({}, 1),
        ({"group_rank": 1}, 0),
        ({"number": 2}, 0),  # other nodes have gone on
        ({"checkpoint": Checkpoint(number=1, step=1, path="/p")}, 0),
    ],
)
def test_a_job_that_begins_anew_says_once_what_is_lost(changes: dict[str, Any], count: int) -> None:
    assert lines(formed_as(**changes), state=new_state(loss="lost")).count("lost") == count


@pytest.mark.parametrize(("group_rank", "told"), [(0, ["why; restart 2 of 4"]), (1, [])])
def test_only_node_0_tells_that_a_failure_restarts_the_workers(group_rank: int, told: list[str]) -> None:
    """Every node hears of it in the same words."""
    event = formed_as(attempt=1, group_rank=group_rank, group_world_size=2)
    assert lines(event, started(0), started(1), broken()) == told


@settings(max_examples=200)
@given(st.lists(any_event(), max_size=40))
def test_an_open_question_at_the_terminal_ends_with_its_workers_at_the_latest(events: list[on.Event]) -> None:
    ctrl_c = on.SignalReceived(signum=signal.SIGINT, is_at_terminal=True)
    paused = rdzv.RequestAnswered(request=TERMINAL_REQUEST, answer=Answer(outcome=AskOutcome.DONE, line="all wait"))
    state, history = run(*RUNNING, ctrl_c, paused, state=new_state(asks_at_interrupt=True))
    assert do.AskPerson() in history[-1]
    is_open = True
    for event in events:
        state, actions = decide(state, event)
        for action in actions:
            if isinstance(action, do.AskPerson | do.EndQuestion):
                is_open = isinstance(action, do.AskPerson)
        assert state.interrupt is None or isinstance(state.phase, Running | Succeeded)
        assert not is_open or state.interrupt is not None
    again = replace(ctrl_c, is_at_terminal=False)
    state, _ = run(again, again, state=state)
    assert isinstance(state.phase, Ended | Stopping)
