"""Membership: members that join, leave or are lost, and processes seen to end. Pure.

A join or a loss makes a new round, never a new attempt. A running job continues until new members have imported what
their workers need. This module also adopts the recovery state of joining members and updates the quorum bases.
"""

from collections.abc import Iterable

from muster.agent.rendezvous.consensus.actions import Notify
from muster.agent.rendezvous.consensus.events import Joined, Leaving, MemberLost, Prepared, ProcessEnded
from muster.agent.rendezvous.consensus.failures import break_for_loss, break_round, refund_attempt
from muster.agent.rendezvous.consensus.members import MemberRecord, RecoveryState
from muster.agent.rendezvous.consensus.quorum import CarriedBase, QuorumBase, build_base
from muster.agent.rendezvous.consensus.state import FOREVER, Decision, JobPhase, JobState, describe_member
from muster.agent.rendezvous.interface import BreakKind
from muster.agent.runtime.records import replace


def on_joined(state: JobState, event: Joined, now_s: float) -> Decision:
    """Add a member, adopt what it knows, and join it to a round when that is possible."""
    recovered = event.member.recovery_state
    recovered = replace(recovered, attempt=min(recovered.attempt, state.rules.max_restarts))  # there are no more
    member = replace(event.member, join_order=state.join_count, recovery_state=recovered)
    if state.phase is JobPhase.ENDING and state.job_end is not None:
        return state, (replace(state.job_end, ids=(member.id,)),)
    is_first_to_import = not member.is_prepared and not state.importing
    state = _remove_from_importing(state, member.id)
    quorum_bases = tuple(_add_connected(base, member) for base in state.quorum_bases)
    if any(new.ended != base.ended for new, base in zip(quorum_bases, state.quorum_bases, strict=True)):
        # That process may have ended a moment ago: its workers are killed within the fence time, counted from now.
        state = replace(state, fence_until_s=max(state.fence_until_s, now_s + state.rules.fence_s))
    state = replace(
        state,
        importing=state.importing if member.is_prepared else state.importing.with_item(member.id),
        members=state.members.with_item(member.id, member),
        join_count=state.join_count + 1,
        highest_known_round=max(state.highest_known_round, recovered.round),
        last_join_s=now_s,
        quorum_bases=quorum_bases,
    )
    state = _wait_for_other_leader(_adopt_recovery_state(state, recovered, now_s), recovered.leader_id, now_s)
    state = replace(state, quorum_bases=tuple(base.with_claim(member.id, member.index) for base in state.quorum_bases))
    if member.is_prepared or state.importing_in_round:
        return _start_batch(state, now_s), ()
    if not is_first_to_import or not _accepts_joins(state):
        return state, ()
    line = f"{describe_member(state, member)} is waiting to join while it imports: the job continues"
    return state, (Notify(text=line),)


def on_prepared(state: JobState, event: Prepared, now_s: float) -> Decision:
    """A member has imported what its workers need."""
    state = _remove_from_importing(state, event.id)
    is_new = event.id in state.members and event.id not in state.assignments
    return _clear_batch(_start_batch(state, now_s) if is_new else state), ()


def _accepts_joins(state: JobState) -> bool:
    """True when a round runs to which a node can be added."""
    return state.phase is JobPhase.RUNNING and not state.succeeded and len(state.assignments) < state.rules.max_nodes


def _start_batch(state: JobState, now_s: float) -> JobState:
    """Record since when a member is ready to join the running job in a new round."""
    if state.batch_since_s is not None or not _accepts_joins(state):
        return state
    return replace(state, batch_since_s=now_s)


def _clear_batch(state: JobState) -> JobState:
    """Clear the batch when no member is left that is ready to join."""
    if state.batch_since_s is None or _list_newcomers(state):
        return state
    return replace(state, batch_since_s=None)


def _list_newcomers(state: JobState) -> list[MemberRecord]:
    """Members without an assignment that are ready. Those that import count, too, while the round itself imports."""
    importing = () if state.importing_in_round else state.importing
    return [
        member
        for member in state.members.values()
        if member.id not in state.assignments and member.id not in importing and not member.is_leaving
    ]


