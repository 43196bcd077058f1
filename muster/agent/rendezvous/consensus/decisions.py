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
- A leader whose node ran before and lost its memory forms a round only with all `max` nodes, or when its members prove
  that no other node can continue the job (`quorum`, without claims): it may have left these members behind.
- A round is formed only with a quorum of the last round (`quorum`) and while the leader holds its lease.
- Each member acknowledges a new round. The round is committed when all have; until then the next round also needs a
  quorum of the one before.
- A join or a loss makes a new round. Only a worker's failure makes a new attempt, and not if a loss explains it.
- A failure that would end the job is final only after a short wait for the report of a loss that explains it.
- The job succeeds when the workers of all members of one round have succeeded. If any of them stopped at the step of a
  drain, the job has not succeeded: the others go on without the nodes that asked for it, or, if fewer than `min` stay,
  the job ends and may be run again.

Every wait is in the table of `waits`; a timer carries the round that it was set for. Whether the leader's own workers
would have a lease in a new round only the leader can tell: a proposed round is formed when it has checked that.

`membership` handles joins, losses and recovery state; `failures` breaks rounds; `formation` forms them and ends the
job; `drain` agrees on the step at which all ranks stop; `diagnosis.root_cause` finds the root cause and builds the
report.
"""

from muster._shared.records import assert_never, replace
from muster.agent.rendezvous.consensus.actions import CommitRound, SetTimer
from muster.agent.rendezvous.consensus.events import (
    Asked,
    DrainAsked,
    DrainFollowed,
    DrainReported,
    Event,
    Failed,
    Idle,
    Joined,
    LeaseChecked,
    Leaving,
    MemberLost,
    Prepared,
    ProcessEnded,
    RoundAcknowledged,
    Saved,
    StacksTaken,
    StoodStill,
    Stopped,
    Succeeded,
    TimerFired,
)
from muster.agent.rendezvous.consensus.failures import GOES_ON, break_for_failure, on_failed, on_idle, on_stopped
from muster.agent.rendezvous.consensus.formation import fail_rendezvous, form_or_end, on_lease_checked
from muster.agent.rendezvous.consensus.membership import (
    break_for_joins,
    drop_stopping,
    on_joined,
    on_leaving,
    on_member_lost,
    on_prepared,
    on_process_ended,
)
from muster.agent.rendezvous.consensus.state import Decision, Ending, Forming, JobState, RoundRunning
from muster.agent.rendezvous.consensus.waits import find_join_deadline_s, find_next_due_s
from muster.agent.runtime.persistent import PersistentMap, PersistentSet


def decide(state: JobState, event: Event, now_s: float) -> Decision:
    """Handle one event. Events of absent members, of old rounds and of old timers change nothing.

    Only a timer makes a failure final or fails the rendezvous: an event already received may still explain the failure
    or complete the round.
    """
    is_due = isinstance(event, TimerFired) and event.round_number == state.round_number
    state, actions = _handle(state, event, now_s)
    state, broken = break_for_joins(state, now_s)
    state, formed = form_or_end(state, now_s)
    state, failed = _check_join_timeout(state, now_s) if is_due else (state, ())
    state, timer = _update_timer(state, now_s)
    return state, (*actions, *broken, *formed, *failed, *timer)


def _handle(state: JobState, event: Event, now_s: float) -> Decision:  # noqa: C901  # one line for each event
    match event:
        case Joined():
            return on_joined(state, event, now_s)
        case MemberLost():
            return on_member_lost(state, event, now_s)
        case ProcessEnded():
            return on_process_ended(state, event)
        case Leaving():
            return on_leaving(state, event, now_s)
        case Prepared():
            return on_prepared(state, event, now_s)
        case RoundAcknowledged():
            return _on_round_acknowledged(state, event)
        case Failed():
            return on_failed(state, event, now_s)
        case Idle():
            return _on_idle(state, event, now_s)
        case Succeeded():
            return _on_succeeded(state, event, now_s)
        case DrainAsked():
            from muster.agent.rendezvous.consensus.drain import on_drain_asked  # most jobs end without one

            return on_drain_asked(state, event, now_s)
        case DrainReported():
            from muster.agent.rendezvous.consensus.drain import on_drain_reported

            return on_drain_reported(state, event, now_s)
        case Saved():
            from muster.agent.rendezvous.consensus.drain import on_saved

            return on_saved(state, event, now_s)
        case DrainFollowed():
            from muster.agent.rendezvous.consensus.drain import on_followed

            return on_followed(state, event, now_s)
        case Asked():
            from muster.agent.rendezvous.consensus.drain import on_asked

            return on_asked(state, event, now_s)
        case StacksTaken():
            from muster.agent.rendezvous.consensus.drain import on_stacks_taken

            return on_stacks_taken(state, event, now_s)
        case StoodStill():
            from muster.agent.rendezvous.consensus.drain import on_stood_still

            return on_stood_still(state, event, now_s)
        case Stopped():
            return on_stopped(state, event, now_s)
        case LeaseChecked():
            return on_lease_checked(state, event, now_s)
        case TimerFired():
            return _on_timer_fired(state, event, now_s)
        case _:
            assert_never(event)


def _update_timer(state: JobState, now_s: float) -> Decision:
    """Set the leader's one timer to the next wait that ends, unless it is set to it."""
    timer = SetTimer(round_number=state.round_number, due_s=find_next_due_s(state, now_s))
    return (state, ()) if timer == state.timer else (replace(state, timer=timer), (timer,))


