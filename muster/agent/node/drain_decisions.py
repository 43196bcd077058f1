"""What one node does in a drain. Pure, a part of `decisions`; imported when a drain begins.

    SIGTERM --DrainAsked--> DrainBegun: ReadSlots, WriteCommand(ceiling) --LOOK--> ReadSlots ... DrainReported
        DrainCommitted: WriteCommand(step), the workers save and end, JobEnded(is_drained=True)
        DrainWithdrawn: the workers continue; a preempted node leaves, which stops them on all nodes

`rendezvous.drain_ceiling` has the rule for the ceiling. Two waits have limits. A preempted node leaves if no step was
agreed on in time. Ranks that were told the step get the grace period after that to save and end, and no stop signal,
because they have been told. After a second signal the node leaves at once.

Ranks that save or pause at a step continue afterwards. If a person has asked, this node reports at the end of the limit
which of its ranks are late. For a pause, it also reports when all of them wait.
"""

from typing import TypeAlias

from muster._shared.contract import name_signal
from muster._shared.layouts import StatusPageLayout as Layout
from muster._shared.records import assert_never, replace
from muster.agent.node.actions import (
    Action,
    CollectStacks,
    PrintLine,
    ReadSlots,
    Send,
    StartTimer,
    WithdrawCommand,
    WriteCommand,
    WriteDeadline,
)
from muster.agent.node.events import RoundTimer, SignalReceived, SlotsRead, TimerPurpose
from muster.agent.node.state import (
    NodeDrain,
    NodeState,
    Preemption,
    Running,
    Succeeded,
)
from muster.agent.node.worker_decisions import Decision
from muster.agent.rendezvous.drain_ceiling import (
    LOOK_S,
    Ceiling,
    RankSlot,
    build_ceiling,
    build_report,
    check_ceiling,
    find_refusal,
    list_late,
)
from muster.agent.rendezvous.interface import (
    DrainAsked,
    DrainBegun,
    DrainCommitted,
    DrainDone,
    DrainReport,
    DrainReported,
    DrainWithdrawn,
)
from muster.agent.runtime.limits import STILL_PAGE_S

DrainDecision: TypeAlias = tuple[NodeState, tuple[Action, ...], bool]
"""As `Decision`, and whether a preempted node leaves now."""

REPEAT_S = 1.0
"""A signal within this time of the first is the same one, because some senders reach both the guard and the agent."""

STRIDE_LOOK_S = 0.02
"""Time between two looks at a rank that has asked once. Its stride is known when it asks again."""


def on_preemption(state: NodeState, phase: Running | Succeeded, event: SignalReceived) -> Decision | None:
    """Ask for a drain, even during another one, so that the leader knows which node leaves. None: leave now."""
    known = state.preemption
    if known is not None:
        return (state, ()) if event.at_s < known.at_s + REPEAT_S else None
    limit_s = state.rules.drain_limit_s
    has_failed = isinstance(phase, Running) and (phase.failures.unreported or phase.failures.reported)
    if event.guard_died or limit_s <= 0.0 or has_failed:
        return None
    state = replace(state, preemption=Preemption(signum=event.signum, at_s=event.at_s))
    cause = f"received {name_signal(event.signum)}"
    timer = RoundTimer(purpose=TimerPurpose.DRAIN, round_number=phase.round.number)
    drain = phase.drain if isinstance(phase, Running) else None
    is_told = phase.has_drain_step or (drain is not None and drain.step is not None)
    what = "leaving when all ranks have stopped" if is_told else "asking all ranks to stop at one step"
    # Send both page and drain: hung ranks reach no common step, but they may not hang.
    is_still = isinstance(phase, Running) and event.still_s >= STILL_PAGE_S
    page = (CollectStacks(round=phase.round, is_hang=True),) if is_still else ()
    return state, (
        PrintLine(text=f"{cause}: {what}, up to {limit_s:g} s{state.rules.describe_senders(event.signum)}"),
        *page,
        Send(message=DrainAsked(round_number=phase.round.number, reason=cause, limit_s=limit_s)),
        StartTimer(timer=timer, delay_s=limit_s),
    )


