"""Breaking a round: failures, hangs and losses, and whether they cost an attempt. Pure.

Only a worker's failure makes a new attempt. The restart budget is the job's. A failure that a loss explains costs no
attempt.
"""

from muster.agent.diagnosis.report import Failure
from muster.agent.diagnosis.root_cause import DatedFailure, choose_root, describe_failure, find_signature
from muster.agent.rendezvous.consensus.actions import Action, BreakRound
from muster.agent.rendezvous.consensus.events import Failed, Idle, Stopped
from muster.agent.rendezvous.consensus.restart_budget import find_final_reason
from muster.agent.rendezvous.consensus.state import FOREVER, Decision, JobPhase, JobState, describe_member
from muster.agent.rendezvous.interface import BreakKind
from muster.agent.runtime.persistent import PersistentSet
from muster.agent.runtime.records import replace


def on_failed(state: JobState, event: Failed, now_s: float) -> Decision:
    """Workers of a member failed."""
    if event.round_number != state.round_number or event.id not in state.assignments or state.phase is JobPhase.ENDING:
        return state, ()
    if state.phase is JobPhase.FORMING and not (state.is_new_attempt or state.final_reason):
        return state, ()  # The round was broken for another reason: this is collateral.
    limit_s = now_s + event.suspicion_s + state.rules.batch_limit_s
    state = replace(
        state,
        failures=state.failures + _date_failures(event.failures, now_s),
        failed_by=state.failed_by.with_item(event.id),
        loss_explains_until_s=state.loss_explains_until_s if state.failures else limit_s,
    )
    if state.phase is JobPhase.FORMING or state.loss_wait_until_s is not None:
        return state, ()
    if _find_final_reason(state) is None or len(state.assignments) == 1:
        return break_for_failure(state, now_s)
    return replace(state, loss_wait_until_s=now_s + event.suspicion_s + state.rules.loss_wait_s), ()


def on_idle(state: JobState, event: Idle, now_s: float) -> Decision:
    """Workers of a member became idle, or active again. One node may wait for another; see `_check_hang`."""
    if (
        event.round_number != state.round_number
        or event.id not in state.assignments
        or state.phase is not JobPhase.RUNNING
    ):
        return state, ()
    if event.id in state.succeeded:
        return state, ()
    idle = state.idle.with_item(event.id, event.failures) if event.failures else state.idle.without(event.id)
    return _check_hang(replace(state, idle=idle), now_s)


def _check_hang(state: JobState, now_s: float) -> Decision:
    """The job hangs when every node that has not succeeded is idle: this counts as a failure of all of them."""
    actions: tuple[Action, ...] = ()
    if not state.idle or len(state.idle) + len(state.succeeded) < len(state.assignments):  # no member is both
        return state, actions
    for member_id in state.assignments:
        if member_id not in state.idle:
            continue
        failed = Failed(id=member_id, round_number=state.round_number, failures=state.idle[member_id])
        state, more = on_failed(state, failed, now_s)
        actions += more
    return state, actions


def _date_failures(failures: tuple[Failure, ...], now_s: float) -> tuple[DatedFailure, ...]:
    return tuple(DatedFailure(when_s=now_s - failure.age_s, failure=failure) for failure in failures)


def _find_final_reason(state: JobState) -> str | None:
    """One line when the failures seen end the job, None when another attempt is due."""
    return find_final_reason(
        choose_root(state.failures), state.startup_signature, state.attempt, state.rules.max_restarts
    )


def break_for_failure(state: JobState, now_s: float) -> Decision:
    """End the round because of the failures seen so far, and the job when no attempt is left."""
    final_reason = _find_final_reason(state)
    root = choose_root(state.failures)
    state = replace(state, loss_wait_until_s=None)
    if final_reason is not None:
        return break_round(replace(state, final_reason=final_reason), BreakKind.FINAL, final_reason, now_s)
    state = replace(state, is_new_attempt=True, skips_last_call=True, startup_signature=find_signature(root))
    return break_round(state, BreakKind.FAILURE, describe_failure(root), now_s)


def break_round(state: JobState, kind: BreakKind, reason: str, now_s: float) -> Decision:
    """Ask all members of the round to stop; the next round waits for all of them."""
    ids = tuple(member_id for member_id in state.assignments if member_id in state.members)
    limits_s = (state.members[member_id].stop_limit_s for member_id in ids)
    action = BreakRound(
        ids=ids,
        round_number=state.round_number,
        kind=kind,
        reason=reason,
        want_stacks=kind in (BreakKind.FAILURE, BreakKind.FINAL),
        next_attempt=state.attempt + (1 if state.is_new_attempt else 0),
        startup_signature=state.startup_signature,
    )
    state = replace(
        state,
        phase=JobPhase.FORMING,
        stopping=PersistentSet(ids),
        stop_deadline_s=now_s + max(limits_s, default=0.0) + state.rules.stop_margin_s,
        forming_since_s=now_s,
        batch_since_s=None,
        end_wait_until_s=FOREVER,
    )
    return state, (action,)


def on_stopped(state: JobState, event: Stopped, now_s: float) -> Decision:
    """No worker of the round is left on a member."""
    member = state.members.get(event.id)
    if member is None or event.round_number != state.round_number:
        return state, ()
    if state.phase is JobPhase.RUNNING and event.id in state.assignments and event.id not in state.succeeded:
        # It was fenced without losing its connection: its round ends for all members. They are fenced, too, if it was
        # the leader: its lease has expired, so another leader may have formed a round.
        state = _drop_failures(state)
        reason = f"{describe_member(state, member)} had to stop its workers"
        kind = BreakKind.FENCED if member.is_leader else BreakKind.MEMBERSHIP
        state, actions = break_round(state, kind, reason, now_s)
        state, more = on_stopped(state, event, now_s)
        return state, actions + more
    if event.id not in state.stopping:
        return state, ()
    keep = state.is_new_attempt or state.final_reason is not None
    return replace(
        state,
        members=state.members.with_item(event.id, replace(member, port=event.port)),
        stopping=state.stopping.without(event.id),
        forming_since_s=now_s,
        quorum_rounds=tuple(each.with_claim(member.id, member.index) for each in state.quorum_rounds),
        failures=state.failures + _date_failures(event.failures, now_s) if keep else state.failures,
        stacks=state.stacks + event.stacks,
    ), ()


def refund_attempt(state: JobState, lost_id: str, now_s: float) -> JobState:
    """A failure right before a loss was caused by it (a connection to the lost node broke): it costs no attempt."""
    explained = now_s <= state.loss_explains_until_s and lost_id not in state.failed_by
    if not (state.is_new_attempt and explained):
        return state
    return replace(state, is_new_attempt=False, startup_signature=None, failures=(), stacks=())


def break_for_loss(state: JobState, lost_id: str, reason: str, now_s: float) -> Decision:
    """End the running round because a member of it was lost or leaves."""
    if lost_id in state.failed_by:
        return break_for_failure(replace(state, loss_wait_until_s=None), now_s)
    return break_round(_drop_failures(state), BreakKind.MEMBERSHIP, reason, now_s)


def _drop_failures(state: JobState) -> JobState:
    return replace(state, failures=(), failed_by=PersistentSet(), loss_wait_until_s=None, skips_last_call=True)
