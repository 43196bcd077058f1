"""What one node does about each event: a pure function from state and event to new state and actions.

Nothing here reads a clock, a process or a socket. `supervisor` posts the events of `node.events`, rendezvous those of
`rendezvous.interface`; `supervisor` carries the actions out, in order.

    JOINING --RoundFormed--> RUNNING --all exited 0--> SUCCEEDED --JobEnded--> ENDED
       ^                        |  ^                       |
       |                  RoundBroken, signal         RoundBroken
       |                        v  |                       |
       +------ stopped ----- STOPPING <--------------------+
"""

import signal
from typing import Any, TypeAlias

from muster._contract import ExitCode
from muster.agent.node.actions import (
    Action,
    CancelStarts,
    CollectStacks,
    Finish,
    KillWorkers,
    LeaveJob,
    LocalFailure,
    ReleaseStarts,
    ReportFailed,
    ReportIdle,
    ReportStarted,
    ReportStopped,
    ReportSucceeded,
    SettleFailure,
    SignalWorkers,
    StartGracePeriod,
    StartWorkers,
)
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
from muster.agent.runtime.records import replace

Decision: TypeAlias = tuple[NodeState, tuple[Action, ...]]


def decide(state: NodeState, event: Any) -> Decision:
    """Decide what follows from one event. Events of an older round, and any after the end, change nothing.

    Raises:
        TypeError: the event is of another type.
    """
    if state.phase is NodePhase.ENDED:
        return state, ()
    try:
        handler = _HANDLERS[type(event)]
    except KeyError:
        raise TypeError(f"no decision is defined for {event!r}") from None
    decision: Decision = handler(state, event)
    return decision


# -- rounds ----------------------------------------------------------------------------------------------------------


def _on_round_formed(state: NodeState, event: RoundFormed) -> Decision:
    if state.finish is not None or event.round.number <= state.number:
        return state, ()
    if state.phase is not NodePhase.JOINING:
        # Only after a change of leader: end the old round first, then start without asking again.
        state = replace(state, next_round=event.round, next_is_held=event.is_held)
        return (state, ()) if state.phase is NodePhase.STOPPING else _begin_stop(state, kill=True)
    return _start(state, event.round, is_held=event.is_held)


def _start(state: NodeState, new: Round, *, is_held: bool) -> Decision:
    local_ranks = frozenset(range(state.nproc))
    state = NodeState(
        nproc=state.nproc, phase=NodePhase.RUNNING, round=new, awaited=local_ranks, rank0_started=state.rank0_started
    )
    return state, (StartWorkers(round=new, is_held=is_held and state.rank0_started < new.number),)


def _on_global_rank0_started(state: NodeState, event: GlobalRank0Started) -> Decision:
    state = replace(state, rank0_started=max(state.rank0_started, event.number))
    return state, (ReleaseStarts(),) if state.phase is NodePhase.RUNNING and state.number == event.number else ()


def _on_round_broken(state: NodeState, event: RoundBroken) -> Decision:
    if event.number < state.number:
        return state, ()
    if state.phase is NodePhase.STOPPING:
        return _kill_now(state) if event.kind is BreakKind.FENCED else (state, ())
    if state.phase is NodePhase.JOINING:
        return state, (ReportStopped(number=event.number),)
    return _begin_stop(state, kill=event.kind is BreakKind.FENCED, stacks=event.want_stacks)


def _on_fenced(state: NodeState, _event: Fenced) -> Decision:
    if state.phase in (NodePhase.RUNNING, NodePhase.SUCCEEDED):
        return _begin_stop(state, kill=True)
    return _kill_now(state) if state.phase is NodePhase.STOPPING else (state, ())


def _on_job_ended(state: NodeState, event: JobEnded) -> Decision:
    code = ExitCode.SUCCEEDED if event.succeeded else ExitCode.WORKERS_FAILED
    return _end_with(state, Finish(code=code, ended=event))


