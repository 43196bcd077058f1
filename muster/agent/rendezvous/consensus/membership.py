"""Membership: members that join, leave or are lost, and processes seen to end. Pure.

A join or a loss makes a new round, never a new attempt. A running job continues until new members have imported what
their workers need. This module also adopts what joining members know of the job and updates the quorum rounds.
"""

from collections.abc import Iterable

from muster._shared.records import replace
from muster._shared.reports import FinalFailure
from muster.agent.rendezvous.consensus.actions import Action, DropMembers, Notify, Send
from muster.agent.rendezvous.consensus.events import Joined, MemberLost, ProcessEnded, Reported
from muster.agent.rendezvous.consensus.failures import break_for_loss, break_round, refund_attempt
from muster.agent.rendezvous.consensus.members import MemberRecord
from muster.agent.rendezvous.consensus.quorum import QuorumRound, RecoveredRound, build_quorum_round
from muster.agent.rendezvous.consensus.recovery import RecoveryRecord, find_later, merge_recovery
from muster.agent.rendezvous.consensus.state import (
    FOREVER,
    Decision,
    Ending,
    Forming,
    JobState,
    RoundRunning,
    describe_member,
    update_recovery,
)
from muster.agent.rendezvous.consensus.waits import find_batch_due_s
from muster.agent.rendezvous.interface import BreakKind, Leaving, Prepared
from muster.agent.rendezvous.round_messages import tell_running_round


def on_joined(state: JobState, event: Joined, now_s: float) -> Decision:
    """Add a member, adopt what it knows, and join it to a round if that is possible."""
    recovered = event.member.recovery
    most = state.rules.max_restarts + recovered.restarts.free
    recovered = replace(recovered, attempt=min(recovered.attempt, most))
    member = replace(event.member, join_order=state.join_count, recovery=recovered)
    if isinstance(state.phase, Ending):
        job_end = state.phase.job_end
        return state, () if job_end is None else (Send(ids=(member.id,), message=job_end),)
    told = tell_running_round(state, member.id)
    is_first_to_import = not member.is_prepared and not state.importing
    state = _remove_from_importing(state, member.id)
    quorum_rounds = tuple(_add_connected(each, member) for each in state.quorum_rounds)
    if any(
        new.ended != quorum_round.ended for new, quorum_round in zip(quorum_rounds, state.quorum_rounds, strict=True)
    ):
        # That process may have just ended: the fence time counts from now.
        state = replace(state, fence_until_s=max(state.fence_until_s, now_s + state.rules.fence_s))
    state = replace(
        state,
        importing=state.importing if member.is_prepared else state.importing.with_item(member.id),
        members=state.members.with_item(member.id, member),
        join_count=state.join_count + 1,
        highest_known_round=max(state.highest_known_round, recovered.round_number, member.highest_round),
        last_join_s=now_s,
        quorum_rounds=quorum_rounds,
        checkpoint=find_later(state.checkpoint, recovered.checkpoint),
    )
    state = _wait_for_other_leader(_adopt_recovery(state, recovered, now_s), member.last_leader_id, now_s)
    state = replace(
        state, quorum_rounds=tuple(each.with_claim(member.id, member.index) for each in state.quorum_rounds)
    )
    if member.is_prepared or state.importing_in_round:
        return _start_batch(state, now_s), told
    if not is_first_to_import or not _accepts_joins(state):
        return state, told
    line = f"{describe_member(state, member)} is waiting to join while it imports: the job continues"
    return state, (*told, Notify(text=line))


def on_prepared(state: JobState, event: Reported[Prepared], now_s: float) -> Decision:
    """Handle that a member has imported what its workers need."""
    state = _remove_from_importing(state, event.id)
    is_new = event.id not in state.assignments
    return _clear_batch(_start_batch(state, now_s) if is_new else state), ()


def _accepts_joins(state: JobState) -> bool:
    """Return whether a round is running to which a node can be added."""
    is_open = isinstance(state.phase, RoundRunning) and not state.phase.succeeded
    return is_open and len(state.assignments) < state.rules.max_nodes


def _start_batch(state: JobState, now_s: float) -> JobState:
    """Record since when a member has been ready to join the running job in a new round."""
    phase = state.phase
    if not isinstance(phase, RoundRunning) or phase.batch_since_s is not None or not _accepts_joins(state):
        return state
    return replace(state, phase=replace(phase, batch_since_s=now_s))


def _clear_batch(state: JobState) -> JobState:
    """Clear the batch if no member is left that is ready to join."""
    phase = state.phase
    if not isinstance(phase, RoundRunning) or phase.batch_since_s is None or _list_newcomers(state):
        return state
    return replace(state, phase=replace(phase, batch_since_s=None))


def _list_newcomers(state: JobState) -> list[MemberRecord]:
    """Return the ready members without an assignment.

    Importing members count as well while the round itself imports.
    """
    importing = () if state.importing_in_round else state.importing
    return [
        member
        for member in state.members.values()
        if member.id not in state.assignments and member.id not in importing and not member.is_leaving
    ]


