"""What one node does about each event: a pure function from state and event to new state and actions.

Nothing here reads a clock, a process or a socket, and nothing outside decides. `supervisor` posts the events of
`node.events`, and rendezvous those of `rendezvous.interface`. `supervisor` carries out the actions in order.

    Starting --AgentStarted--> Joining
    Starting, Joining --RoundFormed--> Delaying, Running
    Starting, Delaying --JobEnded, RendezvousFailed, SignalReceived--> Ended
    Joining --RoundBroken, JobEnded, RendezvousFailed, SignalReceived--> Ended
    Delaying --RoundFormed, GlobalRank0Started, TimerExpired--> Running
    Delaying --RoundBroken--> Joining, Ended
    Running --RoundFormed, RoundBroken, JobEnded, RendezvousFailed, TimerExpired, SignalReceived, DrainWithdrawn,
        RequestAnswered, PersonChose--> Stopping
    Running --WorkerExited--> Succeeded, Stopping
    Succeeded --RoundFormed, RoundBroken, JobEnded, RendezvousFailed, TimerExpired, SignalReceived, RequestAnswered,
        PersonChose--> Stopping
    Stopping --WorkersGone--> Joining, Delaying, Running, Ended
    Stopping --WorkersNotEnded--> Ended

`worker_decisions` has the decisions about one round's workers, and the steps of a stop. `drain_decisions` has those
about a common step of all ranks, and `request_decisions` those about requests of people. The latter two are loaded when
needed.
"""

import signal

from muster._shared.contract import ExitCode, name_signal
from muster._shared.records import assert_never, replace
from muster._shared.transitions import Table, drop, expect, go, on, stay
from muster.agent.node.actions import (
    Action,
    BeginRound,
    CollectStacks,
    EndQuestion,
    Finish,
    InterruptWorker,
    JoinJob,
    KeepCheckpoint,
    LocalFailure,
    ParkWorkers,
    PrintLine,
    RecordJobFailure,
    ReportStopped,
    Send,
    StartTimer,
    StartWorkers,
    TellPart,
)
from muster.agent.node.events import (
    AgentStarted,
    Event,
    FailureSettled,
    PersonChose,
    Requested,
    RoundTimer,
    SignalReceived,
    SlotsRead,
    SpawnFailed,
    StacksCollected,
    StacksRequested,
    StoreLost,
    TimerExpired,
    TimerPurpose,
    WorkerExited,
    WorkerLeft,
    WorkersActive,
    WorkersCanLeave,
    WorkersEvent,
    WorkersGone,
    WorkersIdle,
    WorkersNotEnded,
    WorkersPrepared,
    WorkerStarted,
)
from muster.agent.node.state import (
    Delaying,
    Ended,
    Joining,
    NodeState,
    Rejoin,
    Running,
    Starting,
    StartNext,
    Stopping,
    StopStep,
    Succeeded,
)
from muster.agent.node.worker_decisions import (
    Decision,
    RequestDecision,
    begin_stop,
    end_leave_wait,
    end_stacks_wait,
    fail_round,
    find_leavers,
    kill_now,
    on_can_leave,
    on_failure_settled,
    on_idle_changed,
    on_slow_stop,
    on_spawn_failed,
    on_stacks_collected,
    on_stacks_requested,
    on_still,
    on_store_lost,
    on_worker_exited,
    on_worker_left,
    on_worker_started,
)
from muster.agent.rendezvous.interface import (
    BreakKind,
    CheckpointCompleted,
    DrainBegun,
    DrainCommitted,
    DrainWithdrawn,
    GlobalRank0Started,
    JobEnded,
    Leaving,
    Notice,
    NoticeKind,
    PartOrder,
    PartRemembered,
    PartReport,
    Prepared,
    RendezvousFailed,
    RequestAnswered,
    RoundBroken,
    RoundFormed,
    Saved,
    StacksWanted,
    StoodStill,
)
from muster.agent.round import Round
from muster.agent.runtime.limits import STILL_PAGE_S

HELD_LINES_S = 0.5
"""How long after another node's end this node may be stopped too, if both are stopped together."""

CAUSE_LIMIT_S = 1.0
"""How long the line about a break waits for its cause, if the known one may be a consequence."""


HOLD_S = 5.0
"""The longest that workers wait for global rank 0, whose node may have more to import; a program may need no process
group."""