def _on_rendezvous_failed(state: NodeState, event: RendezvousFailed) -> Decision:
    code = ExitCode.USAGE if event.usage else ExitCode.RENDEZVOUS
    return _end_with(state, Finish(code=code, rendezvous_failed=event))


def _end_with(state: NodeState, finish: Finish) -> Decision:
    if state.finish is not None:  # a signal came first: its exit code stays, but the job's end is still reported
        finish = replace(finish, code=state.finish.code)
    state = replace(state, finish=finish)
    if state.phase is NodePhase.STOPPING:
        return _kill_now(state)
    if state.phase is NodePhase.JOINING:
        return replace(state, phase=NodePhase.ENDED), (finish,)
    return _begin_stop(state, kill=True)


# -- workers ---------------------------------------------------------------------------------------------------------


def _on_worker_started(state: NodeState, event: WorkerStarted) -> Decision:
    if event.number != state.number or event.local_rank not in state.awaited:
        return state, ()
    state = replace(state, alive=state.alive | {event.local_rank}, awaited=state.awaited - {event.local_rank})
    return state, (() if state.awaited else (ReportStarted(number=state.number),))


def _on_worker_exited(state: NodeState, event: WorkerExited) -> Decision:
    if event.number != state.number or state.phase is NodePhase.JOINING:
        return state, ()
    was_alive = event.local_rank in state.alive
    state = replace(state, alive=state.alive - {event.local_rank})
    failure = LocalFailure(local_rank=event.local_rank)
    if event.code != 0:
        state = _add_failure(state, failure)
    if state.phase is NodePhase.STOPPING:
        return _continue_stop(state) if was_alive else (state, ())
    if state.phase is not NodePhase.RUNNING or not was_alive:
        return state, ()
    if event.code != 0:
        return state, (SettleFailure(number=event.number, failure=failure),)
    state = replace(state, succeeded=state.succeeded | {event.local_rank})
    if len(state.succeeded) < state.nproc:
        return state, ()
    return replace(state, phase=NodePhase.SUCCEEDED), (ReportSucceeded(number=state.number),)


def _on_spawn_failed(state: NodeState, event: SpawnFailed) -> Decision:
    if event.number != state.number or event.local_rank not in state.awaited:
        return state, ()
    failure = LocalFailure(local_rank=event.local_rank, reason=event.reason)
    state = _add_failure(replace(state, awaited=state.awaited - {event.local_rank}), failure)
    return state, (SettleFailure(number=event.number, failure=failure),)


def _add_failure(state: NodeState, failure: LocalFailure) -> NodeState:
    """Add a failure to report once: by `ReportFailed`, or by `ReportStopped` if the round's workers are gone first."""
    if failure.local_rank in state.reported or any(each.local_rank == failure.local_rank for each in state.unreported):
        return state
    return replace(state, unreported=(*state.unreported, failure))


def _on_failure_settled(state: NodeState, event: FailureSettled) -> Decision:
    settled = [each for each in state.unreported if each.local_rank == event.local_rank]
    if event.number != state.number or not settled:
        return state, ()
    unreported = tuple(each for each in state.unreported if each not in settled)
    state = replace(state, unreported=unreported, reported=state.reported | {event.local_rank})
    return state, tuple(ReportFailed(number=event.number, failure=failure) for failure in settled)


def _on_workers_idle(state: NodeState, event: WorkersIdle) -> Decision:
    if event.number != state.number or state.phase is not NodePhase.RUNNING:
        return state, ()
    return state, (ReportIdle(number=event.number, local_ranks=event.local_ranks, reason=event.reason),)


# -- stopping --------------------------------------------------------------------------------------------------------


