"""Members come and go: joined, lost, seen to end, leaving. Pure.

A join and a loss make a new round, never a new attempt; a job that runs goes on until newcomers have imported what
their workers need. What they carry of the job is taken over here, and who is accounted for is kept up for `quorum`.
"""

from collections.abc import Iterable

from muster.agent.rendezvous.consensus.actions import Notify
from muster.agent.rendezvous.consensus.events import Joined, Leaving, MemberLost, Prepared, ProcessEnded
from muster.agent.rendezvous.consensus.failures import break_for_loss, break_round, excuse_failure
from muster.agent.rendezvous.consensus.members import MemberRecord, RecoveryState
from muster.agent.rendezvous.consensus.quorum import CarriedBase, QuorumBase, build_base
from muster.agent.rendezvous.consensus.state import FOREVER, Decision, JobPhase, JobState, describe_member
from muster.agent.rendezvous.interface import BreakKind
from muster.agent.runtime.records import replace


def on_joined(state: JobState, event: Joined, now_s: float) -> Decision:
    """A member asks to take part."""
    carry = event.peer.carry
    carry = replace(carry, attempt=min(carry.attempt, state.rules.max_restarts))  # more there have never been
    peer = replace(event.peer, order=state.joins, carry=carry)
    if state.phase is JobPhase.ENDING and state.verdict is not None:
        return state, (replace(state.verdict, ids=(peer.id,)),)
    is_first_to_import = not peer.is_prepared and not state.importing
    state = _mark_prepared(state, peer.id)
    bases = tuple(_hold(base, peer) for base in state.bases)
    if any(held.ended != base.ended for held, base in zip(bases, state.bases, strict=True)):
        # That end may have been a moment ago: its workers die within the fence, counted from when we hear of it.
        state = replace(state, fence_until_s=max(state.fence_until_s, now_s + state.rules.fence_s))
    state = replace(
        state,
        importing=state.importing if peer.is_prepared else state.importing.with_one(peer.id),
        members=state.members.with_item(peer.id, peer),
        joins=state.joins + 1,
        floor=max(state.floor, peer.carry.round),
        last_join_s=now_s,
        bases=bases,
    )
    state = _wait_for_other_leader(_adopt_recovery_state(state, peer.carry, now_s), peer.carry.leader, now_s)
    state = replace(state, bases=tuple(base.with_claim(peer.id, peer.index) for base in state.bases))
    if peer.is_prepared or state.importing_seated:
        return _wait_to_join(state, now_s), ()
    if not is_first_to_import or not _can_be_joined(state):
        return state, ()
    return state, (
        Notify(text=f"{describe_member(state, peer)} has come and still imports: the job goes on meanwhile"),
    )


def on_prepared(state: JobState, event: Prepared, now_s: float) -> Decision:
    """A member has imported what its workers need."""
    state = _mark_prepared(state, event.id)
    is_new = event.id in state.members and event.id not in state.seats
    return _forget_batch(_wait_to_join(state, now_s) if is_new else state), ()


def _can_be_joined(state: JobState) -> bool:
    """A round runs to which a node can be added."""
    return state.phase is JobPhase.RUNNING and not state.done and len(state.seats) < state.rules.max_nodes


def _wait_to_join(state: JobState, now_s: float) -> JobState:
    """A member could take part from now on, in a new round."""
    if state.batch_since_s is not None or not _can_be_joined(state):
        return state
    return replace(state, batch_since_s=now_s)


def _forget_batch(state: JobState) -> JobState:
    """After somebody went, or need not be waited for: perhaps nobody is left who could take part."""
    if state.batch_since_s is None or _list_newcomers(state):
        return state
    return replace(state, batch_since_s=None)


def _list_newcomers(state: JobState) -> list[MemberRecord]:
    """Who has no seat and could make use of one; of a round that stands still anyway also those who import."""
    importing = () if state.importing_seated else state.importing
    return [
        peer
        for peer in state.members.values()
        if peer.id not in state.seats and peer.id not in importing and not peer.leaving
    ]


def _mark_prepared(state: JobState, member_id: str) -> JobState:
    """It imports no more, or is not there any more."""
    if member_id not in state.importing and member_id not in state.importing_seated:
        return state
    return replace(
        state,
        importing=state.importing.without(member_id),
        importing_seated=state.importing_seated.without(member_id),
    )


def break_for_joins(state: JobState, now_s: float) -> Decision:
    """The joins to the running round make a new one when it is time."""
    if state.phase is not JobPhase.RUNNING or state.blame_until_s is not None or now_s < batch_due_s(state):
        return state, ()
    fresh = [describe_member(state, peer) for peer in _list_newcomers(state)]
    joined = ", ".join(fresh[:3]) + (f" and {len(fresh) - 3} more" if len(fresh) > 3 else "")
    return break_round(replace(state, reform=True), BreakKind.MEMBERSHIP, f"{joined} joined", now_s)


def batch_due_s(state: JobState) -> float:
    """When the joins to a running round make a new one; infinity when there are none."""
    if state.batch_since_s is None:
        return FOREVER
    importing = 0 if state.importing_seated else len(state.importing)
    if len(state.members) - importing >= state.rules.max_nodes:
        return state.batch_since_s  # nobody else fits in: there is nobody to wait for
    if importing:
        return state.batch_since_s + state.rules.import_limit_s
    return min(state.last_join_s + state.rules.batch_s, state.batch_since_s + state.rules.batch_limit_s)