_WAITING = (Starting, Joining, Delaying)
_WORKING = (Running, Succeeded)
_ALL = stay(*_WAITING, *_WORKING, Stopping)
_END = go(*_WAITING, to=(Ended,))
_STOP = go(*_WORKING, Stopping, to=(Stopping,))
_MAY_STOP = stay(*_WORKING, or_go=(Stopping,))


def _build_table() -> "Table[Event, Decision]":
    """Return which phase accepts which event, what handles it, and which phases may follow.

    `Saved` is reported even while the workers are being stopped: a checkpoint of the last moment counts. `DrainBegun`
    is refused before the workers have been started, and `Requested` while none run, each with a line.
    `_on_timer_expired` says which phase a timer is for, by its purpose.
    """
    return (
        on(AgentStarted, _on_agent_started, go(Starting, to=(Joining,)))
        + on(WorkersPrepared, _on_workers_prepared, _ALL)
        + on(RoundFormed, _on_round_changed, go(*_WAITING, to=(Delaying, Running)), _STOP)
        + on(GlobalRank0Started, _on_global_rank0_started, _ALL, stay(Delaying, or_go=(Running,)))
        + on(RoundBroken, _on_round_changed, _ALL, go(Joining, Delaying, to=(Joining, Ended)), _MAY_STOP)
        + on(JobEnded, _on_job_ended, _END, _STOP)
        + on(RendezvousFailed, _on_rendezvous_failed, _END, _STOP)
        + on(Notice, _on_notice, _ALL)
        + on(WorkerStarted, on_worker_started, stay(Running, Stopping))
        + on(WorkerExited, _on_worker_exited, stay(Running, or_go=(Succeeded, Stopping)), stay(Stopping))
        + on(WorkersCanLeave, on_can_leave, stay(Running))
        + on(WorkerLeft, on_worker_left, stay(Stopping))
        + on(SpawnFailed, on_spawn_failed, stay(Running))
        + on(StoreLost, on_store_lost, stay(Delaying, Running, Stopping))
        + on(FailureSettled, on_failure_settled, stay(Running, Stopping))
        + on(WorkersIdle, on_idle_changed, stay(Running))
        + on(WorkersActive, on_idle_changed, stay(Running))
        + on(StoodStill, on_still, stay(Running))
        + on(StacksRequested, on_stacks_requested, stay(Running, Stopping))
        + on(StacksCollected, on_stacks_collected, stay(Running, Stopping))
        + on(TimerExpired, _on_timer_expired, _ALL, stay(Delaying, or_go=(Running,)), _MAY_STOP)
        + on(WorkersGone, _on_workers_gone, stay(Stopping, or_go=(Joining, Delaying, Running, Ended)))
        + on(WorkersNotEnded, _on_workers_not_ended, stay(Stopping, or_go=(Ended,)))
        + on(SignalReceived, _on_signal, _END, _MAY_STOP, stay(Stopping))
        + on(DrainBegun, _on_drain, stay(Delaying, *_WORKING, Stopping))
        + on(DrainCommitted, _on_drain, stay(*_WORKING))
        + on(DrainWithdrawn, _on_drain, stay(Running, or_go=(Stopping,)), stay(Succeeded))
        + on(SlotsRead, _on_drain, stay(*_WORKING))
        + on(Requested, _on_request, _ALL)
        + on(RequestAnswered, _on_request, _ALL, _MAY_STOP)
        + on(PersonChose, _on_request, _ALL, _MAY_STOP)
        + on(StacksWanted, _on_request, stay(Delaying, *_WORKING, Stopping))
        + on(Saved, _send_on, stay(*_WORKING, Stopping))
        + on(PartReport, _send_on, stay(*_WORKING))
        + on(PartOrder, _tell_part, _ALL)
        + on(PartRemembered, _tell_part, _ALL)
        + on(CheckpointCompleted, _keep_checkpoint, _ALL)
    )


def decide(state: NodeState, event: Event) -> Decision:
    """Decide what follows from one event, if this phase accepts it and it is about this round."""
    handler = TABLE.find(type(state.phase), event)
    if handler is None or _is_outdated(state, event):
        return drop(state, type(state.phase), event)
    return handler(state, event)


