"""The leader's state machine: a pure function `decide(state, event, now_s) -> (state, actions)`.

The leader turns every message and every lost connection into an event and sends the actions that result. The job is in
one of three phases:

    FORMING --(enough members, all workers stopped, quorum)--> RUNNING --(loss, join, failure)--> FORMING ...
                                                                  |--(all members succeeded)--> ENDING
    FORMING --(final failure, all workers stopped)--> ENDING

The rules:

- A round is formed only after every member of the last one has stopped its workers or was lost. The fence time must
  have passed since a loss: the lost member's guard kills its workers within it. A member that still stops after its own
  limit and a margin counts as lost.
- A leader whose node ran before and lost its memory forms a round only with all `max` nodes, or once a member has
  brought the last round: the job may continue elsewhere.
- A round is formed only with a quorum of the last round (`quorum`) and while the leader holds its lease.
- Each member acknowledges a new round. The round is committed when all have; until then the next round also needs a
  quorum of the one before.
- A join or a loss makes a new round. Only a worker's failure makes a new attempt, and not if a loss explains it.
- A failure that would end the job is final only after a short wait for the report of a loss that explains it.
- The job succeeds when the workers of all members of one round have succeeded.

`membership` handles joins, losses and recovery state; `failures` breaks rounds; `formation` forms them and ends the
job; `diagnosis.root_cause` finds the root cause and builds the report.
"""

from collections.abc import Callable
from typing import Any

from muster.agent.rendezvous.consensus.actions import CommitRound
from muster.agent.rendezvous.consensus.events import (
    Event,
    Failed,
    Idle,
    Joined,
    Leaving,
    MemberLost,
    Prepared,
    ProcessEnded,
    RoundAcknowledged,
    Stopped,
    Succeeded,
    Tick,
)
from muster.agent.rendezvous.consensus.failures import break_for_failure, on_failed, on_idle, on_stopped
from muster.agent.rendezvous.consensus.formation import fail_rendezvous, form_or_end
from muster.agent.rendezvous.consensus.membership import (
    batch_due_s,
    break_for_joins,
    drop_stopping,
    on_joined,
    on_leaving,
    on_member_lost,
    on_prepared,
    on_process_ended,
)
from muster.agent.rendezvous.consensus.persistent import PersistentMap
from muster.agent.rendezvous.consensus.state import FOREVER, Decision, JobPhase, JobState
from muster.agent.runtime.records import replace


def decide(state: JobState, event: Event, now_s: float) -> Decision:
    """Handle one event. Events of absent members and of old rounds change nothing.

    Only a `Tick` makes a failure final or fails the rendezvous: an event already received may still explain the failure
    or complete the round.
    """
    state, actions = _HANDLERS[type(event)](state, event, now_s)
    state, broken = break_for_joins(state, now_s)
    state, more = form_or_end(state, now_s)
    actions = (*actions, *broken, *more)
    if isinstance(event, Tick):
        state, more = _check_join_timeout(state, now_s)
        actions += more
    return state, actions


def next_due_s(state: JobState, now_s: float) -> float:
    """When the leader must feed a `Tick` at the latest; infinity when nothing is due.

    The time lies in the past when an event overtook a `Tick` that is still needed. All else was decided with the event.
    """
    if state.phase is JobPhase.ENDING:
        return FOREVER
    if state.stopping:
        return state.stop_deadline_s
    if state.phase is JobPhase.RUNNING:
        last_s = FOREVER if state.loss_wait_until_s is None else state.loss_wait_until_s
        dues = [state.end_wait_until_s, batch_due_s(state) if last_s == FOREVER else FOREVER]
    else:
        last_s = _join_deadline_s(state)
        dues = [state.fence_until_s, state.announcement_wait_until_s, state.rejoin_wait_until_s, state.end_wait_until_s]
        dues.append(state.last_join_s + state.rules.last_call_s)
    return min([last_s, *(due for due in dues if due > now_s)])


def _on_round_acknowledged(state: JobState, event: RoundAcknowledged, _now_s: float) -> Decision:
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


def _on_succeeded(state: JobState, event: Succeeded, _now_s: float) -> Decision:
    if event.round_number == state.round_number and state.phase is JobPhase.RUNNING and event.id in state.assignments:
        # The others may have waited for this node: one that stays idle for another timeout reports it again.
        succeeded = state.succeeded.with_item(event.id)
        return replace(state, idle=PersistentMap(), succeeded=succeeded, batch_since_s=None), ()
    return state, ()


def _on_tick(state: JobState, _event: Tick, now_s: float) -> Decision:
    """A failure that no loss has explained in time becomes final; members that stop for too long count as lost."""
    if state.stopping and now_s >= state.stop_deadline_s:
        return drop_stopping(state, now_s)
    if state.phase is JobPhase.RUNNING and state.loss_wait_until_s is not None and now_s >= state.loss_wait_until_s:
        return break_for_failure(state, now_s)
    return state, ()


def _check_join_timeout(state: JobState, now_s: float) -> Decision:
    """Fail when no round was formed within the join timeout."""
    if state.phase is not JobPhase.FORMING or state.stopping or now_s < _join_deadline_s(state):
        return state, ()
    return fail_rendezvous(state)


def _join_deadline_s(state: JobState) -> float:
    """When rendezvous fails. A node that joins just before the timeout gets `late_join_grace_s`."""
    if state.final_reason is not None:
        return FOREVER
    timeout_s = state.forming_since_s + state.rules.join_timeout_s
    return max(timeout_s, state.fence_until_s, state.last_join_s + state.rules.late_join_grace_s)


_HANDLERS: dict[type, Callable[[JobState, Any, float], Decision]] = {
    Joined: on_joined,
    MemberLost: on_member_lost,
    ProcessEnded: on_process_ended,
    Leaving: on_leaving,
    Prepared: on_prepared,
    RoundAcknowledged: _on_round_acknowledged,
    Failed: on_failed,
    Idle: on_idle,
    Succeeded: _on_succeeded,
    Stopped: on_stopped,
    Tick: _on_tick,
}
