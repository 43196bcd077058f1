"""What follows from events of the workers of one round, and how a stop continues. Pure, a part of `decisions`.

A failure is judged here alone. It is *new* when its worker was alive in the current round, exited with another code
than 0, and was not killed by the guard. It is reported once: at once when its last output has been read
(`ReportFailed`), or *late*, with the end of the round (`ReportStopped`). Whether it ends the round is decided in
`rendezvous.consensus.failures.on_failed`.

A stop: [stacks], the signal to the workers, one grace period, then SIGKILL. If a round follows, workers that can leave
this one are asked to, and get SIGKILL if they have not within `LEAVE_LIMIT_S`.
"""

import signal
from typing import TypeAlias

from muster._shared.contract import AskKind, describe_end, name_signal
from muster._shared.records import replace
from muster._shared.transitions import expect
from muster.agent.node.actions import (
    Action,
    CancelStarts,
    CollectStacks,
    Finish,
    KillWorkers,
    LeaveRound,
    LocalFailure,
    PrintLine,
    PrintPage,
    PrintStacks,
    RecordFencing,
    ReportFailed,
    ReportIdle,
    Send,
    SettleFailure,
    SignalWorkers,
    StartTimer,
)
from muster.agent.node.events import (
    FailureSettled,
    RoundTimer,
    SignalReceived,
    SpawnFailed,
    StacksCollected,
    StacksRequested,
    StoreLost,
    TimerPurpose,
    WorkerExited,
    WorkerLeft,
    WorkersActive,
    WorkersCanLeave,
    WorkersIdle,
    WorkerStarted,
)
from muster.agent.node.state import (
    NO_FAILURES,
    Delaying,
    FailureBook,
    NodeDrain,
    NodeState,
    Rejoin,
    Running,
    StartNext,
    Stopping,
    StopStep,
    Succeeded,
)
from muster.agent.rendezvous.interface import AllStarted, AllSucceeded, Asked, StoodStill
from muster.agent.round import Round

Decision: TypeAlias = tuple[NodeState, tuple[Action, ...]]

RequestDecision: TypeAlias = tuple[NodeState, tuple[Action, ...], SignalReceived | None]
"""As `Decision`, and the Ctrl-C that has its ordinary effect now."""

OWN_REQUEST = 0
"""The number of this agent's own request for the stacks of all nodes; people's begin with 1."""

SLOW_STOP_S = 5.0
"""After how long a stop names the workers that it waits for."""
STACKS_LIMIT_S = 4.0
"""How long a stop waits for flight recorders and stacks, somewhat more than their collection may take."""
LEAVE_LIMIT_S = 2.0
"""How long workers may take to leave a round. They may be in a call that nothing interrupts."""
_PAGE_LIMIT_S = 1.5
"""How long that may delay the stop."""

_FENCED_LINE = "this node lost contact with the job: its workers were killed, because other nodes may replace them"


def on_worker_started(state: NodeState, event: WorkerStarted) -> Decision:
    """Handle that a worker exists."""
    phase = state.running_or_stopping
    phase = replace(phase, alive=phase.alive | {event.local_rank})
    if isinstance(phase, Stopping):  # started just before the cancellation
        return replace(state, phase=phase), ()
    phase = replace(phase, awaited=phase.awaited - {event.local_rank})
    return replace(state, phase=phase), (
        () if phase.awaited else (Send(message=AllStarted(round_number=phase.round.number)),)
    )


def on_can_leave(state: NodeState, event: WorkersCanLeave) -> Decision:
    """Note which workers a stop may ask to leave the round."""
    phase = expect(state.phase, Running)
    return replace(state, phase=replace(phase, can_leave=event.local_ranks)), ()


def on_worker_left(state: NodeState, event: WorkerLeft) -> Decision:
    """Handle that a worker waits for the next round: for this one it has ended."""
    phase = expect(state.phase, Stopping)
    return continue_stop(state, replace(phase, alive=phase.alive - {event.local_rank}))


def end_leave_wait(state: NodeState, phase: Stopping) -> Decision:
    """Kill the workers that have not left the round."""
    late = find_leavers(phase)
    if phase.step is not StopStep.GRACE or not late:
        return state, ()
    return state, (SignalWorkers(signum=signal.SIGKILL, local_ranks=late),)


