"""The leader's state machine: a pure function `decide(state, event, now_s) -> (state, actions)`.

The leader turns every message and every lost connection into an event and sends the actions that result. The job is in
one of three phases, each a record of `state`:

    FORMING --(enough members, all workers stopped, quorum)--> RUNNING --(loss, join, failure)--> FORMING ...
                                                                  |--(all members succeeded)--> ENDING
    FORMING --(final failure, all workers stopped)--> ENDING

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

from collections.abc import Mapping

from muster._shared.records import assert_never, replace
from muster.agent.rendezvous.consensus.actions import RecoveryChanged, Send, SetTimer
from muster.agent.rendezvous.consensus.events import (
    Event,
    Joined,
    LeaseChecked,
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
from muster.agent.rendezvous.consensus.members import MemberRecord
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
    DrainFollowed,
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

_ALWAYS = frozenset({Prepared, Leaving, RoundAcknowledged, Saved, Asked})
_UNTIL_THE_END = _ALWAYS | {Failed, Idle, Stopped, PartReport}
ACCEPTED: Mapping[type[Forming | RoundRunning | Ending], frozenset[type[MemberReport]]] = {
    Forming: _UNTIL_THE_END,
    RoundRunning: _UNTIL_THE_END
    | {AllStarted, AllSucceeded, StoodStill, StacksTaken, DrainAsked, DrainReported, DrainFollowed},
    Ending: _ALWAYS,
}
"""Which phase accepts which message of a member. `_is_accepted` drops all others, and outdated ones.

After a round, `Asked` is refused with a line, and `Saved` still counts as a checkpoint of the last moment. `Failed` and
`Idle` then report what ended the round.
"""


def decide(state: JobState, event: Event, now_s: float) -> Decision:
    """Handle one event. Events of absent members, of old rounds and of old timers change nothing.

    Only a timer makes a failure final or fails the rendezvous: an event already received may still explain the failure
    or complete the round.
    """
    is_accepted = _is_accepted(state, event)
    state, actions = _handle(state, event, now_s) if is_accepted else (state, ())
    state, admitted = admit_newcomers(state, now_s)
    state, formed = form_or_end(state, now_s)
    is_due = is_accepted and isinstance(event, TimerFired)
    state, failed = _check_join_timeout(state, now_s) if is_due else (state, ())
    state, timer = _update_timer(update_recovery(state), now_s)
    return state, (*actions, *admitted, *formed, *failed, *timer)


def _is_accepted(state: JobState, event: Event) -> bool:
    """Return whether an event can change anything: its round, its member and the phase must match.

    `Prepared` and `Leaving` are about no round. An event about a member that is gone is for its handler to judge.
    """
    if isinstance(event, TimerFired):
        return event.round_number == state.round_number
    if not isinstance(event, Reported):
        return True
    message = event.message
    if event.id not in state.members or type(message) not in ACCEPTED[type(state.phase)]:
        return False
    if isinstance(message, Prepared | Leaving):
        return True
    return message.round_number == state.round_number and event.id in state.assignments


def _handle(state: JobState, event: Event, now_s: float) -> Decision:
    match event:
        case Joined():
            return _on_joined(state, event.member, now_s)
        case Reported():
            return _handle_report(state, event, now_s)
        case MemberLost():
            return on_member_lost(state, event, now_s)
        case ProcessEnded():
            return on_process_ended(state, event)
        case LeaseChecked():
            return on_lease_checked(state, event, now_s)
        case TimerFired():
            return _on_timer_fired(state, now_s)
        case _:
            assert_never(event)


def _on_joined(state: JobState, member: MemberRecord, now_s: float) -> Decision:
    """Add a member. The link that it had lost may have lost its report of the last checkpoint, so count that now."""
    is_same_round = member.recovery.is_same_round(state.recovery.value)
    state, actions = on_joined(state, Joined(member=member), now_s)
    if member.saved is None or not is_same_round:
        return state, actions
    report = Reported(id=member.id, message=member.saved)
    state, counted = _handle_report(state, report, now_s) if _is_accepted(state, report) else (state, ())
    return state, (*actions, *counted)


def _handle_report(state: JobState, event: Reported, now_s: float) -> Decision:
    sender, message = event.id, event.message
    match message:
        case Leaving():
            return on_leaving(state, sender, message, now_s)
        case Prepared():
            return on_prepared(state, sender, now_s)
        case RoundAcknowledged():
            return _on_round_acknowledged(state, sender)
        case AllStarted():
            return state, _tell_started(state, sender)
        case Failed():
            state = record_step(state) if message.has_stepped else state
            return on_failed(state, sender, message.failures, now_s, event.suspicion_s)
        case Idle():
            return _on_idle(state, sender, message, now_s)
        case AllSucceeded():
            return _on_all_succeeded(state, sender, message, now_s)
        case Stopped():
            return on_stopped(state, sender, message, now_s)
        case DrainAsked() | DrainReported() | DrainFollowed() | Asked() | StacksTaken() | StoodStill() | Saved():
            from muster.agent.rendezvous.consensus.drain import decide_common_step

            return decide_common_step(state, sender, message, now_s)
        case PartReport():
            from muster.agent.rendezvous.consensus.parts import decide_part

            return decide_part(state, sender, message, now_s)
        case _:
            assert_never(message)


def _update_timer(state: JobState, now_s: float) -> Decision:
    """Set the leader's one timer to the next wait that ends, unless it is already set to that."""
    timer = SetTimer(round_number=state.round_number, due_s=find_next_due_s(state, now_s))
    return (state, ()) if timer == state.timer else (replace(state, timer=timer), (timer,))