def _begin_stop(
    state: NodeState, *, kill: bool = False, stacks: bool = False, signum: int = signal.SIGTERM
) -> Decision:
    """Stop in steps unless `kill`: [stacks], the signal to the workers, one grace period; then SIGKILL."""
    cancel = (CancelStarts(),) if state.awaited else ()
    state = replace(state, phase=NodePhase.STOPPING, stop_signal=signum, awaited=frozenset())
    if kill or not state.alive:
        return replace(state, killing=True), (*cancel, KillWorkers())
    if stacks:
        return replace(state, collecting_stacks=True), (*cancel, CollectStacks(number=state.number))
    return state, (*cancel, SignalWorkers(signum=signum), StartGracePeriod())


def _on_stacks_collected(state: NodeState, event: StacksCollected) -> Decision:
    return _send_deferred_signal(state) if event.number == state.number else (state, ())


def _send_deferred_signal(state: NodeState) -> Decision:
    """Send the stop signal now if it waits for stacks."""
    if not state.collecting_stacks:
        return state, ()
    state = replace(state, collecting_stacks=False)
    if state.killing:
        return state, ()
    if not state.alive:
        return _continue_stop(state)
    return state, (SignalWorkers(signum=state.stop_signal), StartGracePeriod())


def _continue_stop(state: NodeState) -> Decision:
    """Once no worker is left, the processes that they left behind get no grace period."""
    if state.alive or state.killing or state.collecting_stacks:
        return state, ()
    return replace(state, killing=True), (KillWorkers(),)


def _on_grace_expired(state: NodeState, _event: GraceExpired) -> Decision:
    return _kill_now(state) if state.phase is NodePhase.STOPPING else (state, ())


def _kill_now(state: NodeState) -> Decision:
    if state.killing:
        return state, ()
    return replace(state, killing=True), (KillWorkers(),)


def _on_workers_gone(state: NodeState, _event: WorkersGone) -> Decision:
    if state.phase is not NodePhase.STOPPING or not state.killing:
        return state, ()
    if state.finish is not None:
        return replace(state, phase=NodePhase.ENDED), (state.finish,)
    idle = NodeState(nproc=state.nproc, round=state.round, rank0_started=state.rank0_started)
    if state.next_round is not None:
        return _start(idle, state.next_round, is_held=state.next_is_held)
    return idle, (ReportStopped(number=state.number, late=state.unreported),)


def _on_signal(state: NodeState, event: SignalReceived) -> Decision:
    """The first signal is sent on to the workers; a second Ctrl-C kills them; other repetitions change nothing."""
    if state.finish is not None:
        again = event.signum == signal.SIGINT or event.guard_died
        return _kill_now(state) if again and state.phase is NodePhase.STOPPING else (state, ())
    finish = Finish(code=ExitCode.of_signal(event.signum))
    leave = LeaveJob(reason=f"received {signal.Signals(event.signum).name}")
    state = replace(state, finish=finish, next_round=None)
    if state.phase is NodePhase.JOINING:
        return replace(state, phase=NodePhase.ENDED), (leave, finish)
    if state.phase is NodePhase.STOPPING:
        # The sender counts the grace period from its signal: do not wait for stacks any longer.
        waiting = replace(state, stop_signal=event.signum)
        state, actions = _kill_now(state) if event.guard_died else _send_deferred_signal(waiting)
    else:
        state, actions = _begin_stop(state, signum=event.signum, kill=event.guard_died)
    return state, (leave, *actions)


_HANDLERS: dict[type, Any] = {
    RoundFormed: _on_round_formed,
    GlobalRank0Started: _on_global_rank0_started,
    RoundBroken: _on_round_broken,
    JobEnded: _on_job_ended,
    RendezvousFailed: _on_rendezvous_failed,
    WorkerStarted: _on_worker_started,
    WorkerExited: _on_worker_exited,
    SpawnFailed: _on_spawn_failed,
    FailureSettled: _on_failure_settled,
    WorkersIdle: _on_workers_idle,
    StacksCollected: _on_stacks_collected,
    GraceExpired: _on_grace_expired,
    WorkersGone: _on_workers_gone,
    SignalReceived: _on_signal,
    Fenced: _on_fenced,
}