def _remove_from_importing(state: JobState, member_id: str) -> JobState:
    """Remove a member from those that import: it has finished, or it is gone."""
    if member_id not in state.importing and member_id not in state.importing_in_round:
        return state
    return replace(
        state,
        importing=state.importing.without(member_id),
        importing_in_round=state.importing_in_round.without(member_id),
    )


def break_for_joins(state: JobState, now_s: float) -> Decision:
    """Break the running round for the members that joined it, when their batch is due."""
    if state.phase is not JobPhase.RUNNING or state.loss_wait_until_s is not None or now_s < batch_due_s(state):
        return state, ()
    fresh = [describe_member(state, member) for member in _list_newcomers(state)]
    joined = ", ".join(fresh[:3]) + (f" and {len(fresh) - 3} more" if len(fresh) > 3 else "")
    return break_round(replace(state, skips_last_call=True), BreakKind.MEMBERSHIP, f"{joined} joined", now_s)


def batch_due_s(state: JobState) -> float:
    """When the running round is broken for members that joined it; infinity when there are none."""
    if state.batch_since_s is None:
        return FOREVER
    importing = 0 if state.importing_in_round else len(state.importing)
    if len(state.members) - importing >= state.rules.max_nodes:
        return state.batch_since_s  # the job is full: no other node can join
    if importing:
        return state.batch_since_s + state.rules.import_limit_s
    return min(state.last_join_s + state.rules.batch_s, state.batch_since_s + state.rules.batch_limit_s)


def _add_connected(base: QuorumBase, member: MemberRecord) -> QuorumBase:
    """Record in a base that one of its members is connected, and which process ends that member has seen."""
    for carried in member.recovery_state.quorum_bases:
        if base.is_same(carried):
            connected = base.connected if carried.rank is None else base.connected.with_item(member.id, carried.rank)
            return replace(base, connected=connected, ended=base.ended | carried.ended)
    return base


def _adopt_recovery_state(state: JobState, recovered: RecoveryState, now_s: float) -> JobState:
    """Adopt round number, attempt and quorum bases of a member that knows a later round than this leader."""
    if recovered.round < state.round:
        return state
    attempt = max(state.attempt, recovered.attempt)
    if state.has_formed_round:
        # There were two leaders: keep the higher attempt. (For the same round a member may know the next one already.)
        state = state if recovered.round == state.round else replace(state, attempt=attempt)
        return _adopt_rival_rounds(state, recovered, now_s)
    if recovered.round == state.round:
        return replace(
            state,
            attempt=attempt,
            startup_signature=state.startup_signature or recovered.startup_signature,
            final_reason=state.final_reason or recovered.final_reason,
        )
    members = state.members.values()
    quorum_bases = tuple(_build_base(state, carried, claimants=members) for carried in recovered.quorum_bases)
    # The guard of a node that was seen to end kills its workers within the fence time.
    is_complete = all(len(base.connected) == base.size for base in quorum_bases)
    return replace(
        state,
        round=recovered.round,
        attempt=recovered.attempt,
        startup_signature=recovered.startup_signature,
        final_reason=recovered.final_reason,
        quorum_bases=quorum_bases,
        skips_last_call=True,
        fence_until_s=state.fence_until_s if is_complete else max(state.fence_until_s, now_s + state.rules.fence_s),
        rejoin_wait_until_s=max(state.rejoin_wait_until_s, now_s + state.rules.rejoin_wait_s),
    )


def _wait_for_other_leader(state: JobState, last_leader: str | None, now_s: float) -> JobState:
    """Wait when a joining member's last leader is unknown here.

    That leader may have formed rounds with this member that the member never received. The member was free to join, so
    that leader's lease has expired; the leases of the other members of such a round expire within `rejoin_wait_s`.
    """
    if last_leader is None or any(base.leader_id == last_leader for base in state.quorum_bases):
        return state
    if any(member.is_leader and member.id == last_leader for member in state.members.values()):
        return state
    return replace(state, rejoin_wait_until_s=max(state.rejoin_wait_until_s, now_s + state.rules.rejoin_wait_s))