def _remove_from_importing(state: JobState, member_id: str) -> JobState:
    """Remove a member from the importing ones, because it has finished or is gone."""
    if member_id not in state.importing and member_id not in state.importing_in_round:
        return state
    return replace(
        state,
        importing=state.importing.without(member_id),
        importing_in_round=state.importing_in_round.without(member_id),
    )


def admit_newcomers(state: JobState, now_s: float) -> Decision:
    """Have the running round stopped for the members that joined it, once their batch is due.

    All ranks stop at one step after they have saved. If that cannot be agreed on, the round is broken.
    """
    phase = state.phase
    if not isinstance(phase, RoundRunning) or phase.loss_wait_until_s is not None:
        return state, ()
    drain = phase.drain
    if now_s < find_batch_due_s(state, phase) if drain is None else not drain.is_join:
        return state, ()
    from muster.agent.rendezvous.consensus.drain import begin_join, check_join

    if drain is not None:
        return check_join(state, phase, drain, now_s)
    fresh = [describe_member(state, member) for member in _list_newcomers(state)]
    more = f" and {len(fresh) - 3} more" if len(fresh) > 3 else ""
    verb = "joins" if len(fresh) == 1 else "join"
    return begin_join(state, phase, f"{', '.join(fresh[:3])}{more} {verb}", now_s)


def _add_connected(quorum_round: QuorumRound, member: MemberRecord) -> QuorumRound:
    """Record in a quorum round that one of its members is connected, and which process ends that member has seen."""
    for known, group_rank in zip(member.recovery.quorum_rounds, member.group_ranks, strict=True):
        if quorum_round.is_same(known):
            connected = quorum_round.connected
            if group_rank is not None:
                connected = connected.with_item(member.id, group_rank)
            return replace(quorum_round, connected=connected, ended=quorum_round.ended | known.ended)
    return quorum_round


def _adopt_recovery(state: JobState, recovered: RecoveryRecord, now_s: float) -> JobState:
    """Adopt what a member knows. Until this leader has formed a round, do so by the rules of `merge_recovery`."""
    if state.has_formed_round:
        if recovered.round_number < state.round_number:
            return state
        # Of two leaders, keep the higher attempt. (A member may already know the round's next one.)
        is_later = recovered.round_number > state.round_number
        if is_later and recovered.attempt > state.attempt:
            state = replace(state, attempt=recovered.attempt, restarts=recovered.restarts)
        return _adopt_rival_rounds(state, recovered, now_s)
    phase = state.phase
    if not isinstance(phase, Forming):
        return state
    merged = merge_recovery(update_recovery(state).recovery.value, recovered)
    known = merged.quorum_rounds
    state = replace(
        state,
        attempt=merged.attempt,
        memories=merged.memories,
        restarts=merged.restarts,
        phase=replace(phase, final=merged.final),
        quorum_rounds=tuple(each for each in state.quorum_rounds if any(each.is_same(one) for one in known)),
    )
    if merged.round_number == state.round_number:
        return state
    members = state.members.values()
    quorum_rounds = tuple(_build_quorum_round(state, each, claimants=members) for each in known)
    # An ended node's guard kills its workers within the fence time.
    is_complete = all(len(each.connected) == each.size for each in quorum_rounds)
    return replace(
        state,
        round_number=merged.round_number,
        phase=replace(phase, final=merged.final, skips_last_call=True),
        quorum_rounds=quorum_rounds,
        fence_until_s=state.fence_until_s if is_complete else max(state.fence_until_s, now_s + state.rules.fence_s),
        rejoin_wait_until_s=max(state.rejoin_wait_until_s, now_s + state.rules.rejoin_wait_s),
    )


def _wait_for_other_leader(state: JobState, last_leader: str | None, now_s: float) -> JobState:
    """Wait if a joining member's last leader is unknown here.

    That leader may have formed rounds with this member that the member never received. The member was free to join, so
    that leader's lease has expired. The leases of the other members of such a round expire within `rejoin_wait_s`.
    """
    if last_leader is None or any(each.leader_id == last_leader for each in state.quorum_rounds):
        return state
    if any(member.is_leader and member.id == last_leader for member in state.members.values()):
        return state
    return replace(state, rejoin_wait_until_s=max(state.rejoin_wait_until_s, now_s + state.rules.rejoin_wait_s))


def _adopt_rival_rounds(state: JobState, recovered: RecoveryRecord, now_s: float) -> JobState:
    """Add the rounds of another leader that resigned in favour of this one, because some members may still run them.

    A member that is connected here may have taken part in such a round. So its node index counts as a claim
    only when it has reported again (`on_stopped`). Only this leader's own node cannot have taken part.
    """
    oldest = state.quorum_rounds[0].round_number
    unknown = [
        known
        for known in recovered.quorum_rounds
        if known.round_number >= oldest and not any(each.is_same(known) for each in state.quorum_rounds)
    ]
    if not unknown:
        return state
    own = [member for member in state.members.values() if member.is_leader]
    rivals = [replace(_build_quorum_round(state, known, claimants=own), is_late=True) for known in unknown]
    rejoin_wait_until_s = max(state.rejoin_wait_until_s, now_s + state.rules.rejoin_wait_s)
    return replace(state, quorum_rounds=(*rivals, *state.quorum_rounds), rejoin_wait_until_s=rejoin_wait_until_s)