def decide_drain(
    state: NodeState, event: DrainBegun | DrainCommitted | DrainWithdrawn | SlotsRead | RoundTimer
) -> DrainDecision:
    """Decide what follows in a drain. An event of another drain changes nothing."""
    phase = state.phase
    if not isinstance(phase, Running | Succeeded):
        return state, _refuse(event) if isinstance(event, DrainBegun) else (), False
    if isinstance(event, RoundTimer) and event.purpose is TimerPurpose.DRAIN:
        return _on_time_over(state, phase, event)
    if isinstance(phase, Succeeded):
        has_drain_step = phase.has_drain_step or isinstance(event, DrainCommitted)
        return replace(state, phase=replace(phase, has_drain_step=has_drain_step)), (), False
    match event:
        case DrainBegun():
            return _begin(state, phase, event)
        case DrainCommitted():
            return _commit(state, phase, event)
        case DrainWithdrawn():
            return _withdraw(state, phase, event)
        case SlotsRead():
            return _look(state, phase, event)
        case RoundTimer():
            return state, _look_again(phase, event), False
        case _:
            assert_never(event)


def _refuse(event: DrainBegun) -> tuple[Action, ...]:
    """Refuse a drain: without a report of this node, the ranks of all others would wait for ever."""
    report = DrainReport(ceiling=0, refusal="a node has not started its workers yet")
    return (_send_report(event.round_number, event.drain, report),)


def _begin(state: NodeState, phase: Running, event: DrainBegun) -> DrainDecision:
    if phase.drain is not None and phase.drain.number >= event.drain:
        return state, (), False
    drain = NodeDrain(number=event.drain, kind=event.kind, is_asked=event.is_asked, is_join=event.is_join)
    state = replace(state, phase=replace(phase, drain=drain))
    timer = RoundTimer(purpose=TimerPurpose.DRAIN, round_number=event.round_number, number=event.drain)
    is_stop, is_asked_here = event.kind == Layout.STOP, state.preemption is not None
    limit_s = event.limit_s + state.rules.shutdown_timeout_s if is_stop else None
    deadline = (WriteDeadline(delay_s=limit_s),) if is_stop or event.kind == Layout.JOIN else ()
    timers = () if is_stop and is_asked_here else (StartTimer(timer=timer, delay_s=event.limit_s),)
    return state, (*deadline, *timers, _read_slots(phase, drain)), False


def _read_slots(phase: Running, drain: NodeDrain) -> ReadSlots:
    return ReadSlots(round_number=phase.round.number, drain=drain.number, kind=drain.kind)


def _start_look(phase: Running, drain: NodeDrain, delay_s: float) -> StartTimer:
    look = RoundTimer(purpose=TimerPurpose.LOOK, round_number=phase.round.number, number=drain.number)
    return StartTimer(timer=look, delay_s=delay_s)


def _look_again(phase: Running, timer: RoundTimer) -> tuple[Action, ...]:
    drain = phase.drain
    if drain is None or drain.number != timer.number or drain.is_done:
        return ()
    is_awaited = drain.is_wait or (drain.ceiling is not None and not drain.is_reported)
    return (_read_slots(phase, drain),) if is_awaited else ()


def _look(state: NodeState, phase: Running, event: SlotsRead) -> DrainDecision:
    drain = phase.drain
    if drain is None or drain.number != event.drain:
        return state, (), False  # for an earlier drain
    if drain.is_over or drain.step is not None:
        return _look_for_followers(state, phase, drain, event)
    if drain.is_reported:
        return state, (), False
    if event.slots is None:
        return _report(state, phase, drain, DrainReport(ceiling=0, refusal="a node has no status page"))
    slots = _list_live_slots(phase, event)
    refusal = find_refusal(slots, drain.kind)
    if drain.is_join and drain.kind == Layout.STOP and phase.alive <= phase.can_leave and all(e.keeps for e in slots):
        refusal = "its ranks can take part in the next round"  # they wait at a snapshot instead, and need not end
    if refusal is not None:
        return _report(state, phase, drain, DrainReport(ceiling=0, refusal=refusal))
    before = drain.ceiling
    ceiling = build_ceiling(slots) if before is None else check_ceiling(before, slots)
    report = build_report(ceiling, slots) if ceiling.is_verified else None
    if report is not None:
        return _report(state, phase, replace(drain, ceiling=ceiling), report)
    drain = replace(drain, ceiling=ceiling)
    timer = _start_look(phase, drain, STRIDE_LOOK_S if ceiling.is_verified else LOOK_S)
    write = () if ceiling.is_verified else (_build_write(drain, ceiling),)
    return replace(state, phase=replace(phase, drain=drain)), (*write, timer), False