def _is_outdated(state: NodeState, event: Event) -> bool:
    """Return whether an event is about another round than this node's.

    While the workers of a round are being stopped, the next round may have formed, and may be broken or drained.
    """
    current = -1 if state.round is None else state.round.number
    match event:
        case RoundFormed():
            return event.round.number <= current
        case RoundBroken(explains=False):
            return event.round_number != current and state.find_round(event.round_number) is None
        case DrainBegun() | StacksWanted():
            return state.find_round(event.round_number) is None
        case TimerExpired():
            return event.timer.purpose is not TimerPurpose.LINES and event.timer.round_number != current
        case _:
            return isinstance(event, WorkersEvent | RoundBroken) and event.round_number != current


def _on_agent_started(state: NodeState, _event: AgentStarted) -> Decision:
    return replace(state, phase=Joining()), (JoinJob(is_prepared=state.is_prepared),)


def _on_workers_prepared(state: NodeState, _event: WorkersPrepared) -> Decision:
    has_joined = not isinstance(state.phase, Starting)
    return replace(state, is_prepared=True), (Send(message=Prepared()),) if has_joined else ()


def _send_on(state: NodeState, event: Saved | PartReport) -> Decision:
    return state, (Send(message=event),)


def _tell_part(state: NodeState, event: PartOrder | PartRemembered) -> Decision:
    return state, (TellPart(message=event),)


def _keep_checkpoint(state: NodeState, event: CheckpointCompleted) -> Decision:
    return state, (KeepCheckpoint(checkpoint=event.checkpoint),)


def _on_round_changed(state: NodeState, event: RoundFormed | RoundBroken) -> Decision:
    """Handle a change of the round; first answer all requests that concern the last one."""
    match event:
        case RoundBroken(explains=True):
            return _on_break_explained(state, event)
        case RoundBroken():
            state, answers = _end_requests(state, f"the round ended: {event.reason}")
            state, question, interrupt = _end_round_of_question(state)
            state, actions = _on_round_broken(state, event)
        case RoundFormed():
            state, lines = _print_held(state)
            state, answers = _end_requests(state, "the leader was lost")
            state, question, interrupt = _end_round_of_question(state)
            state, actions = _enter_round(state, event)
            answers = (*lines, *answers)
        case _:
            assert_never(event)
    state, stop = (state, ()) if interrupt is None else _stop_on_signal(state, interrupt)
    return state, (*answers, *question, *actions, *stop)


# -- rounds ----------------------------------------------------------------------------------------------------------


def _enter_round(state: NodeState, event: RoundFormed) -> Decision:
    phase, new = state.phase, event.round
    if isinstance(phase, Running | Succeeded):
        if state.preemption is not None:
            return _leave_drained(state, phase, kill=True)
        # After a change of leader, end the old round and start without a request.
        return begin_stop(state, phase, kill=True, then=StartNext(round=new, is_held=event.is_held))
    if not isinstance(phase, Stopping):
        return _begin_round(state, new, is_held=event.is_held)
    then = phase.then
    if isinstance(then, Finish) or new.number <= then.round.number:
        return state, ()
    return replace(state, phase=replace(phase, then=StartNext(round=new, is_held=event.is_held))), ()


def _begin_round(state: NodeState, new: Round, *, is_held: bool) -> Decision:
    """Start the workers, or first wait for global rank 0, whose node backs off for all, or for this node's back-off.

    If an agent hosts the store, the store listens already, and only a back-off is awaited.
    """
    delay_s = state.rules.find_longest_backoff_s(new.repeats)
    is_held = is_held and state.rank0_started < new.number and (delay_s > 0.0 or not new.use_agent_store)
    actions: tuple[Action, ...] = (BeginRound(round=new),)
    if state.rules.omp_num_threads is not None and new.group_rank == 0 and state.phase == Joining():
        actions = (*actions, PrintLine(text=_describe_threads(state.rules.omp_num_threads)))
    if state.rules.loss and new.number == 1 and new.group_rank == 0 and new.checkpoint is None:
        actions = (*actions, PrintLine(text=state.rules.loss))  # of a later round the others knew all
    if new.checkpoint is not None and new.group_rank == 0:
        actions = (*actions, PrintLine(text=f"the last checkpoint of all ranks: {new.checkpoint.describe()}"))
    if new.continued_step is not None and new.group_rank == 0:
        actions = (*actions, PrintLine(text=f"all ranks continue at step {new.continued_step} from memory"))
    if is_held:
        delay_s += HOLD_S
    elif delay_s > 0.0:
        delay_s *= state.rules.backoff_share
        line = f"waiting {delay_s:.1f} s before attempt {new.attempt} (--restart-backoff)"
        actions = (*actions, PrintLine(text=line))
    else:
        return _start_workers(state, new, actions)
    timer = RoundTimer(purpose=TimerPurpose.START, round_number=new.number)
    state = replace(state, phase=Delaying(round=new, is_held=is_held))
    return state, (*actions, StartTimer(timer=timer, delay_s=delay_s))


