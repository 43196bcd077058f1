"""Why a round ends before its workers are done: failures, hangs, losses; and what they cost. Pure.

Only a worker's failure makes a new attempt and uses the budget, which belongs to the job. One that a loss explains
costs nothing.
"""

from muster.agent.diagnosis.report import Failure
from muster.agent.diagnosis.root_cause import DatedFailure, choose_root, describe_failure, explain_end, find_signature
from muster.agent.rendezvous.consensus.actions import Action, BreakRound
from muster.agent.rendezvous.consensus.events import Failed, Idle, Stopped
from muster.agent.rendezvous.consensus.persistent import PersistentSet
from muster.agent.rendezvous.consensus.state import FOREVER, Decision, JobPhase, JobState, describe_member
from muster.agent.rendezvous.interface import BreakKind
from muster.agent.runtime.records import replace


def on_failed(state: JobState, event: Failed, now_s: float) -> Decision:
    """Workers of a member failed."""
    if event.round != state.round or event.id not in state.seats or state.phase is JobPhase.ENDING:
        return state, ()
    if state.phase is JobPhase.FORMING and not (state.charged or state.final):
        return state, ()  # The round was broken for another reason: this is collateral.
    first = not state.failures
    state = replace(
        state,
        failures=state.failures + _date_failures(event.failures, now_s),
        failed_by=state.failed_by.with_one(event.id),
        excused_until_s=now_s + event.excuse_s + state.rules.batch_limit_s if first else state.excused_until_s,
    )
    if state.phase is JobPhase.FORMING or state.blame_until_s is not None:
        return state, ()
    if _why_final(state) is None or len(state.seats) == 1:
        return break_for_failure(state, now_s)
    return replace(state, blame_until_s=now_s + event.excuse_s + state.rules.blame_s), ()


def on_idle(state: JobState, event: Idle, now_s: float) -> Decision:
    """A node may wait for another; a job hangs when every node that still works does nothing."""
    if event.round != state.round or event.id not in state.seats or state.phase is not JobPhase.RUNNING:
        return state, ()
    if event.id in state.done:
        return state, ()
    idle = state.idle.with_item(event.id, event.failures) if event.failures else state.idle.without(event.id)
    return _judge_idle(replace(state, idle=idle), now_s)


def _judge_idle(state: JobState, now_s: float) -> Decision:
    outputs: tuple[Action, ...] = ()
    if not state.idle or len(state.idle) + len(state.done) < len(state.seats):  # nobody is both
        return state, outputs
    for member_id in state.seats:
        if member_id not in state.idle:
            continue
        failed = Failed(id=member_id, round=state.round, failures=state.idle[member_id])
        state, more = on_failed(state, failed, now_s)
        outputs += more
    return state, outputs


def _date_failures(failures: tuple[Failure, ...], now_s: float) -> tuple[DatedFailure, ...]:
    return tuple(DatedFailure(when_s=now_s - failure.age_s, failure=failure) for failure in failures)


def _why_final(state: JobState) -> str | None:
    """One line when the failures seen end the job, None when another attempt is due."""
    return explain_end(choose_root(state.failures), state.early, state.attempt, state.rules.max_restarts)


def break_for_failure(state: JobState, now_s: float) -> Decision:
    """The failures seen so far end the round, and perhaps the job."""
    final = _why_final(state)
    root = choose_root(state.failures)
    state = replace(state, blame_until_s=None)
    if final is not None:
        return break_round(replace(state, final=final), BreakKind.FINAL, final, now_s)
    state = replace(state, charged=True, reform=True, early=find_signature(root))
    return break_round(state, BreakKind.FAILURE, describe_failure(root), now_s)


def break_round(state: JobState, kind: BreakKind, reason: str, now_s: float) -> Decision:
    """Tell everybody in the round to stop; the next one waits for all of them."""
    ids = tuple(member_id for member_id in state.seats if member_id in state.members)
    output = BreakRound(
        ids=ids,
        number=state.round,
        kind=kind,
        reason=reason,
        want_stacks=kind in (BreakKind.FAILURE, BreakKind.FINAL),
        next_attempt=state.attempt + (1 if state.charged else 0),
        early=state.early,
    )
    state = replace(
        state,
        phase=JobPhase.FORMING,
        pending=PersistentSet(ids),
        since_s=now_s,
        batch_since_s=None,
        end_until_s=FOREVER,
    )
    return state, (output,)


def on_stopped(state: JobState, event: Stopped, now_s: float) -> Decision:
    """No worker of the round is left on a member."""
    peer = state.members.get(event.id)
    if peer is None or event.round != state.round:
        return state, ()
    if state.phase is JobPhase.RUNNING and event.id in state.seats and event.id not in state.done:
        # It was fenced without losing its connection: its round is over for everybody. At once, if it was the leader
        # that could not know any more that nobody else goes on: then the others of its round cannot either.
        reform = replace(state, failures=(), failed_by=PersistentSet(), blame_until_s=None, reform=True)
        reason = f"{describe_member(state, peer)} had to stop its workers"
        kind = BreakKind.FENCED if peer.is_leader else BreakKind.MEMBERSHIP
        state, outputs = break_round(reform, kind, reason, now_s)
        state, more = on_stopped(state, event, now_s)
        return state, outputs + more
    if event.id not in state.pending:
        return state, ()
    keep = state.charged or state.final is not None
    return replace(
        state,
        members=state.members.with_item(event.id, replace(peer, port=event.port)),
        pending=state.pending.without(event.id),
        bases=tuple(base.with_claim(peer.id, peer.index) for base in state.bases),
        failures=state.failures + _date_failures(event.failures, now_s) if keep else state.failures,
        stacks=state.stacks + event.stacks,
    ), ()


def excuse_failure(state: JobState, lost_id: str, now_s: float) -> JobState:
    """A failure right before a loss was caused by it (a peer's connection broke): it costs no attempt."""
    explained = now_s <= state.excused_until_s and lost_id not in state.failed_by
    if not (state.charged and explained):
        return state
    return replace(state, charged=False, early=None, failures=(), stacks=())


def break_for_loss(state: JobState, lost_id: str, reason: str, now_s: float) -> Decision:
    """A member of the running round is gone, or goes."""
    if lost_id in state.failed_by:
        return break_for_failure(replace(state, blame_until_s=None), now_s)
    state = replace(state, failures=(), failed_by=PersistentSet(), blame_until_s=None, reform=True)
    return break_round(state, BreakKind.MEMBERSHIP, reason, now_s)
