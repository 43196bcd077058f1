"""Breaking a round: failures, hangs and losses, and whether they cost an attempt. Pure.

Only a worker's failure makes a new attempt. The restart budget is the job's. A failure that a loss explains costs no
attempt.
"""

from muster._shared.records import replace
from muster._shared.reports import Failure, FinalFailure
from muster.agent.diagnosis.root_cause import (
    DatedFailure,
    choose_root,
    describe_failure,
    is_symptom,
    order_failures,
)
from muster.agent.rendezvous.consensus.actions import Action, Notify, RoundBreak, Send
from muster.agent.rendezvous.consensus.events import Reported
from muster.agent.rendezvous.consensus.members import ConsensusRules, MemberRecord
from muster.agent.rendezvous.consensus.state import (
    Decision,
    Drain,
    Forming,
    JobState,
    RoundFailures,
    RoundRunning,
    Storm,
    describe_member,
    update_recovery,
)
from muster.agent.rendezvous.faulty_nodes import choose_leaving, judge_certain, judge_node
from muster.agent.rendezvous.interface import BreakKind, NoticeKind, RoundBroken
from muster.agent.rendezvous.report_messages import Idle, Stopped
from muster.agent.rendezvous.restarts import Restarts
from muster.agent.rendezvous.verdicts import Verdict, VerdictRules, decide_verdict
from muster.agent.runtime.limits import STORM_S, STORM_WAIT_S
from muster.agent.runtime.persistent import PersistentSet

GOES_ON = Notify(text="the job goes on: it has not hung", kind=NoticeKind.HANG_OVER)

STORM_ROUNDS = 5
"""More rounds than this within `STORM_S` without a step are a storm."""

STALE_IDLE_S = 1.0
"""How long a report of idleness may take from the measurement to the leader."""


def on_failed(
    state: JobState, sender: str, failed: tuple[Failure, ...], now_s: float, suspicion_s: float = 0.0
) -> Decision:
    """Handle a failure of a member's workers; `suspicion_s` is that of `events.Reported`."""
    phase = state.phase
    if isinstance(phase, Forming) and not (phase.is_new_attempt or phase.final):
        return state, ()  # collateral of another break
    limit_s = now_s + suspicion_s + state.rules.batch_limit_s
    before = state.failures
    failures = replace(
        before,
        seen=before.seen + _date_failures(failed, now_s),
        failed_by=before.failed_by.with_item(sender),
        loss_explains_until_s=before.loss_explains_until_s if before.seen else limit_s,
    )
    state = replace(state, failures=failures)
    if not isinstance(phase, RoundRunning) or phase.loss_wait_until_s is not None:
        return state, ()
    root = choose_root(failures.seen)
    verdict = _decide_verdict(state, root, state.restarts)
    is_alone = len(state.assignments) == 1
    if verdict.final is None or is_alone or choose_leaving(state, root, verdict) is not None:
        return break_for_failure(state, now_s)
    is_check = root is not None and bool(root.check)
    wait_s = state.rules.spare_wait_s if is_check else state.rules.loss_wait_s
    loss_wait_until_s = now_s + suspicion_s + wait_s
    return replace(state, phase=replace(phase, loss_wait_until_s=loss_wait_until_s)), ()


def on_idle(state: JobState, sender: str, message: Idle, now_s: float) -> Decision:
    """Handle that a member's workers are idle, or active again.

    One node may wait for another; see `_check_hang`.
    """
    phase = state.phase
    if isinstance(phase, Forming) and (hung := _list_hung(state)):
        why = hung[0].reason  # its workers do not hang alone: others wait for them
        failures = tuple(replace(each, reason=each.reason or why) for each in message.failures)
        return on_failed(state, sender, failures, now_s)
    if not isinstance(phase, RoundRunning) or sender in phase.succeeded:
        return state, ()
    if message.failures and now_s < phase.succeeded_s + STALE_IDLE_S:
        return state, ()  # if it did not wait for the last success, it reports again
    idle = phase.idle.with_item(sender, message.failures) if message.failures else phase.idle.without(sender)
    urgent = phase.urgent.with_item(sender) if message.is_urgent else phase.urgent.without(sender)
    phase = replace(phase, idle=idle, urgent=urgent)
    if state.rules.hang_action == "report":
        return _note_hang(state, phase)
    return _check_hang(replace(state, phase=phase), phase, now_s)


def _note_hang(state: JobState, phase: RoundRunning) -> Decision:
    """Note that the job hangs, once until a rank is active again. `decisions` has the hang reported."""
    is_hung = _is_hung(state, phase)
    state = replace(state, phase=replace(phase, has_reported_hang=is_hung))
    if phase.has_reported_hang and not is_hung:
        return state, (GOES_ON,)
    return state, ()