def _build_quorum_round(
    state: JobState, recovered_round: RecoveredRound, *, claimants: Iterable[MemberRecord]
) -> QuorumRound:
    """Return a quorum round that a joining member brought, with its connected members; see `QuorumRound.with_claim`."""
    quorum_round = build_quorum_round(recovered_round)
    for member in state.members.values():
        quorum_round = _add_connected(quorum_round, member)
    for member in claimants:
        quorum_round = quorum_round.with_claim(member.id, member.index)
    return quorum_round


def on_member_lost(state: JobState, event: MemberLost, now_s: float) -> Decision:
    """Remove a member; a loss from the running round breaks it."""
    member = state.members.get(event.id)
    if member is None:
        return state, ()
    state = replace(
        _remove_from_importing(state, event.id),
        members=state.members.without(event.id),
        quorum_rounds=tuple(each.without(event.id, has_left=member.is_leaving) for each in state.quorum_rounds),
        unacknowledged=state.unacknowledged.without(event.id),
    )
    phase, reason = state.phase, f"{describe_member(state, member)} was lost: {event.reason}"
    if isinstance(phase, Forming) and event.id in phase.stopping:
        phase = replace(phase, stopping=phase.stopping.without(event.id), since_s=now_s)
        state = replace(state, phase=phase, fence_until_s=max(state.fence_until_s, now_s + state.rules.fence_s))
        return refund_attempt(state, phase, event.id, reason, now_s)
    if not _is_lost_from_round(state, member):
        return _clear_batch(state), ()
    state = replace(state, fence_until_s=max(state.fence_until_s, now_s + state.rules.fence_s))
    return break_for_loss(state, event.id, reason, now_s)


def _is_lost_from_round(state: JobState, member: MemberRecord) -> bool:
    """Return whether the running round needs this member: it leads, or its workers have not succeeded yet."""
    phase = state.phase
    if not isinstance(phase, RoundRunning) or member.id not in state.assignments:
        return False
    return member.is_leader or member.id not in phase.succeeded


def drop_stopping(state: JobState, phase: Forming, now_s: float) -> Decision:
    """Count members as lost whose workers should have ended by now; the kernel may be unable to end them.

    Such workers have been killed and never run again. But a member that cannot be trusted to have killed them may hold
    its lease, so no round is formed before the lease has ended. The leader's own member stays, because its node leaves
    by itself.
    """
    overdue = tuple(each for each in phase.stopping if not state.members[each].is_leader)
    state = replace(state, phase=replace(phase, stop_deadline_s=FOREVER))
    if not overdue:
        return state, ()
    nodes = ", ".join(describe_member(state, state.members[each]) for each in overdue[:3])
    more = f" and {len(overdue) - 3} more" if len(overdue) > 3 else ""
    whose, whom = ("its", "it") if len(overdue) == 1 else ("their", "them")
    notice = Notify(text=f"{nodes}{more} did not stop {whose} workers in time: continuing without {whom}")
    actions: tuple[Action, ...] = (notice, DropMembers(ids=overdue, reason="its workers did not stop in time"))
    for member_id in overdue:
        state, more_actions = on_member_lost(state, MemberLost(id=member_id, reason="its workers did not stop"), now_s)
        actions += more_actions
    fence_until_s = max(state.fence_until_s, now_s + state.rules.rejoin_wait_s)
    return replace(state, fence_until_s=fence_until_s), actions


def on_process_ended(state: JobState, event: ProcessEnded) -> Decision:
    """Record in the last quorum round that a lost member's process has ended."""
    assignment = state.assignments.get(event.id)
    if assignment is None or event.id in state.members or not state.quorum_rounds:
        return state, ()
    # Assignments are the last quorum round's. Ranks in older rounds are unknown and not needed: a process end only
    # eases a takeover, never makes a wrong one possible.
    last = state.quorum_rounds[-1]
    if last.round_number == state.round_number:
        last = replace(last, ended=last.ended | {assignment.group_rank})
    return replace(state, quorum_rounds=(*state.quorum_rounds[:-1], last)), ()


def on_leaving(state: JobState, event: Reported[Leaving], now_s: float) -> Decision:
    """Break the running round for a member that announced that it leaves."""
    sender, message = event.id, event.message
    member = state.members[sender]
    state = replace(state, members=state.members.with_item(sender, replace(member, is_leaving=True)))
    if not _is_lost_from_round(state, member):
        return _clear_batch(state), ()
    if message.ends_job:
        cause = f"{describe_member(state, member)}: {message.reason}"
        return break_round(state, BreakKind.FINAL, cause, now_s, FinalFailure(cause=cause))
    # Stopping until its connection closes: only then have its workers ended.
    reason = f"{describe_member(state, member)} left: {message.reason}"
    return break_for_loss(state, sender, reason, now_s, is_interrupt=message.is_interrupt, is_leave=message.is_planned)
