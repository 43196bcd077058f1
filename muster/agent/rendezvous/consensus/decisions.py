"""The leader's state machine: a pure function `decide(state, event, now_s) -> (state, actions)`.

The leader turns every message and every lost connection into an event and sends the actions that result. The job is in
one of three phases, each a record of `state`:

    Forming --LeaseChecked--> RoundRunning
    Forming --what is due--> Ending
    RoundRunning --MemberLost, TimerFired, Leaving, Failed, Idle, AllSucceeded, Stopped, DrainReported,
        PartReport--> Forming
    RoundRunning --what is due--> Forming, Ending

The rules:

- A round is formed only after every member of the last one has stopped its workers or was lost. The fence time must
  have passed since a loss: the lost member's guard kills its workers within it. A member that still stops after its own
  limit and a margin counts as lost.
- A leader whose node ran before and lost its memory may have left its members behind. So it forms a round only with all
  `max` nodes, or when its members prove that no other node can continue the job (`quorum`, without claims).
- A round is formed only with a quorum of the last round (`quorum`) and while the leader holds its lease.
- Each member acknowledges a new round. The round is committed when all have; until then the next round also needs a
  quorum of the one before.
- A join or a loss makes a new round. Only a worker's failure makes a new attempt, and not if a loss explains it.
- A failure that would end the job is final only after a short wait for the report of a loss that explains it.
- The job succeeds when the workers of all members of one round have succeeded. If any of them stopped at the step of a
  drain, the job has not succeeded. Then the others continue without the nodes that asked for the drain, or, if fewer
  than `min` stay, the job ends and may be run again.

Every wait is in the table of `waits`, and a timer carries the round that it was set for. Only the leader can tell
whether its own workers would have a lease in a new round, so a proposed round is formed after the leader has checked
that.

`membership` handles joins, losses and what members bring with them. `failures` breaks rounds, and `formation` forms
them and ends the job. `drain` agrees on the step at which all ranks stop. `parts` calls what features have here.
`diagnosis.root_cause` finds the root cause and builds the report.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from muster._shared.records import assert_never, replace
from muster._shared.transitions import Moves, Table, drop, expect, on, on_with, stay
from muster.agent.rendezvous.consensus.actions import RecoveryChanged, Send, SetTimer
from muster.agent.rendezvous.consensus.events import (
    Event,
    Joined,
    LeaderEvent,
    LeaseChecked,
    M_co,
    MemberLost,
    MemberReport,
    ProcessEnded,
    Reported,
    RoundAcknowledged,
    TimerFired,
)
from muster.agent.rendezvous.consensus.failures import (
    GOES_ON,
    break_for_failure,
    on_failed,
    on_idle,
    on_stopped,
    record_step,
)
from muster.agent.rendezvous.consensus.formation import fail_rendezvous, form_or_end, on_lease_checked
from muster.agent.rendezvous.consensus.membership import (
    admit_newcomers,
    drop_stopping,
    on_joined,
    on_leaving,
    on_member_lost,
    on_prepared,
    on_process_ended,
)
from muster.agent.rendezvous.consensus.state import (
    Decision,
    Ending,
    Forming,
    JobState,
    RoundRunning,
    update_recovery,
)
from muster.agent.rendezvous.consensus.waits import find_join_deadline_s, find_next_due_s
from muster.agent.rendezvous.interface import (
    AllStarted,
    AllSucceeded,
    Asked,
    DrainAsked,
    DrainDone,
    DrainReported,
    GlobalRank0Started,
    Leaving,
    PartReport,
    Prepared,
    Saved,
    StoodStill,
)
from muster.agent.rendezvous.report_messages import Failed, Idle, StacksTaken, Stopped
from muster.agent.runtime.persistent import PersistentMap, PersistentSet

if TYPE_CHECKING:
    from muster.agent.rendezvous.consensus.drain import CommonStepMessage

_ALL = stay(Forming, RoundRunning, Ending)
_BROKEN = stay(RoundRunning, or_go=(Forming,))


def _on_report(
    kind: type[M_co], handler: Callable[[JobState, Reported[M_co], float], Decision], *moves: Moves
) -> "Table[M_co, Decision]":
    """Make a row for a message, whose handler also needs its sender."""
    return on_with(kind, cast("Callable[[JobState, M_co, float], Decision]", handler), *moves)


def _build_table() -> "Table[LeaderEvent | MemberReport, Decision]":
    """Return which phase accepts which event, what handles it, and which phases may follow; `DUE` has more of these.

    After a round, `Asked` is refused with a line, and `Saved` still counts as a checkpoint of the last moment. `Failed`
    and `Idle` then report what ended the round.
    """
    return (
        on_with(Joined, _on_joined, _ALL)
        + on_with(MemberLost, on_member_lost, _ALL, _BROKEN)
        + on(ProcessEnded, on_process_ended, _ALL)
        + on_with(LeaseChecked, on_lease_checked, stay(Forming, or_go=(RoundRunning,)))
        + on_with(TimerFired, _on_timer_fired, _ALL, _BROKEN)
        + _on_report(Leaving, on_leaving, _ALL, _BROKEN)
        + _on_report(Prepared, on_prepared, _ALL)
        + _on_report(RoundAcknowledged, _on_round_acknowledged, _ALL)
        + _on_report(AllStarted, _on_all_started, stay(RoundRunning))
        + _on_report(Failed, _on_failed, stay(Forming), _BROKEN)
        + _on_report(Idle, _on_idle, stay(Forming), _BROKEN)
        + _on_report(AllSucceeded, _on_all_succeeded, _BROKEN)
        + _on_report(Stopped, on_stopped, stay(Forming), _BROKEN)
        + _on_report(DrainAsked, _on_common_step, stay(RoundRunning))
        + _on_report(DrainReported, _on_common_step, _BROKEN)
        + _on_report(DrainDone, _on_common_step, stay(RoundRunning))
        + _on_report(StacksTaken, _on_common_step, stay(RoundRunning))
        + _on_report(StoodStill, _on_common_step, stay(RoundRunning))
        + _on_report(Asked, _on_common_step, _ALL)
        + _on_report(Saved, _on_common_step, _ALL)
        + _on_report(PartReport, _on_part, stay(Forming), _BROKEN)
    )


DUE = stay(Forming, or_go=(Ending,)), stay(RoundRunning, or_go=(Forming, Ending)), stay(Ending)
"""Which phases may follow without an event, when a wait of `waits` is over, or what a phase waits for has come."""


def decide(state: JobState, event: Event, now_s: float) -> Decision:
    """Handle one event. Events of absent members, of old rounds and of old timers change nothing.

    Only a timer makes a failure final or fails the rendezvous: an event already received may still explain the failure
    or complete the round.
    """
    handler = TABLE.find(type(state.phase), event.message if isinstance(event, Reported) else event)
    is_accepted = not _is_outdated(state, event)
    if handler is not None and is_accepted:
        state, actions = handler(state, event, now_s)
    else:
        state, actions = drop(state, type(state.phase), event)
    state, admitted = admit_newcomers(state, now_s)
    state, formed = form_or_end(state, now_s)
    is_due = is_accepted and isinstance(event, TimerFired)
    state, failed = _check_join_timeout(state, now_s) if is_due else (state, ())
    state, timer = _update_timer(update_recovery(state), now_s)
    return state, (*actions, *admitted, *formed, *failed, *timer)


def _is_outdated(state: JobState, event: Event) -> bool:
    """Return whether an event is about another round, or is a message of a node that has no part in the round.

    `Prepared` and `Leaving` are about no round. An event about a member that is gone is for its handler to judge.
    """
    if isinstance(event, TimerFired):
        return event.round_number != state.round_number
    if not isinstance(event, Reported):
        return False
    message, is_absent = event.message, event.id not in state.members
    if is_absent or isinstance(message, Prepared | Leaving):
        return is_absent
    return message.round_number != state.round_number or event.id not in state.assignments


def _on_joined(state: JobState, event: Joined, now_s: float) -> Decision:
    """Add a member. The link that it had lost may have lost its report of the last checkpoint, so count that now."""
    member = event.member
    is_same_round = member.recovery.is_same_round(state.recovery.value)
    state, actions = on_joined(state, event, now_s)
    if member.saved is None or not is_same_round:
        return state, actions
    report = Reported(id=member.id, message=member.saved)
    state, counted = (state, ()) if _is_outdated(state, report) else _on_common_step(state, report, now_s)
    return state, (*actions, *counted)


def _on_failed(state: JobState, event: Reported[Failed], now_s: float) -> Decision:
    state = record_step(state) if event.message.has_stepped else state
    return on_failed(state, event.id, event.message.failures, now_s, event.suspicion_s)


def _on_common_step(state: JobState, event: "Reported[CommonStepMessage]", now_s: float) -> Decision:
    from muster.agent.rendezvous.consensus.drain import decide_common_step

    return decide_common_step(state, event.id, event.message, now_s)


def _on_part(state: JobState, event: Reported[PartReport], now_s: float) -> Decision:
    from muster.agent.rendezvous.consensus.parts import decide_part

    return decide_part(state, event.id, event.message, now_s)


def _update_timer(state: JobState, now_s: float) -> Decision:
    """Set the leader's one timer to the next wait that ends, unless it is already set to that."""
    due_s, known = find_next_due_s(state, now_s), state.timer
    if known is not None and (known.round_number, known.due_s) == (state.round_number, due_s):
        return state, ()
    timer = SetTimer(round_number=state.round_number, due_s=due_s)
    return replace(state, timer=timer), (timer,)