def _on_round_acknowledged(state: JobState, event: RoundAcknowledged) -> Decision:
    if event.round_number != state.round_number or event.id not in state.unacknowledged:
        return state, ()
    state = replace(state, unacknowledged=state.unacknowledged.without(event.id))
    is_complete = state.quorum_rounds and len(state.quorum_rounds[-1].connected) == state.quorum_rounds[-1].size
    if state.unacknowledged or not is_complete:
        return state, ()
    late = tuple(each for each in state.quorum_rounds if each.is_late)
    return replace(state, quorum_rounds=(*late, *state.quorum_rounds[-1:])), (
        CommitRound(round_number=state.round_number),
    )


def _on_succeeded(state: JobState, event: Succeeded, now_s: float) -> Decision:
    phase = state.phase
    if (
        event.round_number != state.round_number
        or event.id not in state.assignments
        or not isinstance(phase, RoundRunning)
    ):
        return state, ()
    # The others may have waited for this node: one that stays idle for another timeout reports it again.
    succeeded = phase.succeeded.with_item(event.id)
    told = (GOES_ON,) if phase.has_reported_hang else ()
    phase = replace(
        phase,
        still=PersistentMap(),
        still_asked_s=0.0,
        idle=PersistentMap(),
        urgent=PersistentSet(),
        has_reported_hang=False,
        succeeded=succeeded,
        succeeded_s=now_s,
        batch_since_s=None,
    )
    if phase.drain is None:
        return replace(state, phase=phase), told
    from muster.agent.rendezvous.consensus.drain import on_workers_ended

    state, actions = on_workers_ended(state, phase, event, now_s)
    return state, (*told, *actions)


def _on_timer_fired(state: JobState, event: TimerFired, now_s: float) -> Decision:
    """A failure that no loss has explained in time becomes final; members that stop for too long count as lost."""
    if event.round_number != state.round_number:
        return state, ()
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


def _on_idle(state: JobState, event: Idle, now_s: float) -> Decision:
    """Whether the job hangs now; with --hang-action report, print what all ranks do."""
    before = state.phase
    state, actions = on_idle(state, event, now_s)
    phase = state.phase
    is_new = isinstance(phase, RoundRunning) and phase.has_reported_hang
    if not is_new or (isinstance(before, RoundRunning) and before.has_reported_hang):
        return state, actions
    from muster.agent.rendezvous.consensus.drain import ask_for_stacks  # most jobs never hang

    state, more = ask_for_stacks(state, now_s)
    return state, (*actions, *more)