def _describe_threads(count: int) -> str:
    """Describe the threads of a worker. torchrun sets 1, and warns about it."""
    return f"OMP_NUM_THREADS is not set: each worker gets {count} (a node's usable cores / its workers)"


def _start_workers(
    state: NodeState, new: Round, before: tuple[Action, ...] = (), problem: LocalFailure | None = None
) -> Decision:
    """Start the workers; a lost store is the round's failure at once.

    Args:
        state: the node's.
        new: their round.
        before: actions that come first.
        problem: why the round's store is lost. Without it the workers would only wait.
    """
    running = Running(round=new, awaited=frozenset(range(state.rules.nproc)))
    if problem is None:
        return replace(state, phase=running), (*before, StartWorkers(round=new))
    state, actions = fail_round(state, running, problem)
    return state, (*before, *actions)


def _end_delay(state: NodeState, phase: Delaying) -> Decision:
    return _start_workers(state, phase.round, problem=phase.store_problem)


def _on_global_rank0_started(state: NodeState, event: GlobalRank0Started) -> Decision:
    phase = state.phase
    state = replace(state, rank0_started=max(state.rank0_started, event.round_number))
    if isinstance(phase, Delaying) and phase.is_held and phase.round.number == event.round_number:
        return _end_delay(state, phase)
    return state, ()


def _on_round_broken(state: NodeState, event: RoundBroken) -> Decision:
    phase = state.phase
    if (
        isinstance(phase, Stopping)
        and isinstance(phase.then, StartNext)
        and phase.then.round.number == event.round_number
    ):
        # The round formed during the stop breaks before its start.
        state = replace(state, phase=replace(phase, then=Rejoin(round=phase.then.round)))
        actions: tuple[Action, ...] = ()
    elif state.round is not None:
        state, actions = _break_round(state, event, state.round)
    else:
        return state, ()
    state, told = _tell_break(state, event)
    kinds = (BreakKind.FAILURE, BreakKind.MEMBERSHIP, BreakKind.DRAINED)
    is_followed = event.kind in kinds and not _is_leaving(state)
    # Forked while the old ones stop.
    count = state.rules.nproc - (len(find_leavers(state.phase)) if isinstance(state.phase, Stopping) else 0)
    park: tuple[Action, ...] = (ParkWorkers(count=count),) if is_followed else ()
    return state, (*told, *park, *actions)


def _tell_break(state: NodeState, event: RoundBroken) -> Decision:
    """Print why the round was broken. Hold the line back if that may be a consequence of something unknown yet."""
    line = None if _is_leaving(state) or state.round is None else _describe_break(state, event, state.round)
    state = replace(state, break_line=line or "")
    if event.is_provisional:  # without a line, the record waits
        return _hold_lines(state, () if line is None else (line,), CAUSE_LIMIT_S)
    if line is None:
        return state, ()
    return _tell(state, line, may_hold=event.kind in (BreakKind.MEMBERSHIP, BreakKind.FENCED))


def _on_break_explained(state: NodeState, event: RoundBroken) -> Decision:
    """Handle that all failures of the round are known, which replace a line that is held back."""
    known, is_held = state.break_line, state.break_line in state.held_lines
    state = replace(state, held_lines=tuple(line for line in state.held_lines if line != known))
    state, told = _tell_break(state, event)
    return (state, told) if is_held or state.break_line != known else (state, ())