def _on_all_started(state: JobState, event: Reported[AllStarted], _now_s: float) -> Decision:
    """Tell the other members of the round that global rank 0's workers have started, so that theirs may start."""
    if state.assignments[event.id].group_rank != 0:
        return state, ()
    others = tuple(each for each in state.assignments if each != event.id)
    return state, (Send(ids=others, message=GlobalRank0Started(round_number=state.round_number)),)


def _on_round_acknowledged(state: JobState, event: Reported[RoundAcknowledged], _now_s: float) -> Decision:
    if event.id not in state.unacknowledged:
        return state, ()
    state = replace(state, unacknowledged=state.unacknowledged.without(event.id))
    is_complete = state.quorum_rounds and len(state.quorum_rounds[-1].connected) == state.quorum_rounds[-1].size
    if state.unacknowledged or not is_complete:
        return state, ()
    late = tuple(each for each in state.quorum_rounds if each.is_late)
    state = update_recovery(replace(state, quorum_rounds=(*late, *state.quorum_rounds[-1:])))
    return state, (Send(ids=tuple(state.assignments), message=RecoveryChanged(recovery=state.recovery)),)


def _on_all_succeeded(state: JobState, event: Reported[AllSucceeded], now_s: float) -> Decision:
    # The others may have waited for this node; if one stays idle, it reports again.
    phase = expect(state.phase, RoundRunning)
    told = (GOES_ON,) if phase.has_reported_hang else ()
    phase = replace(
        phase,
        still=PersistentMap(),
        still_asked_s=0.0,
        idle=PersistentMap(),
        urgent=PersistentSet(),
        has_reported_hang=False,
        succeeded=phase.succeeded.with_item(event.id),
        succeeded_s=now_s,
        batch_since_s=None,
    )
    if phase.drain is None:
        return replace(state, phase=phase), told
    from muster.agent.rendezvous.consensus.drain import on_workers_ended

    state, actions = on_workers_ended(state, phase, event.message.drained_rank, now_s)
    return state, (*told, *actions)