def _is_hung(state: JobState, phase: RoundRunning) -> bool:
    """Return whether all nodes that have not succeeded are idle (none is both), or one cannot wait for the others."""
    if not phase.idle:
        return False
    return bool(phase.urgent) or len(phase.idle) + len(phase.succeeded) >= len(state.assignments)


def _check_hang(state: JobState, phase: RoundRunning, now_s: float) -> Decision:
    """Count a hang of the job as a failure of all idle nodes."""
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


def _list_hung(state: JobState) -> tuple[Failure, ...]:
    """Return the failures because of which the round ends as hung, the earliest first; empty: it does not hang."""
    return tuple(each.failure for each in state.failures.seen if each.failure.hung)


def build_verdict_rules(rules: ConsensusRules) -> VerdictRules:
    """Return the rules for verdicts on failures, from the job's rules."""
    return VerdictRules(
        max_restarts=rules.max_restarts,
        flag=rules.max_restarts_flag,
        stops_on_hang=rules.hang_action == "stop",
        stops_on_repeat=rules.is_managed,
        policy=rules.policy,
    )


def _decide_verdict(state: JobState, root: Failure | None, restarts: Restarts) -> Verdict:
    """Return what follows from a failure of the round, after what was known before."""
    return decide_verdict(
        root,
        restarts,
        state.attempt,
        build_verdict_rules(state.rules),
        has_stepped=state.failures.has_stepped,
    )


def break_for_failure(state: JobState, now_s: float) -> Decision:
    """End the round because of the failures seen so far, and the job if no attempt is left.

    If a failure may be a consequence, nothing else follows before all failures are known: see `settle_failure`.
    """
    root = choose_root(state.failures.seen)
    verdict = _decide_verdict(state, root, state.restarts)
    is_provisional = root is not None and is_symptom(root) and (verdict.final is None or not _is_draining(state))
    failures = replace(
        state.failures,
        restarts_before=state.restarts,
        root_rank=None if root is None else root.global_rank,
        is_provisional=is_provisional,
    )
    state = replace(state, restarts=verdict.restarts, failures=failures)
    cause = "" if root is None else root.cause
    if is_provisional:
        reason = describe_failure(root)
        return break_round(
            state, BreakKind.FAILURE, reason, now_s, cause=cause, is_free=verdict.is_free, is_provisional=True
        )
    state, notices = judge_certain(state, root, now_s)
    leaving = choose_leaving(state, root, verdict)
    if verdict.final is not None and leaving is None:
        reason = verdict.final.describe()
        state, actions = break_round(state, BreakKind.FINAL, reason, now_s, verdict.final, cause=cause)
        return state, (*notices, *actions)
    reason = _describe_verdict(state, root, verdict, leaving)
    leaves = () if leaving is None else (leaving[0].id,)
    state, actions = break_round(
        state, BreakKind.FAILURE, reason, now_s, leaves=leaves, cause=cause, is_free=verdict.is_free
    )
    return state, (*notices, *actions)


def _is_draining(state: JobState) -> bool:
    """Return whether a drain is under way.

    What ends the job in a drain is reported as the end, because nodes that are told to stop would otherwise leave it.
    """
    return isinstance(state.phase, RoundRunning) and state.phase.drain is not None


def _describe_verdict(
    state: JobState, root: Failure | None, verdict: Verdict, leaving: tuple[MemberRecord, str] | None
) -> str:
    reason = describe_failure(root)
    if leaving is not None:
        return f"{reason}; {describe_member(state, leaving[0])} leaves: {leaving[1]}"
    return f"{reason}; no other node can take the place of its node" if verdict.is_wanted else reason


def settle_failure(state: JobState, phase: Forming, now_s: float) -> Decision:
    """Decide again once all failures of the round are known, because the first reported one may be a consequence.

    After a hang, the stacks now say which rank blocks the others. A failure that has ended the job stays its end.
    """
    failures, before = state.failures, state.failures.restarts_before
    if failures.is_settled or before is None or not failures.seen:
        return state, ()
    state = replace(state, failures=replace(failures, is_settled=True))
    ordered = order_failures(failures.seen, failures.stacks)
    root = ordered[0]
    if root.collateral:
        return state, ()
    explained = _explain_hang(failures) if root.hung and phase.final is None else ()
    if root.global_rank == failures.root_rank and not failures.is_provisional:
        state, judged = judge_node(state, ordered, now_s)
        return state, (*explained, *judged)
    verdict = _decide_verdict(state, root, before)
    state, notices = judge_certain(replace(state, restarts=verdict.restarts), root, now_s)
    state, more = judge_node(state, ordered, now_s)
    actions: tuple[Action, ...] = (*explained, *notices, *more)
    leaving = None if phase.final is not None else choose_leaving(state, root, verdict)
    final = phase.final or (verdict.final if leaving is None else None)
    state = replace(state, phase=replace(phase, final=final))
    line = _describe_verdict(state, root, verdict, leaving) if final is None else final.describe()
    if leaving is not None:
        state, sends = _send_away(state, phase, leaving[0].id, line, now_s)
        actions = (*actions, *sends)
    if not failures.is_provisional:
        return state, actions if leaving is None else (*actions, Notify(text=line))
    kind = BreakKind.FAILURE if final is None else BreakKind.FINAL
    state, told = _explain_break(state, kind, line, cause=root.cause, is_free=verdict.is_free)
    return state, (*actions, *told)