def on_worker_exited(state: NodeState, event: WorkerExited) -> Decision:
    """Handle the end of a worker: a success, a failure, or a kill by the guard."""
    phase = state.running_or_stopping
    if event.local_rank not in phase.alive:
        return state, ()
    phase = replace(phase, alive=phase.alive - {event.local_rank})
    if event.code != 0 and event.fencings > 0:
        return _on_fenced(state, phase)
    drain = phase.drain if isinstance(phase, Running) else None
    if isinstance(phase, Running) and drain is not None and drain.has_reached(event.asked):
        return _on_drained(state, phase, drain, event)
    failure = LocalFailure(local_rank=event.local_rank)
    if isinstance(phase, Stopping):
        if event.code != 0:
            phase = replace(phase, failures=_add_failure(phase.failures, failure))
        return continue_stop(state, phase)
    return fail_round(state, phase, failure) if event.code != 0 else _on_succeeded(state, phase, event.local_rank)


def _on_succeeded(state: NodeState, phase: Running, local_rank: int) -> Decision:
    phase = replace(phase, succeeded=phase.succeeded | {local_rank})
    if len(phase.succeeded) < state.rules.nproc:
        return replace(state, phase=phase), ()
    last = None if phase.drain is None else phase.drain.last_rank
    drained_rank = None if last is None else phase.round.rank_offset + last
    report = Send(message=AllSucceeded(round_number=phase.round.number, drained_rank=drained_rank))
    return replace(state, phase=Succeeded(round=phase.round, has_drain_step=phase.has_drain_step)), (report,)


def _on_drained(state: NodeState, phase: Running, drain: NodeDrain, event: WorkerExited) -> Decision:
    """Handle the end of a worker that was told to stop.

    Its exit code says nothing about the job, which may be run again.
    """
    phase = replace(phase, drain=replace(drain, last_rank=event.local_rank))
    state, actions = _on_succeeded(state, phase, event.local_rank)
    if event.code == 0:
        return state, actions
    rank = phase.round.rank_offset + event.local_rank
    line = (
        f"rank {rank} {describe_end(event.code)} after it was told to stop at step {drain.step}: it may not have saved"
    )
    return state, (PrintLine(text=line), *actions)


def _on_fenced(state: NodeState, phase: Running | Stopping) -> Decision:
    """Handle that the guard has killed the workers because the lease ran out. None of them has failed."""
    if isinstance(phase, Running):
        state, actions = begin_stop(state, phase, kill=True, then=Rejoin(round=phase.round))
    elif phase.step is StopStep.KILLING:  # known, or killed anyway
        return replace(state, phase=phase), ()
    else:
        state, actions = kill_now(state, phase)
    return state, (RecordFencing(), PrintLine(text=_FENCED_LINE), *actions)


def on_spawn_failed(state: NodeState, event: SpawnFailed) -> Decision:
    """Handle that a worker could not be started as its failure."""
    phase = expect(state.phase, Running)
    if event.local_rank not in phase.awaited:
        return state, ()
    failure = LocalFailure(local_rank=event.local_rank, reason=event.reason, errno=event.errno, check=event.check)
    return fail_round(state, replace(phase, awaited=phase.awaited - {event.local_rank}), failure)


def on_store_lost(state: NodeState, event: StoreLost) -> Decision:
    """Handle the loss of the store as a failure of the worker that would otherwise host it.

    Workers may wait for the store for minutes.

    A killed process closes its connections before its parent can know, so a worker may already have failed because of
    it.
    """
    failure = LocalFailure(local_rank=0, reason=event.reason, check=event.check)
    if isinstance(state.phase, Delaying):
        return replace(state, phase=replace(state.phase, store_problem=failure)), ()
    phase = state.running_or_stopping
    if isinstance(phase, Stopping) and phase.failures == NO_FAILURES:
        return state, ()
    others = tuple(each for each in phase.failures.unreported if each.local_rank != 0)
    if isinstance(phase, Running) and others == phase.failures.unreported:
        return fail_round(state, phase, failure)
    book = _add_failure(replace(phase.failures, unreported=others), failure)
    return replace(state, phase=replace(phase, failures=book)), ()


def fail_round(state: NodeState, phase: Running, failure: LocalFailure) -> Decision:
    """Report the failure of a worker, or a fault of the node as one, unless the worker's failure is known."""
    book = _add_failure(phase.failures, failure)
    is_new = book is not phase.failures
    state = replace(state, phase=replace(phase, failures=book))
    return state, (SettleFailure(round=phase.round, failure=failure),) if is_new else ()


