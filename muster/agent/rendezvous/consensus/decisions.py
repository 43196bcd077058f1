"""The job as its leader sees it: a pure function `decide(state, event, now_s) -> (state, outputs)`.

No sockets, no clocks, no randomness: the leader feeds what it learns and sends what comes out. A round goes

    FORMING --(enough members, all stopped, allowed by quorum)--> RUNNING --(loss, join, failure)--> FORMING ...
                                                                     |--(all done)--> ENDING
    FORMING --(final failure and all stopped)--> ENDING

The state is in `job`, the words are in `terms`. What follows from an event is in `attendance` (who is there) and
`breaking` (why a round ends), what comes next in `forming`; the arithmetic of quorums is in `quorum`, root cause and
report in `verdict`.
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
    on_joined,
    on_leaving,
    on_lost,
    on_prepared,
    on_process_ended,
)
from muster.agent.rendezvous.consensus.persistent import PersistentMap
from muster.agent.rendezvous.consensus.state import FOREVER, Decision, JobPhase, JobState
from muster.agent.runtime.records import replace


def decide(state: JobState, event: Event, now_s: float) -> Decision:
    """Take in one event. Events of members that are not there, and of old rounds, change nothing.

    Only a `Tick` makes a failure final or gives up: what arrived before may explain the one and avert the other.
    """
    state, outputs = _HANDLERS[type(event)](state, event, now_s)
    state, broken = break_for_joins(state, now_s)
    state, more = form_or_end(state, now_s)
    outputs = (*outputs, *broken, *more)
    if isinstance(event, Tick):
        state, more = _check_join_timeout(state, now_s)
        outputs += more
    return state, outputs


def next_due_s(state: JobState, now_s: float) -> float:
    """When the leader must send a `Tick` at the latest; infinity when nothing is due.

    In the past where only a `Tick` will do and an event has overtaken it; everything else was looked at with the event.
    """
    if state.phase is JobPhase.ENDING or state.pending:
        return FOREVER
    if state.phase is JobPhase.RUNNING:
        last_s = FOREVER if state.blame_until_s is None else state.blame_until_s
        dues = [state.end_until_s, batch_due_s(state) if last_s == FOREVER else FOREVER]
    else:
        last_s = _join_deadline_s(state)
        dues = [state.last_join_s + state.rules.last_call_s]
        dues += [state.fence_until_s, state.quiet_until_s, state.gather_until_s, state.end_until_s]
    return min([last_s, *(due for due in dues if due > now_s)])


def _on_round_acknowledged(state: JobState, event: RoundAcknowledged, _now_s: float) -> Decision:
    if event.round != state.round or event.id not in state.unconfirmed:
        return state, ()
    state = replace(state, unconfirmed=state.unconfirmed.without(event.id))
    whole = state.bases and len(state.bases[-1].held) == state.bases[-1].size
    if state.unconfirmed or not whole:
        return state, ()
    late = tuple(base for base in state.bases if base.late)
    return replace(state, bases=(*late, *state.bases[-1:])), (CommitRound(number=state.round),)


def _on_succeeded(state: JobState, event: Succeeded, _now_s: float) -> Decision:
    if event.round == state.round and state.phase is JobPhase.RUNNING and event.id in state.seats:
        # The others may have waited for just this: who is still idle after another timeout says so again.
        return replace(state, idle=PersistentMap(), done=state.done.with_one(event.id), batch_since_s=None), ()
    return state, ()


def _on_tick(state: JobState, _event: Tick, now_s: float) -> Decision:
    """Perhaps no loss has explained a failure in time."""
    if state.phase is JobPhase.RUNNING and state.blame_until_s is not None and now_s >= state.blame_until_s:
        return break_for_failure(state, now_s)
    return state, ()


def _check_join_timeout(state: JobState, now_s: float) -> Decision:
    """No round came about within the join timeout."""
    if state.phase is not JobPhase.FORMING or state.pending or now_s < _join_deadline_s(state):
        return state, ()
    return fail_rendezvous(state)


def _join_deadline_s(state: JobState) -> float:
    """When the nodes have not come together in time: those who came last had a moment to make a round."""
    if state.final is not None:
        return FOREVER
    timeout_s = state.since_s + state.rules.join_timeout_s
    return max(timeout_s, state.fence_until_s, state.last_join_s + state.rules.last_chance_s)


_HANDLERS: dict[type, Callable[[JobState, Any, float], Decision]] = {
    Joined: on_joined,
    MemberLost: on_lost,
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