def _explain_hang(failures: RoundFailures) -> tuple[Action, ...]:
    """Say which ranks blocked the others. If the job ends, its report says it."""
    from muster.agent.diagnosis.hangs import load_judge

    found = load_judge().find_cause(failures.stacks)
    return (Notify(text=found.line, kind=NoticeKind.HANG_CAUSE, ranks=found.named),) if found.line else ()


def _explain_break(
    state: JobState, kind: BreakKind, reason: str, *, cause: str = "", is_free: bool = False
) -> Decision:
    """Tell the nodes why the round was broken, because what they heard then may be a consequence."""
    state = update_recovery(state)
    broken = RoundBroken(
        round_number=state.round_number, kind=kind, reason=reason, cause=cause, is_free=is_free, explains=True
    )
    present = (each for each in state.assignments if each in state.members and not state.members[each].is_leaving)
    return state, (Send(ids=tuple(present), message=RoundBreak(broken=broken, recovery=state.recovery)),)


def _send_away(state: JobState, phase: Forming, member_id: str, reason: str, now_s: float) -> Decision:
    """Have a member leave that has stopped its workers already. The next round waits until it is gone."""
    phase = replace(
        phase,
        stopping=phase.stopping.with_item(member_id),
        stop_deadline_s=now_s + state.rules.stop_margin_s,
    )
    failures = replace(state.failures, failed_by=state.failures.failed_by.with_item(member_id))  # its end explains none
    state = replace(_record_leaving(state, BreakKind.FAILURE, (member_id,)), phase=phase, failures=failures)
    state = update_recovery(state)
    broken = RoundBroken(round_number=state.round_number, kind=BreakKind.FAILURE, reason=reason, leaves=True)
    return state, (Send(ids=(member_id,), message=RoundBreak(broken=broken, recovery=state.recovery)),)


def break_round(
    state: JobState,
    kind: BreakKind,
    reason: str,
    now_s: float,
    final: FinalFailure | None = None,
    *,
    is_interrupt: bool = False,
    is_join: bool = False,
    is_leave: bool = False,
    leaves: tuple[str, ...] = (),
    cause: str = "",
    is_free: bool = False,
    is_provisional: bool = False,
) -> Decision:
    """Ask all members of the round to stop; the next round waits for all of them.

    Members that `leaves` names do not take part in it. `cause` is the class of a failure, and `is_free` says that the
    restart uses none of the allowed ones. With `is_provisional`, `_explain_break` follows.

    All members hear of a drained round, including those without an assignment, which may need to know whose part has
    ended.
    """
    ids = tuple(member_id for member_id in state.assignments if member_id in state.members)
    leaving = leaves or _list_leaving(state, kind, ids)
    limits_s = (state.members[member_id].stop_limit_s for member_id in ids)
    broken = RoundBroken(
        round_number=state.round_number,
        kind=kind,
        reason=reason,
        want_stacks=kind in (BreakKind.FAILURE, BreakKind.FINAL),
        is_hang=bool(_list_hung(state)),
        is_interrupt=is_interrupt,
        is_join=is_join,
        is_leave=is_leave,
        cause=cause,
        is_free=is_free,
        is_provisional=is_provisional,
    )
    told, out = tuple(state.members) if kind is BreakKind.DRAINED else ids, frozenset(leaving)
    phase = Forming(
        since_s=now_s,
        stopping=PersistentSet(ids),
        stop_deadline_s=now_s + max(limits_s, default=0.0) + state.rules.stop_margin_s,
        skips_last_call=True,
        is_new_attempt=kind is BreakKind.FAILURE,
        final=final,
    )
    state, notices = watch_storm(replace(_record_leaving(state, kind, leaving), phase=phase), kind, now_s)
    state = update_recovery(state)
    message = RoundBreak(broken=broken, recovery=state.recovery)
    sends: tuple[Action, ...] = (Send(ids=tuple(each for each in told if each not in out), message=message),)
    if leaving:
        sends = (*sends, Send(ids=leaving, message=replace(message, broken=replace(broken, leaves=True))))
    return state, (*notices, *sends)