def _break_round(state: NodeState, event: RoundBroken, broken: Round) -> Decision:
    phase = state.phase
    if event.leaves and event.kind is BreakKind.FAILURE:
        return _leave_at_fault(state, event)
    if isinstance(phase, Running | Succeeded):
        is_fenced = event.kind is BreakKind.FENCED
        if state.preemption is not None or _is_over(state, phase, event):
            return _leave_drained(state, phase, kill=is_fenced)
        stacks = CollectStacks(round=phase.round, is_hang=event.is_hang) if event.want_stacks else None
        # With one Ctrl-C for all nodes, workers get the same signal even if the break comes first.
        signum = signal.SIGINT if event.is_interrupt and state.rules.stops_together else signal.SIGTERM
        return begin_stop(state, phase, kill=is_fenced, stacks=stacks, then=Rejoin(round=broken), signum=signum)
    if isinstance(phase, Stopping):
        # A leader that is stopped keeps leading until no workers are left (`supervisor`). So this one was lost, and
        # other nodes may continue without this node.
        return kill_now(state, phase) if event.kind is BreakKind.FENCED else (state, ())
    return _report_stopped(state, broken)  # no workers to stop


def _is_leaving(state: NodeState) -> bool:
    """Return whether a signal, or the job's end, ends this node."""
    return isinstance(state.phase, Stopping) and isinstance(state.phase.then, Finish)


def _describe_break(state: NodeState, event: RoundBroken, broken: Round) -> str | None:
    """Return the line about the break; None if this node prints none."""
    match event.kind:
        case BreakKind.FINAL:  # in the report
            return None
        case BreakKind.FAILURE:  # the same words on all nodes
            number, allowed = broken.attempt + 1, broken.attempt + broken.restarts_left
            rest = "(free)" if event.is_free else f"of {allowed}"
            return None if broken.group_rank > 0 else f"{event.reason}; restart {number} {rest}"
        case BreakKind.MEMBERSHIP | BreakKind.DRAINED:
            return event.reason if event.is_leader or not state.rules.stops_together else None
        case BreakKind.FENCED:
            return event.reason if state.rules.prints_leader_loss else None
        case _:
            assert_never(event.kind)


# -- lines -----------------------------------------------------------------------------------------------------------


def _on_notice(state: NodeState, event: Notice) -> Decision:
    # They explain nothing to the user who stopped this node.
    if _is_leaving(state) or (event.is_leader_lost and not state.rules.prints_leader_loss):
        return state, ()
    if state.interrupt is not None:
        state = replace(state, interrupt=replace(state.interrupt, notice=event.text))
    state, advice = _advise(state, event.kind)
    return _tell(state, "; ".join((event.text, *advice)), may_hold=event.is_leader_lost)


def _advise(state: NodeState, kind: NoticeKind) -> tuple[NodeState, tuple[str, ...]]:
    """Return what a person can do about a job that stands still, or hangs: once for all lines about one hang."""
    rules, number = state.rules, 0 if state.round is None else state.round.number
    to_end = (f"to end the job: {rules.stop_command}",) if rules.stop_command else ()
    match kind:
        case NoticeKind.STILL if rules.stacks_command:
            return state, (f"all stacks: {rules.stacks_command}", *to_end)
        case NoticeKind.HANG:  # its page has all stacks
            return replace(state, hanging_round=number), () if state.hanging_round == number else to_end
        case NoticeKind.HANG_OVER:
            return replace(state, hanging_round=None), ()
        case _:
            return state, ()


def _tell(state: NodeState, line: str, *, may_hold: bool) -> Decision:
    """Print the line, or hold it back until it is clear whether the whole job is being stopped."""
    if not (may_hold and state.rules.stops_together):
        return state, (PrintLine(text=line),)
    return _hold_lines(state, (line,), HELD_LINES_S)


def _hold_lines(state: NodeState, lines: tuple[str, ...], for_s: float) -> Decision:
    timer = RoundTimer(purpose=TimerPurpose.LINES, round_number=state.round.number if state.round else 0)
    held = (*state.held_lines, *lines)
    return replace(state, held_lines=held), (StartTimer(timer=timer, delay_s=for_s),)


def _print_held(state: NodeState) -> Decision:
    lines = tuple(PrintLine(text=line) for line in state.held_lines)
    return (replace(state, held_lines=()), lines) if lines else (state, ())


# -- after a round ---------------------------------------------------------------------------------------------------


def _report_stopped(state: NodeState, stopped: Round) -> Decision:
    return replace(state, phase=Joining(last=stopped)), (ReportStopped(round=stopped, stacks={}),)


def _on_job_ended(state: NodeState, event: JobEnded) -> Decision:
    failed_code = ExitCode.TERMINATED if event.is_drained else ExitCode.WORKERS_FAILED
    code = ExitCode.SUCCEEDED if event.succeeded else failed_code
    state, answers = _end_requests(state, "the job has ended")
    state, lines = _print_held(state)
    state, actions = _end_with(state, Finish(code=code, ended=event))
    failed = () if event.succeeded else (RecordJobFailure(),)
    return state, (*answers, *failed, *lines, *actions)