def _hold(base: QuorumBase, peer: MemberRecord) -> QuorumBase:
    """Count a member, and the ends it observed, for a base that it was part of."""
    for carried in peer.carry.bases:
        if base.is_same(carried):
            held = base.held if carried.rank is None else base.held.with_item(peer.id, carried.rank)
            return replace(base, held=held, ended=base.ended | carried.ended)
    return base


def _adopt_recovery_state(state: JobState, carry: RecoveryState, now_s: float) -> JobState:
    """Take over round number, attempt and bases from a member that knows a later round than this leader."""
    if carry.round < state.round:
        return state
    attempt = max(state.attempt, carry.attempt)
    if state.in_office:
        # Two leaders met: no used attempt is forgotten. (Of the same round a member may know the next attempt already.)
        state = state if carry.round == state.round else replace(state, attempt=attempt)
        return _adopt_rival_rounds(state, carry, now_s)
    if carry.round == state.round:
        final = state.final or carry.final
        return replace(state, attempt=attempt, early=state.early or carry.early, final=final)
    everybody = state.members.values()
    bases = tuple(_build_base(state, carried, claimants=everybody) for carried in carry.bases)
    # Whose end was seen, by whoever it was, has workers that die within the fence as everywhere.
    is_whole = all(len(base.held) == base.size for base in bases)
    return replace(
        state,
        round=carry.round,
        attempt=carry.attempt,
        early=carry.early,
        final=carry.final,
        bases=bases,
        reform=True,
        fence_until_s=state.fence_until_s if is_whole else max(state.fence_until_s, now_s + state.rules.fence_s),
        gather_until_s=max(state.gather_until_s, now_s + state.rules.gather_s),
    )


def _wait_for_other_leader(state: JobState, last_leader: str | None, now_s: float) -> JobState:
    """Who comes from another leader than we know of may have had a part in rounds there without having heard of them.

    It is free, so that leader's lease has ended; those of the others who follow it end within what a takeover waits.
    """
    if last_leader is None or any(base.by == last_leader for base in state.bases):
        return state
    if any(peer.is_leader and peer.id == last_leader for peer in state.members.values()):
        return state
    return replace(state, gather_until_s=max(state.gather_until_s, now_s + state.rules.gather_s))


def _adopt_rival_rounds(state: JobState, carry: RecoveryState, now_s: float) -> JobState:
    """Heed the rounds of another leader that gave way to this one: some of its members may not know it yet.

    Who is here already proves nothing about them until it is heard again (`on_stopped`): it may have been theirs
    meanwhile, unnoticed. Only this leader's own node cannot.
    """
    oldest = state.bases[0].number
    unknown = [
        carried
        for carried in carry.bases
        if carried.number >= oldest and not any(base.is_same(carried) for base in state.bases)
    ]
    if not unknown:
        return state
    own = [peer for peer in state.members.values() if peer.is_leader]
    rivals = [replace(_build_base(state, carried, claimants=own), late=True) for carried in unknown]
    gather_until_s = max(state.gather_until_s, now_s + state.rules.gather_s)
    return replace(state, bases=(*rivals, *state.bases), gather_until_s=gather_until_s)


def _build_base(state: JobState, carried: CarriedBase, *, claimants: Iterable[MemberRecord]) -> QuorumBase:
    """A base that a newcomer brought, and who of it is here; see `QuorumBase.with_claim`."""
    base = build_base(carried)
    for member in state.members.values():
        base = _hold(base, member)
    for member in claimants:
        base = base.with_claim(member.id, member.index)
    return base


def on_lost(state: JobState, event: MemberLost, now_s: float) -> Decision:
    """A member's connection closed, or it fell silent."""
    peer = state.members.get(event.id)
    if peer is None:
        return state, ()
    state = replace(
        _mark_prepared(state, event.id),
        members=state.members.without(event.id),
        bases=tuple(replace(base, held=base.held.without(event.id)) for base in state.bases),
        unconfirmed=state.unconfirmed.without(event.id),
    )
    if state.phase is JobPhase.FORMING and event.id in state.pending:
        state = replace(state, pending=state.pending.without(event.id), fence_until_s=now_s + state.rules.fence_s)
        return excuse_failure(state, event.id, now_s), ()
    if state.phase is not JobPhase.RUNNING or event.id not in state.seats or event.id in state.done:
        return _forget_batch(state), ()
    state = replace(state, fence_until_s=now_s + state.rules.fence_s)
    return break_for_loss(state, event.id, f"{describe_member(state, peer)} was lost: {event.reason}", now_s)


def on_process_ended(state: JobState, event: ProcessEnded, _now_s: float) -> Decision:
    """A lost member's process was seen to end."""
    seat = state.seats.get(event.id)
    if seat is None or event.id in state.members or not state.bases:
        return state, ()
    # Seats are those of the last base; what an older one calls this member is not known any more, and not needed:
    # its process end can only make a takeover easier, never a wrong one possible.
    last = state.bases[-1]
    if last.number == state.round:
        last = replace(last, ended=last.ended | {seat.group_rank})
    return replace(state, bases=(*state.bases[:-1], last)), ()


def on_leaving(state: JobState, event: Leaving, now_s: float) -> Decision:
    """A member said that it goes."""
    peer = state.members.get(event.id)
    if peer is None:
        return state, ()
    state = replace(state, members=state.members.with_item(event.id, replace(peer, leaving=True)))
    if state.phase is not JobPhase.RUNNING or event.id not in state.seats or event.id in state.done:
        return _forget_batch(state), ()
    # It stays pending until its connection closes: only then are its workers gone.
    return break_for_loss(state, event.id, f"{describe_member(state, peer)} left: {event.reason}", now_s)