def _on_timer_fired(state: JobState, _event: TimerFired, now_s: float) -> Decision:
    """Make a failure final that no loss has explained in time, and count members that take too long to stop as lost."""
    state = replace(state, timer=None)
    match state.phase:
        case Forming() as phase:
            is_overdue = phase.stopping and now_s >= phase.stop_deadline_s
            return drop_stopping(state, phase, now_s) if is_overdue else (state, ())
        case RoundRunning() as phase:
            is_final = phase.loss_wait_until_s is not None and now_s >= phase.loss_wait_until_s
            return break_for_failure(state, now_s) if is_final else (state, ())
        case Ending():
            return state, ()
        case _:
            assert_never(state.phase)


def _check_join_timeout(state: JobState, now_s: float) -> Decision:
    """Fail when no round was formed within the join timeout."""
    phase = state.phase
    if not isinstance(phase, Forming) or phase.stopping or phase.proposed is not None:
        return state, ()
    if now_s < find_join_deadline_s(state, phase):
        return state, ()
    return fail_rendezvous(state)


def _on_idle(state: JobState, event: Reported[Idle], now_s: float) -> Decision:
    """Decide whether the job hangs now. With --hang-action report, print what all ranks do."""
    before = state.phase
    state, actions = on_idle(state, event.id, event.message, now_s)
    phase = state.phase
    is_new = isinstance(phase, RoundRunning) and phase.has_reported_hang
    if not is_new or (isinstance(before, RoundRunning) and before.has_reported_hang):
        return state, actions
    from muster.agent.rendezvous.consensus.drain import ask_for_stacks

    state, more = ask_for_stacks(state, now_s)
    return state, (*actions, *more)


TABLE = _build_table()