def _on_worker_exited(state: NodeState, event: WorkerExited) -> Decision:
    """Handle a worker's end. If the guard killed it, the round and any question end for this node."""
    state, actions = on_worker_exited(state, event)
    if isinstance(state.phase, Running | Succeeded):
        return state, actions
    state, question, interrupt = _end_round_of_question(state)
    state, stop = (state, ()) if interrupt is None else _stop_on_signal(state, interrupt)
    return state, (*actions, *question, *stop)


def _on_rendezvous_failed(state: NodeState, event: RendezvousFailed) -> Decision:
    code = ExitCode.USAGE if event.usage else ExitCode.RENDEZVOUS
    state, lines = _print_held(state)
    state, actions = _end_with(state, Finish(code=code, rendezvous_failed=event))
    return state, (*lines, *actions)


def _end_requests(state: NodeState, line: str) -> Decision:
    """End requests that no leader answers any more."""
    if not state.requests:
        return state, ()
    from muster.agent.node.request_decisions import end_requests

    return end_requests(state, line)


def _on_request(state: NodeState, event: Requested | RequestAnswered | StacksWanted | PersonChose) -> Decision:
    from muster.agent.node.request_decisions import decide_request

    state, actions, interrupt = decide_request(state, event)
    state, stop = (state, ()) if interrupt is None else _stop_on_signal(state, interrupt)
    return state, (*actions, *stop)


def _end_with(state: NodeState, finish: Finish) -> Decision:
    state, question = _close_question(state)
    state, actions = _end_workers_with(state, finish)
    return state, (*question, *actions)


def _end_workers_with(state: NodeState, finish: Finish) -> Decision:
    phase = state.phase
    if isinstance(phase, Running | Succeeded):
        return begin_stop(state, phase, kill=True, then=finish)
    if not isinstance(phase, Stopping):
        return _end(state, finish)
    if isinstance(phase.then, Finish):  # keep an earlier signal's exit code, but report the end
        finish = replace(finish, code=phase.then.code)
    return kill_now(state, replace(phase, then=finish))


def _end(state: NodeState, finish: Finish) -> Decision:
    return replace(state, phase=Ended(last=state.round)), (finish,)


def _on_timer_expired(state: NodeState, event: TimerExpired) -> Decision:
    phase, timer = state.phase, event.timer
    match timer.purpose:
        case TimerPurpose.LINES:
            return _print_held(state)
        case TimerPurpose.START:
            return _end_delay(state, phase) if isinstance(phase, Delaying) else (state, ())
        case TimerPurpose.STACKS:
            return end_stacks_wait(state, phase) if isinstance(phase, Stopping) else (state, ())
        case TimerPurpose.LEAVE:
            return end_leave_wait(state, phase) if isinstance(phase, Stopping) else (state, ())
        case TimerPurpose.GRACE:
            return kill_now(state, phase) if isinstance(phase, Stopping) else (state, ())
        case TimerPurpose.TOLD:
            return _end_drain_grace(state)
        case TimerPurpose.SLOW:
            return on_slow_stop(state)
        case TimerPurpose.LOOK | TimerPurpose.DRAIN:
            return _on_drain(state, timer)
        case _:
            assert_never(timer.purpose)


# -- after a stop ----------------------------------------------------------------------------------------------------


def _on_workers_gone(state: NodeState, _event: WorkersGone) -> Decision:
    phase = expect(state.phase, Stopping)
    if phase.step is not StopStep.KILLING:
        return state, ()
    then = phase.then
    match then:
        case Finish():
            return _end(state, then)
        case StartNext():
            return _begin_round(state, then.round, is_held=then.is_held)
        case Rejoin():
            if then.round.number != phase.round.number:  # of the round before
                return _report_stopped(state, then.round)
            report = ReportStopped(round=phase.round, late=phase.failures.unreported, stacks=phase.stacks)
            return replace(state, phase=Joining(last=phase.round)), (report,)
        case _:
            assert_never(then)