def on_failure_settled(state: NodeState, event: FailureSettled) -> Decision:
    """Report a failure, if the round's end has not reported it already."""
    phase = state.running_or_stopping
    book = phase.failures
    settled = [each for each in book.unreported if each.local_rank == event.local_rank]
    if not settled:
        return state, ()
    unreported = tuple(each for each in book.unreported if each not in settled)
    book = replace(book, unreported=unreported, reported=book.reported | {event.local_rank})
    reports = tuple(ReportFailed(round=phase.round, failure=failure) for failure in settled)
    return replace(state, phase=replace(phase, failures=book)), reports


def on_idle_changed(state: NodeState, event: WorkersIdle | WorkersActive) -> Decision:
    """Report idleness: rendezvous decides whether the whole job hangs."""
    phase = expect(state.phase, Running)
    if isinstance(event, WorkersActive):
        return state, (ReportIdle(round=phase.round),)
    if not phase.alive or (phase.drain is not None and phase.drain.is_wait):
        return state, ()
    alive = tuple(sorted(phase.alive))
    idle = ReportIdle(round=phase.round, local_ranks=alive, reason=event.reason, is_urgent=event.is_urgent)
    return state, (idle,)


def on_still(state: NodeState, event: StoodStill) -> Decision:
    """Report that the workers stand still, because only rendezvous knows what those of other nodes do."""
    phase = expect(state.phase, Running)
    if event.for_s > 0.0 and phase.drain is not None:
        return state, ()
    return state, (Send(message=event),)


def _add_failure(book: FailureBook, failure: LocalFailure) -> FailureBook:
    """Add a failure to report once: by `ReportFailed`, or by `ReportStopped` if the round's workers end first."""
    known = book.reported | {each.local_rank for each in book.unreported}
    return book if failure.local_rank in known else replace(book, unreported=(*book.unreported, failure))


# -- stopping --------------------------------------------------------------------------------------------------------


def begin_stop(
    state: NodeState,
    phase: Running | Succeeded,
    *,
    then: Rejoin | StartNext | Finish,
    kill: bool = False,
    stacks: CollectStacks | None = None,
    signum: int = signal.SIGTERM,
) -> Decision:
    """Stop the workers: at once with `kill`, otherwise with a grace period. Collect `stacks` first if wanted."""
    if isinstance(phase, Succeeded):
        phase = Running(round=phase.round, awaited=frozenset())
    number = phase.round.number
    step, alive, failures = StopStep.STACKS, phase.alive, phase.failures
    stopping = Stopping(
        round=phase.round,
        step=step,
        signum=signum,
        alive=alive,
        failures=failures,
        then=then,
        can_leave=phase.can_leave,
    )
    cancel = (CancelStarts(),) if phase.awaited else ()
    if stacks is not None and alive and not kill:
        limit = RoundTimer(purpose=TimerPurpose.STACKS, round_number=number)
        leaves = isinstance(then, Finish)
        timer = StartTimer(timer=limit, delay_s=_PAGE_LIMIT_S if leaves else STACKS_LIMIT_S)
        awaited = () if leaves else _report_awaited(phase.round, alive, stacks)
        return replace(state, phase=stopping), (*cancel, *awaited, timer, stacks)
    if kill and isinstance(then, StartNext) and find_leavers(stopping):  # the leader was lost, not this node
        state, actions = _signal_workers(state, replace(stopping, signum=signal.SIGKILL))
    else:
        state, actions = kill_now(state, stopping) if kill else end_stacks_wait(state, stopping)
    return state, (*cancel, *actions)


def find_leavers(phase: Stopping) -> frozenset[int]:
    """Return the workers that can leave the round, and have not: none if no round follows."""
    return frozenset() if isinstance(phase.then, Finish) else phase.can_leave & phase.alive


def _report_awaited(current: Round, alive: frozenset[int], stacks: CollectStacks) -> tuple[Action, ...]:
    """Report busy workers in a hang: those of other nodes may wait for them, so the report needs them.

    They have no reason of their own: the leader knows why the job counts as hung.
    """
    if not stacks.is_hang or current.group_world_size == 1:
        return ()
    return (ReportIdle(round=current, local_ranks=tuple(sorted(alive))),)


