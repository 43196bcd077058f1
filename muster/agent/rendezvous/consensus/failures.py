"""Breaking a round: failures, hangs and losses, and whether they cost an attempt. Pure.

Only a worker's failure makes a new attempt. The restart budget is the job's. A failure that a loss explains costs no
attempt.
"""

from muster._shared.records import replace
from muster._shared.reports import Failure, FinalFailure
from muster.agent.diagnosis.root_cause import DatedFailure, choose_root, describe_failure, find_signature
from muster.agent.rendezvous.consensus.actions import Action, Notify, RoundBreak, Send
from muster.agent.rendezvous.consensus.quorum import ENDED_KEPT
from muster.agent.rendezvous.consensus.state import (
    Decision,
    Drain,
    Ending,
    Forming,
    JobState,
    RoundFailures,
    RoundRunning,
    describe_member,
)
from muster.agent.rendezvous.interface import BreakKind, NoticeKind, RoundBroken
from muster.agent.rendezvous.report_messages import Idle, Stopped
from muster.agent.rendezvous.restart_budget import find_final_failure
from muster.agent.runtime.persistent import PersistentSet

GOES_ON = Notify(text="the job goes on: it has not hung", kind=NoticeKind.HANG_OVER)

STALE_IDLE_S = 1.0
"""How long a report of idleness may take from the measurement to the leader."""


def on_failed(
    state: JobState, sender: str, failed: tuple[Failure, ...], now_s: float, suspicion_s: float = 0.0
) -> Decision:
    """Workers of a member failed; `suspicion_s` as in `events.Reported`."""
    phase = state.phase
    if isinstance(phase, Ending):
        return state, ()
    if isinstance(phase, Forming) and not (phase.is_new_attempt or phase.final):
        return state, ()  # The round was broken for another reason: this is collateral.
    limit_s = now_s + suspicion_s + state.rules.batch_limit_s
    before = state.failures
    failures = replace(
        before,
        seen=before.seen + _date_failures(failed, now_s),
        failed_by=before.failed_by.with_item(sender),
        loss_explains_until_s=before.loss_explains_until_s if before.seen else limit_s,
    )
    state = replace(state, failures=failures)
    if isinstance(phase, Forming) or phase.loss_wait_until_s is not None:
        return state, ()
    if _find_final_failure(state) is None or len(state.assignments) == 1:
        return break_for_failure(state, now_s)
    loss_wait_until_s = now_s + suspicion_s + state.rules.loss_wait_s
    return replace(state, phase=replace(phase, loss_wait_until_s=loss_wait_until_s)), ()


def on_idle(state: JobState, sender: str, message: Idle, now_s: float) -> Decision:
    """Workers of a member became idle, or active again. One node may wait for another; see `_check_hang`."""
    phase = state.phase
    if isinstance(phase, Forming) and _has_hung(state):  # its workers do not hang by themselves: others wait for them
        return on_failed(state, sender, message.failures, now_s)
    if not isinstance(phase, RoundRunning) or sender in phase.succeeded:
        return state, ()
    if message.failures and now_s < phase.succeeded_s + STALE_IDLE_S:
        return state, ()  # it may have waited for the member that has just succeeded; if it hangs, it says so again
    idle = phase.idle.with_item(sender, message.failures) if message.failures else phase.idle.without(sender)
    urgent = phase.urgent.with_item(sender) if message.is_urgent else phase.urgent.without(sender)
    phase = replace(phase, idle=idle, urgent=urgent)
    if state.rules.hang_action == "report":
        return _note_hang(state, phase)
    return _check_hang(replace(state, phase=phase), phase, now_s)


def _note_hang(state: JobState, phase: RoundRunning) -> Decision:
    """Note that the job hangs, once until a rank is active again: `decisions` has it reported."""
    is_hung = _is_hung(state, phase)
    state = replace(state, phase=replace(phase, has_reported_hang=is_hung))
    if phase.has_reported_hang and not is_hung:
        return state, (GOES_ON,)
    return state, ()