def _on_workers_not_ended(state: NodeState, event: WorkersNotEnded) -> Decision:
    """Leave behind workers that the kernel cannot end, and leave the job: they would block the other nodes for ever.

    The exit code makes adapters replace the node; 1 would end the job for all.
    """
    phase = expect(state.phase, Stopping)
    if phase.step is not StopStep.KILLING:
        return state, ()
    reason = f"cannot end {'process' if len(event.pids) == 1 else 'processes'} {', '.join(map(str, event.pids))}"
    them = "it" if len(event.pids) == 1 else "them"
    line = PrintLine(text=f"{reason}, killed but in an uninterruptible sleep: this node leaves the job without {them}")
    if isinstance(phase.then, Finish):
        state, actions = _end(state, replace(phase.then, code=phase.then.code or ExitCode.WORKERS_FAILED))
        return state, (line, *actions)
    state, actions = _end(state, Finish(code=ExitCode.RENDEZVOUS))
    return state, (line, Send(message=Leaving(reason=reason)), *actions)


def _on_signal(state: NodeState, event: SignalReceived) -> Decision:
    """Decide what a signal does.

    The first Ctrl-C at the terminal may ask. While a worker has the terminal, Ctrl-C is for it.
    """
    is_ctrl_c = event.signum == signal.SIGINT and not event.guard_died and not event.quit_reason
    is_running = isinstance(state.phase, Running)
    if is_ctrl_c and is_running and event.foreground is not None:
        return state, (InterruptWorker(local_rank=event.foreground),)
    if not is_ctrl_c or not state.rules.asks_at_interrupt:
        return _stop_on_signal(state, event)
    if state.interrupt is not None:
        state, actions = _stop_on_signal(state, event)
        state, kill = _stop_on_signal(state, event)  # second signal
        return state, (*actions, *kill)
    if not is_running or not event.is_at_terminal:
        return _stop_on_signal(state, event)
    from muster.agent.node.request_decisions import begin_question

    return begin_question(state, event)


def _close_question(state: NodeState) -> Decision:
    return (state, ()) if state.interrupt is None else (replace(state, interrupt=None), (EndQuestion(),))


def _end_round_of_question(state: NodeState) -> RequestDecision:
    if state.interrupt is None:
        return state, (), None
    from muster.agent.node.request_decisions import end_round_of_question

    return end_round_of_question(state, state.interrupt)


def _stop_on_signal(state: NodeState, event: SignalReceived) -> Decision:
    """Send the first signal on to the workers. A second Ctrl-C kills them; other repetitions change nothing."""
    state, question = _close_question(state)
    state, actions = _leave_on_signal(state, event)
    return state, (*question, *actions)


def _leave_on_signal(state: NodeState, event: SignalReceived) -> Decision:
    phase = state.phase
    if isinstance(phase, Stopping) and isinstance(phase.then, Finish):
        if event.signum != signal.SIGINT and not event.guard_died:
            return state, ()
        return kill_now(state, replace(phase, then=replace(phase.then, at_once=True)))
    may_drain = event.is_asked if isinstance(phase, Running) else isinstance(phase, Succeeded) and phase.has_drain_step
    if may_drain and isinstance(phase, Running | Succeeded) and event.signum in state.rules.preempt_signals:
        from muster.agent.node.drain_decisions import on_preemption

        if (decided := on_preemption(state, phase, event)) is not None:
            return decided
    is_preemption = event.signum in state.rules.preempt_signals
    code = ExitCode.TERMINATED if is_preemption else ExitCode.of_signal(event.signum)
    finish = Finish(code=code, at_once=event.guard_died)
    if isinstance(phase, Running | Succeeded):
        # A user who stops a stalled job wants to see what its workers do.
        page = CollectStacks(round=phase.round, is_hang=True) if event.still_s >= STILL_PAGE_S else None
        state, actions = begin_stop(state, phase, signum=event.signum, kill=event.guard_died, stacks=page, then=finish)
    elif isinstance(phase, Stopping):
        # The sender's grace period has begun: stop waiting for stacks.
        phase = replace(phase, signum=event.signum, then=finish)
        state, actions = kill_now(state, phase) if event.guard_died else end_stacks_wait(state, phase)
    else:
        state, actions = _end(state, finish)
    reason = "its launched muster-agent process was killed" if event.guard_died else _name_cause(event.signum)
    is_told = event.guard_died or state.rules.prints_stop
    told = (PrintLine(text=_describe_stop(state, event)),) if is_told else ()
    leave = Leaving(
        reason=event.quit_reason or reason,
        ends_job=bool(event.quit_reason),
        is_interrupt=event.signum == signal.SIGINT,
        is_planned=not event.guard_died,
    )
    state = replace(state, held_lines=())
    if isinstance(state.phase, Stopping) and state.phase.step is StopStep.STACKS:
        return replace(state, phase=replace(state.phase, leave=leave)), (*told, *actions)
    return state, (*told, Send(message=leave), *actions)