def _build_write(drain: NodeDrain, ceiling: Ceiling) -> WriteCommand:
    return WriteCommand(drain=drain.number, step=ceiling.step, is_committed=False, kind=drain.kind)


def _look_for_followers(state: NodeState, phase: Running, drain: NodeDrain, event: SlotsRead) -> DrainDecision:
    """Report that all ranks wait, or after the limit which ranks do not; otherwise look again soon."""
    slots = _list_live_slots(phase, event)
    has_agreed = drain.step is not None or drain.is_reported
    late = list_late(slots, drain.kind, drain.step) if drain.step is not None or not has_agreed else ()
    if late and not drain.is_over:
        return state, (_start_look(phase, drain, STRIDE_LOOK_S),) if drain.is_wait else (), False
    if not drain.is_over and not drain.is_wait:
        return state, (), False
    state = replace(state, phase=replace(phase, drain=replace(drain, is_over=False, is_done=True)))
    done = DrainDone(round_number=phase.round.number, drain=drain.number, late=late)
    return state, (Send(message=done),), False


def _list_live_slots(phase: Running, event: SlotsRead) -> list[RankSlot]:
    """Return the ranks whose process lives.

    A rank that has ended delays nothing, and one that starts later sees the command.
    """
    return [slot for local_rank, slot in enumerate(event.slots or ()) if local_rank in phase.alive]


def _report(state: NodeState, phase: Running, drain: NodeDrain, report: DrainReport) -> DrainDecision:
    state = replace(state, phase=replace(phase, drain=replace(drain, is_reported=True)))
    return state, (_send_report(phase.round.number, drain.number, report),), False


def _send_report(round_number: int, drain: int, report: DrainReport) -> Send:
    return Send(message=DrainReported(round_number=round_number, drain=drain, report=report))


def _commit(state: NodeState, phase: Running, event: DrainCommitted) -> DrainDecision:
    drain = phase.drain
    if drain is None or drain.number != event.drain or drain.step is not None:
        return state, (), False
    drain = replace(drain, step=event.step)
    command = WriteCommand(drain=drain.number, step=event.step, is_committed=True, kind=drain.kind)
    look = (_read_slots(phase, drain),) if drain.is_wait else ()
    return replace(state, phase=replace(phase, drain=drain)), (command, *look), False


def _withdraw(state: NodeState, phase: Running, event: DrainWithdrawn) -> DrainDecision:
    drain = phase.drain
    if drain is None:
        line = PrintLine(text=f"no common last step: {event.reason}")
        return state, (line,) if state.preemption is not None else (), True
    if drain.number != event.drain or drain.is_stop:
        return state, (), False
    state = replace(state, phase=replace(phase, drain=None))
    if drain.kind != Layout.STOP:
        return state, (WithdrawCommand(),), False
    return state, (WithdrawCommand(), WriteDeadline(delay_s=None)), True


def _on_time_over(state: NodeState, phase: Running | Succeeded, timer: RoundTimer) -> DrainDecision:
    drain = phase.drain if isinstance(phase, Running) else None
    reads: tuple[Action, ...] = ()
    if isinstance(phase, Running) and drain is not None:
        if timer.number not in (0, drain.number):
            return state, (), False  # of an ended drain
        if drain.is_asked and not drain.is_done:
            reads = (_read_slots(phase, drain),)
            state = replace(state, phase=replace(phase, drain=replace(drain, is_over=True)))
        if drain.kind != Layout.STOP and timer.number != 0:
            return state, reads, False
    elif timer.number and isinstance(phase, Running):
        return state, (), False
    if not phase.has_drain_step:
        line = PrintLine(text="no step was agreed on in time")
        return state, (*reads, line) if state.preemption is not None else reads, True
    grace = RoundTimer(purpose=TimerPurpose.TOLD, round_number=phase.round.number)
    return state, (*reads, StartTimer(timer=grace, delay_s=state.rules.shutdown_timeout_s)), False