def _is_hung(state: JobState, phase: RoundRunning) -> bool:
    """Every node that has not succeeded is idle (no member is both), or one cannot wait for the others."""
    if not phase.idle:
        return False
    return bool(phase.urgent) or len(phase.idle) + len(phase.succeeded) >= len(state.assignments)


def _check_hang(state: JobState, phase: RoundRunning, now_s: float) -> Decision:
    """When the job hangs, this counts as a failure of all nodes that are idle."""
    actions: tuple[Action, ...] = ()
    if not _is_hung(state, phase):
        return state, actions
    for member_id in state.assignments:
        if member_id not in phase.idle:
            continue
        state, more = on_failed(state, member_id, phase.idle[member_id], now_s)
        actions += more
    return state, actions


def _date_failures(failures: tuple[Failure, ...], now_s: float) -> tuple[DatedFailure, ...]:
    return tuple(DatedFailure(when_s=now_s - failure.age_s, failure=failure) for failure in failures)


def _has_hung(state: JobState) -> bool:
    """Whether the round ends because of a hang."""
    return any(each.failure.hung for each in state.failures.seen)


def _find_final_failure(state: JobState) -> FinalFailure | None:
    """Why the failures seen end the job, None when another attempt is due."""
    rules, root = state.rules, choose_root(state.failures.seen)
    return find_final_failure(
        root,
        state.startup_signature,
        state.attempt,
        rules.max_restarts,
        rules.max_restarts_flag,
        stops_on_hang=rules.hang_action == "stop",
    )


def break_for_failure(state: JobState, now_s: float) -> Decision:
    """End the round because of the failures seen so far, and the job when no attempt is left."""
    final = _find_final_failure(state)
    root = choose_root(state.failures.seen)
    if final is not None:
        return break_round(state, BreakKind.FINAL, final.describe(), now_s, final)
    return break_round(
        replace(state, startup_signature=find_signature(root)), BreakKind.FAILURE, describe_failure(root), now_s
    )


def break_round(
    state: JobState,
    kind: BreakKind,
    reason: str,
    now_s: float,
    final: FinalFailure | None = None,
    *,
    is_interrupt: bool = False,
) -> Decision:
    """Ask all members of the round to stop; the next round waits for all of them.

    Of a drained round all members hear, those without an assignment too: they may need to know whose part has ended.
    """
    ids = tuple(member_id for member_id in state.assignments if member_id in state.members)
    leaving = _list_leaving(state, kind, ids)
    limits_s = (state.members[member_id].stop_limit_s for member_id in ids)
    broken = RoundBroken(
        round_number=state.round_number,
        kind=kind,
        reason=reason,
        want_stacks=kind in (BreakKind.FAILURE, BreakKind.FINAL),
        is_hang=_has_hung(state),
        is_interrupt=is_interrupt,
    )
    ended = leaving[:ENDED_KEPT] if kind is BreakKind.DRAINED else ()
    message = RoundBreak(
        broken=broken,
        next_attempt=state.attempt + (1 if kind is BreakKind.FAILURE else 0),
        startup_signature=state.startup_signature,
        final=final,
        ended=frozenset(state.assignments[each].group_rank for each in ended),
    )
    told, out = tuple(state.members) if kind is BreakKind.DRAINED else ids, frozenset(leaving)
    sends: tuple[Action, ...] = (Send(ids=tuple(each for each in told if each not in out), message=message),)
    if leaving:
        sends = (*sends, Send(ids=leaving, message=replace(message, broken=replace(broken, leaves=True))))
    phase = Forming(
        since_s=now_s,
        stopping=PersistentSet(ids),
        stop_deadline_s=now_s + max(limits_s, default=0.0) + state.rules.stop_margin_s,
        skips_last_call=True,
        is_new_attempt=kind is BreakKind.FAILURE,
        final=final,
    )
    return replace(_record_leaving(state, kind, leaving), phase=phase), sends