def _on_drain(
    state: NodeState, event: DrainBegun | DrainCommitted | DrainWithdrawn | SlotsRead | RoundTimer
) -> Decision:
    """Decide what follows in a drain. A preempted node leaves if no step was agreed on."""
    from muster.agent.node.drain_decisions import decide_drain

    state, actions, leaves = decide_drain(state, event)
    if not leaves or state.preemption is None or not isinstance(state.phase, Running | Succeeded):
        return state, actions
    line = PrintLine(text=f"stopping, up to {state.rules.shutdown_timeout_s:g} s")
    state, more = _leave_drained(state, state.phase)
    return state, (*actions, line, *more)


def _leave_drained(state: NodeState, phase: Running | Succeeded, *, kill: bool = False) -> Decision:
    """Leave with 143 because this node is preempted, or its ranks were told to stop and the round has ended since."""
    signum = signal.SIGTERM if state.preemption is None else state.preemption.signum
    reason = "its ranks were told to stop" if state.preemption is None else _name_cause(signum)
    state, actions = begin_stop(state, phase, signum=signum, kill=kill, then=Finish(code=ExitCode.TERMINATED))
    return state, (Send(message=Leaving(reason=reason, is_planned=True)), *actions)


def _leave_at_fault(state: NodeState, event: RoundBroken) -> Decision:
    """Leave with an exit code that makes adapters replace the node, so that its failure is kept off the job."""
    failed = RendezvousFailed(reason=f"this node leaves the job: {event.reason}")
    finish = Finish(code=ExitCode.RENDEZVOUS, rendezvous_failed=failed)
    phase, leave = state.phase, Send(message=Leaving(reason="it is at fault"))
    if isinstance(phase, Running | Succeeded):
        state, actions = begin_stop(state, phase, then=finish)
    elif isinstance(phase, Stopping):
        then = phase.then if isinstance(phase.then, Finish) else finish  # an earlier signal
        state, actions = replace(state, phase=replace(phase, then=then)), ()
    else:
        state, actions = _end(state, finish)
    return state, (leave, *actions)


def _is_over(state: NodeState, phase: Running | Succeeded, broken: RoundBroken) -> bool:
    """Return whether a drain ends the job for this node together with the round.

    In an elastic job the others continue without the nodes that asked for the drain. The leader says if too few are
    left.
    """
    if broken.leaves:
        return True
    is_followed = state.rules.is_elastic or broken.kind in (BreakKind.FINAL, BreakKind.DRAINED)
    return phase.has_drain_step and not is_followed


def _end_drain_grace(state: NodeState) -> Decision:
    """End the grace period of ranks that were told a drain's step, because it was too short for them."""
    phase = state.phase
    if not isinstance(phase, Running | Succeeded) or not phase.has_drain_step:
        return state, ()
    if state.rules.is_elastic and state.preemption is None:
        return state, ()  # the preempted node breaks the round
    line = PrintLine(text="the drain's time limit has passed: killing the remaining workers")
    state, actions = begin_stop(state, phase, kill=True, then=Finish(code=ExitCode.TERMINATED))
    return state, (line, *actions)


def _name_cause(signum: int) -> str:
    return "Ctrl-C (SIGINT)" if signum == signal.SIGINT else f"received {name_signal(signum)}"


def _describe_stop(state: NodeState, event: SignalReceived) -> str:
    """Return what happens now, and what the user can do about it."""
    if event.guard_died:
        return "the muster-agent process that was launched on this node was killed: its workers are killed, too"
    cause = "" if event.signum == signal.SIGINT else f"received {name_signal(event.signum)}: "
    senders = state.rules.describe_senders(event.signum)
    if isinstance(state.phase, Ended):
        return f"{cause}stopping{senders}"
    again = "; Ctrl-C again kills" if event.signum == signal.SIGINT else ""
    return f"{cause}stopping, up to {state.rules.shutdown_timeout_s:g} s{again}{senders}"


TABLE = _build_table()