def _adopt_rival_rounds(state: JobState, recovered: RecoveryState, now_s: float) -> JobState:
    """Add the rounds of another leader that resigned in favour of this one: some of its members may still run them.

    A member that is connected here may have taken part in such a round meanwhile. So its node index counts as a claim
    only when it has reported again (`on_stopped`). Only this leader's own node cannot have taken part.
    """
    oldest = state.quorum_bases[0].number
    unknown = [
        carried
        for carried in recovered.quorum_bases
        if carried.number >= oldest and not any(base.is_same(carried) for base in state.quorum_bases)
    ]
    if not unknown:
        return state
    own = [member for member in state.members.values() if member.is_leader]
    rivals = [replace(_build_base(state, carried, claimants=own), is_late=True) for carried in unknown]
    rejoin_wait_until_s = max(state.rejoin_wait_until_s, now_s + state.rules.rejoin_wait_s)
    return replace(state, quorum_bases=(*rivals, *state.quorum_bases), rejoin_wait_until_s=rejoin_wait_until_s)


def _build_base(state: JobState, carried: CarriedBase, *, claimants: Iterable[MemberRecord]) -> QuorumBase:
    """A base that a joining member brought, with the members that are connected; see `QuorumBase.with_claim`."""
    base = build_base(carried)
    for member in state.members.values():
        base = _add_connected(base, member)
    for member in claimants:
        base = base.with_claim(member.id, member.index)
    return base


def on_member_lost(state: JobState, event: MemberLost, now_s: float) -> Decision:
    """Remove a member; a loss from the running round breaks it."""
    member = state.members.get(event.id)
    if member is None:
        return state, ()
    state = replace(
        _remove_from_importing(state, event.id),
        members=state.members.without(event.id),
        quorum_bases=tuple(replace(base, connected=base.connected.without(event.id)) for base in state.quorum_bases),
        unacknowledged=state.unacknowledged.without(event.id),
    )
    if state.phase is JobPhase.FORMING and event.id in state.stopping:
        state = replace(state, stopping=state.stopping.without(event.id), fence_until_s=now_s + state.rules.fence_s)
        return refund_attempt(state, event.id, now_s), ()
    if state.phase is not JobPhase.RUNNING or event.id not in state.assignments or event.id in state.succeeded:
        return _clear_batch(state), ()
    state = replace(state, fence_until_s=now_s + state.rules.fence_s)
    return break_for_loss(state, event.id, f"{describe_member(state, member)} was lost: {event.reason}", now_s)


def on_process_ended(state: JobState, event: ProcessEnded, _now_s: float) -> Decision:
    """Record in the last base that a lost member's process has ended."""
    assignment = state.assignments.get(event.id)
    if assignment is None or event.id in state.members or not state.quorum_bases:
        return state, ()
    # The assignments are those of the last base. This member's rank in an older base is not known any more and not
    # needed: the process end can only make a takeover easier, never a wrong one possible.
    last = state.quorum_bases[-1]
    if last.number == state.round:
        last = replace(last, ended=last.ended | {assignment.group_rank})
    return replace(state, quorum_bases=(*state.quorum_bases[:-1], last)), ()


def on_leaving(state: JobState, event: Leaving, now_s: float) -> Decision:
    """Break the running round for a member that announced that it leaves."""
    member = state.members.get(event.id)
    if member is None:
        return state, ()
    state = replace(state, members=state.members.with_item(event.id, replace(member, is_leaving=True)))
    if state.phase is not JobPhase.RUNNING or event.id not in state.assignments or event.id in state.succeeded:
        return _clear_batch(state), ()
    # It counts as stopping until its connection closes: only then have its workers ended.
    return break_for_loss(state, event.id, f"{describe_member(state, member)} left: {event.reason}", now_s)