def _tell_started(state: JobState, sender: str) -> tuple[Send, ...]:
    """Tell the other members of the round that global rank 0's workers have started, so that theirs may start."""
    if state.assignments[sender].group_rank != 0:
        return ()
    others = tuple(each for each in state.assignments if each != sender)
    return (Send(ids=others, message=GlobalRank0Started(round_number=state.round_number)),)


def _on_round_acknowledged(state: JobState, sender: str) -> Decision:
    if sender not in state.unacknowledged:
        return state, ()
    state = replace(state, unacknowledged=state.unacknowledged.without(sender))
    is_complete = state.quorum_rounds and len(state.quorum_rounds[-1].connected) == state.quorum_rounds[-1].size
    if state.unacknowledged or not is_complete:
        return state, ()
    late = tuple(each for each in state.quorum_rounds if each.is_late)
    state = update_recovery(replace(state, quorum_rounds=(*late, *state.quorum_rounds[-1:])))
    return state, (Send(ids=tuple(state.assignments), message=RecoveryChanged(recovery=state.recovery)),)


def _on_all_succeeded(state: JobState, sender: str, message: AllSucceeded, now_s: float) -> Decision:
    # The others may have waited for this node; if one stays idle, it reports again.
    phase = state.running
    told = (GOES_ON,) if phase.has_reported_hang else ()
    phase = replace(
        phase,
        still=PersistentMap(),
        still_asked_s=0.0,
        idle=PersistentMap(),
        urgent=PersistentSet(),
        has_reported_hang=False,
        succeeded=phase.succeeded.with_item(sender),
        succeeded_s=now_s,
        batch_since_s=None,
    )
    if phase.drain is None:
        return replace(state, phase=phase), told
    from muster.agent.rendezvous.consensus.drain import on_workers_ended

    state, actions = on_workers_ended(state, phase, message.drained_rank, now_s)
    return state, (*told, *actions)


def _on_timer_fired(state: JobState, now_s: float) -> Decision:
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


def _on_idle(state: JobState, sender: str, message: Idle, now_s: float) -> Decision:
    """Decide whether the job hangs now. With --hang-action report, print what all ranks do."""
    before = state.phase
    state, actions = on_idle(state, sender, message, now_s)
    phase = state.phase
    is_new = isinstance(phase, RoundRunning) and phase.has_reported_hang
    if not is_new or (isinstance(before, RoundRunning) and before.has_reported_hang):
        return state, actions
    from muster.agent.rendezvous.consensus.drain import ask_for_stacks

    state, more = ask_for_stacks(state, now_s)
    return state, (*actions, *more)