def _list_leaving(state: JobState, kind: BreakKind, ids: tuple[str, ...]) -> tuple[str, ...]:
    """The members for which this break ends the job: those that asked for a committed drain, or all if too few stay."""
    phase = state.phase
    drain = phase.drain if isinstance(phase, RoundRunning) else None
    if drain is None or not drain.is_stop or drain.step is None or kind is BreakKind.FINAL:
        return ()
    return tuple(each for each in ids if each in drain.leaving) if has_enough_members(state, drain) else ids


def has_enough_members(state: JobState, drain: Drain) -> bool:
    """True when `min` members stay after a drain, spares and new ones among them."""
    staying = sum(1 for each in state.members.values() if each.id not in drain.leaving and not each.is_leaving)
    return staying >= state.rules.min_nodes


def _record_leaving(state: JobState, kind: BreakKind, leaving: tuple[str, ...]) -> JobState:
    """These members get no assignment any more; after a drain their part in the quorum has ended, too."""
    if not leaving:
        return state
    members = state.members
    for each in leaving:
        members = members.with_item(each, replace(members[each], is_leaving=True))
    state = replace(state, members=members)
    last = state.quorum_rounds[-1]
    if kind is not BreakKind.DRAINED or last.round_number != state.round_number:
        return state
    ended = last.ended.union(state.assignments[each].group_rank for each in leaving)
    return replace(state, quorum_rounds=(*state.quorum_rounds[:-1], replace(last, ended=ended)))


def on_stopped(state: JobState, sender: str, message: Stopped, now_s: float) -> Decision:
    """No worker of the round is left on a member."""
    member, phase = state.members[sender], state.phase
    if isinstance(phase, RoundRunning) and sender not in phase.succeeded:
        # It was fenced without losing its connection: its round ends for all members. They are fenced, too, if it was
        # the leader: its lease has expired, so another leader may have formed a round.
        state = replace(state, failures=RoundFailures())
        reason = f"{describe_member(state, member)} had to stop its workers"
        kind = BreakKind.FENCED if member.is_leader else BreakKind.MEMBERSHIP
        state, actions = break_round(state, kind, reason, now_s)
        state, more = on_stopped(state, sender, message, now_s)
        return state, actions + more
    if not isinstance(phase, Forming) or sender not in phase.stopping:
        return state, ()
    member = replace(member, port=message.port, can_host_store=message.can_host_store)
    failures = replace(state.failures, stacks=state.failures.stacks + message.stacks)
    if phase.is_new_attempt or phase.final is not None:
        failures = replace(failures, seen=failures.seen + _date_failures(message.failures, now_s))
    return replace(
        state,
        phase=replace(phase, stopping=phase.stopping.without(sender), since_s=now_s),
        members=state.members.with_item(sender, member),
        quorum_rounds=tuple(each.with_claim(member.id, member.index) for each in state.quorum_rounds),
        failures=failures,
    ), ()


def refund_attempt(state: JobState, phase: Forming, lost_id: str, now_s: float) -> JobState:
    """A failure right before a loss was caused by it (a connection to the lost node broke): it costs no attempt."""
    failures = state.failures
    is_explained = now_s <= failures.loss_explains_until_s and lost_id not in failures.failed_by
    if not (phase.is_new_attempt and is_explained):
        return state
    phase = replace(phase, is_new_attempt=False)
    return replace(state, phase=phase, startup_signature=None, failures=RoundFailures())


def break_for_loss(state: JobState, lost_id: str, reason: str, now_s: float, *, is_interrupt: bool = False) -> Decision:
    """End the running round because a member of it was lost or leaves."""
    if lost_id in state.failures.failed_by:
        return break_for_failure(state, now_s)
    state = replace(state, failures=RoundFailures())
    return break_round(state, BreakKind.MEMBERSHIP, reason, now_s, is_interrupt=is_interrupt)