def watch_storm(state: JobState, kind: BreakKind, now_s: float) -> Decision:
    """Delay the next round if rounds are formed and broken again and again without a step."""
    recent = tuple(each for each in state.storm.formed_s if now_s - each <= STORM_S)
    if kind in (BreakKind.FINAL, BreakKind.DRAINED) or len(recent) <= STORM_ROUNDS:
        return state, ()
    waits = state.storm.waits
    wait_s = min(STORM_WAIT_S * float(2 ** min(waits, 10)), STORM_S)
    state = replace(state, storm=Storm(formed_s=recent, wait_until_s=now_s + wait_s, waits=waits + 1))
    line = (
        f"{len(recent)} rounds were formed and broken within a minute without a step: the next one waits {wait_s:g} s"
    )
    return state, (Notify(text=line),)


def record_step(state: JobState) -> JobState:
    """Record that a rank of the round has done a step. Earlier failures are forgotten with the verdict."""
    return replace(state, storm=Storm(), failures=replace(state.failures, has_stepped=True))


def record_progress(state: JobState) -> JobState:
    """Record a step of a rank, or a save of all. Earlier failures no longer count."""
    phase, restarts = state.phase, state.restarts
    is_counted = isinstance(phase, Forming) and phase.is_new_attempt
    restarts = restarts.record_progress() if is_counted else restarts.forget_causes()
    return record_step(replace(state, restarts=restarts))


def _list_leaving(state: JobState, kind: BreakKind, ids: tuple[str, ...]) -> tuple[str, ...]:
    """Return the members for which this break ends the job.

    They are those that asked for a committed drain, or all if too few stay.
    """
    phase = state.phase
    drain = phase.drain if isinstance(phase, RoundRunning) else None
    if drain is None or not drain.is_stop or drain.step is None or kind is BreakKind.FINAL:
        return ()
    return tuple(each for each in ids if each in drain.leaving) if has_enough_members(state, drain) else ids


def has_enough_members(state: JobState, drain: Drain) -> bool:
    """Return whether `min` members stay after a drain, including spares and new ones."""
    staying = sum(1 for each in state.members.values() if each.id not in drain.leaving and not each.is_leaving)
    return staying >= state.rules.min_nodes


def _record_leaving(state: JobState, kind: BreakKind, leaving: tuple[str, ...]) -> JobState:
    """Record members that get no assignment any more. After a drain their part in the quorum has ended as well."""
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


def on_stopped(state: JobState, event: Reported[Stopped], now_s: float) -> Decision:
    """Handle that a member has no worker of the round any more."""
    sender, message = event.id, event.message
    if message.has_stepped and not state.failures.has_stepped:
        state = record_progress(state)
    member, phase = state.members[sender], state.phase
    if isinstance(phase, RoundRunning) and sender not in phase.succeeded:
        # Fenced without losing its connection: its round ends for all. If it led, they are fenced too: its lease has
        # expired, and another leader may have formed a round.
        state = replace(state, failures=RoundFailures())
        reason = f"{describe_member(state, member)} had to stop its workers"
        kind = BreakKind.FENCED if member.is_leader else BreakKind.MEMBERSHIP
        state, actions = break_round(state, kind, reason, now_s)
        state, more = on_stopped(state, event, now_s)
        return state, actions + more
    if not isinstance(phase, Forming) or sender not in phase.stopping:
        return state, ()
    member = replace(member, port=message.port, can_host_store=message.can_host_store, offers=message.offers)
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


def refund_attempt(state: JobState, phase: Forming, lost_id: str, reason: str, now_s: float) -> Decision:
    """Refund the attempt of a failure right before its cause, a loss, as when the connection to the lost node broke."""
    failures = state.failures
    is_explained = now_s <= failures.loss_explains_until_s and lost_id not in failures.failed_by
    if not (phase.is_new_attempt and is_explained):
        return state, ()
    phase = replace(phase, is_new_attempt=False)
    restarts = state.restarts if failures.restarts_before is None else failures.restarts_before
    state = replace(state, phase=phase, restarts=restarts, failures=RoundFailures(has_stepped=failures.has_stepped))
    return _explain_break(state, BreakKind.MEMBERSHIP, reason) if failures.is_provisional else (state, ())


def break_for_loss(
    state: JobState,
    lost_id: str,
    reason: str,
    now_s: float,
    *,
    is_interrupt: bool = False,
    is_leave: bool = False,
) -> Decision:
    """End the running round because one of its members was lost or leaves."""
    if lost_id in state.failures.failed_by:
        return break_for_failure(state, now_s)
    state = replace(state, failures=RoundFailures())
    return break_round(state, BreakKind.MEMBERSHIP, reason, now_s, is_interrupt=is_interrupt, is_leave=is_leave)