def _signal_workers(state: NodeState, phase: Stopping) -> Decision:
    leavers = find_leavers(phase)
    state = replace(state, phase=replace(phase, step=StopStep.GRACE))
    if not leavers:
        return state, _end_politely(state, phase)
    limit = RoundTimer(purpose=TimerPurpose.LEAVE, round_number=phase.round.number)
    leave = (LeaveRound(local_ranks=leavers), StartTimer(timer=limit, delay_s=LEAVE_LIMIT_S))
    others = phase.alive - leavers
    return state, (*leave, *_end_politely(state, phase, others)) if others else leave


def _end_politely(state: NodeState, phase: Stopping, local_ranks: frozenset[int] | None = None) -> tuple[Action, ...]:
    grace = RoundTimer(purpose=TimerPurpose.GRACE, round_number=phase.round.number)
    slow = RoundTimer(purpose=TimerPurpose.SLOW, round_number=phase.round.number)
    limit_s = state.rules.shutdown_timeout_s
    tells = (StartTimer(timer=slow, delay_s=SLOW_STOP_S),) if limit_s > SLOW_STOP_S else ()
    signalled = SignalWorkers(signum=phase.signum, local_ranks=local_ranks)
    return signalled, StartTimer(timer=grace, delay_s=limit_s), *tells


def on_slow_stop(state: NodeState) -> Decision:
    """Print what the silence is about. A stop that the workers obey is over before."""
    phase = state.phase
    if not isinstance(phase, Stopping) or phase.step is not StopStep.GRACE:
        return state, ()
    from muster._shared.reports import name_ranks

    ranks = name_ranks(phase.round.rank_offset + local_rank for local_rank in phase.alive)
    text = f"{ranks} did not end within {SLOW_STOP_S:g} s of {name_signal(phase.signum)}; "
    return state, (PrintLine(text=f"{text}SIGKILL in {state.rules.shutdown_timeout_s - SLOW_STOP_S:g} s"),)


def kill_now(state: NodeState, phase: Stopping) -> Decision:
    """Kill the remaining workers, once."""
    if phase.step is StopStep.KILLING:
        return replace(state, phase=phase), ()
    leave = () if phase.leave is None else (Send(message=phase.leave),)
    phase = replace(phase, step=StopStep.KILLING, leave=None)
    keeps = not isinstance(phase.then, Finish)
    return replace(state, phase=phase), (*leave, KillWorkers(round_number=phase.round.number, keeps=keeps))


def end_stacks_wait(state: NodeState, phase: Stopping) -> Decision:
    """Send the stop signal if it waits for stacks."""
    if phase.step is not StopStep.STACKS:
        return replace(state, phase=phase), ()
    if not phase.alive:
        return kill_now(state, phase)
    leave = () if phase.leave is None else (Send(message=phase.leave),)
    state, actions = _signal_workers(state, replace(phase, leave=None))
    return state, (*leave, *actions)


def continue_stop(state: NodeState, phase: Stopping) -> Decision:
    """Continue a stop. Once no worker is left, the processes that they left behind get no grace period."""
    if phase.alive or phase.step is not StopStep.GRACE:
        return replace(state, phase=phase), ()
    return kill_now(state, phase)


def on_stacks_requested(state: NodeState, _event: StacksRequested) -> Decision:
    """Collect the stacks of the workers of all nodes, or of this node's if the leader cannot be asked."""
    phase = state.running_or_stopping
    if isinstance(phase, Running) and phase.round.group_world_size > 1:
        number = phase.round.number
        asked = Asked(round_number=number, request=OWN_REQUEST, kind=AskKind.STACKS, limit_s=STACKS_LIMIT_S)
        return replace(state, requests=state.requests | {OWN_REQUEST}), (Send(message=asked),)
    return state, (PrintStacks(round=phase.round),)


def on_stacks_collected(state: NodeState, event: StacksCollected) -> Decision:
    """Keep the stacks for the report, or print them if this node leaves. Continue the stop that waits for them."""
    phase = state.running_or_stopping
    if isinstance(phase, Running):
        return state, (PrintPage(round=phase.round, stacks=event.stacks),)
    is_awaited = isinstance(phase.then, Finish) and phase.step is StopStep.STACKS
    page = (PrintPage(round=phase.round, stacks=event.stacks),) if is_awaited else ()
    state, actions = end_stacks_wait(state, replace(phase, stacks=event.stacks))
    return state, (*page, *actions)
