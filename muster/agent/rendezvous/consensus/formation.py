"""Decides when a round forms, with which members, and which member gets which rank; also ends the job. Pure."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from muster._shared.fields import Shared
from muster._shared.records import NO_ITEMS, assert_never, replace
from muster._shared.reports import FinalFailure
from muster.agent.diagnosis.root_cause import build_report
from muster.agent.rendezvous.consensus.actions import CheckLease, JobEnd, Notify, Send
from muster.agent.rendezvous.consensus.events import LeaseChecked
from muster.agent.rendezvous.consensus.failures import STORM_ROUNDS, settle_failure
from muster.agent.rendezvous.consensus.members import MemberRecord, RankAssignment
from muster.agent.rendezvous.consensus.quorum import INDICES_KEPT, QuorumRound, may_form_round
from muster.agent.rendezvous.consensus.state import (
    FOREVER,
    Decision,
    Ending,
    Forming,
    JobState,
    NewRound,
    RoundFailures,
    RoundRunning,
)
from muster.agent.rendezvous.consensus.waits import LEASE_RETRY_S
from muster.agent.rendezvous.faulty_nodes import (
    list_suspected,
    list_suspected_nodes,
    renew_suspicions,
)
from muster.agent.rendezvous.interface import RendezvousFailed
from muster.agent.rendezvous.round_messages import tell_round
from muster.agent.runtime.persistent import PersistentMap, PersistentSet

if TYPE_CHECKING:
    from muster.agent.rendezvous.consensus.halves import Plan


def form_or_end(state: JobState, now_s: float) -> Decision:
    """Form a round or end the job if the state allows it."""
    match state.phase:
        case Forming() as phase:
            if phase.stopping:
                return state, ()
            state, notices = settle_failure(state, phase, now_s)
            if not isinstance(state.phase, Forming) or state.phase.stopping:
                return state, notices
            phase = state.phase
            if phase.final is not None:
                state, actions = _end_after_failure(state, phase, phase.final, now_s)
            elif _can_form(state, phase, now_s):
                state, actions = _propose_round(renew_suspicions(state, now_s), phase, now_s)
            else:
                actions = ()
            return state, (*notices, *actions)
        case RoundRunning() as phase:
            is_done = phase.loss_wait_until_s is None and len(phase.succeeded) == len(state.assignments)
            return _end_after_success(state, phase, now_s) if is_done else (state, ())
        case Ending():
            return state, ()
        case _:
            assert_never(state.phase)


def _choose_members(state: JobState, phase: Forming) -> list[MemberRecord]:
    """Return the members that may get an assignment, always including the leader's node.

    A job that has run before continues without new members that still import, if enough others are ready.
    """
    ready = [member for member in state.members.values() if not member.is_leaving]
    if not state.importing or not phase.skips_last_call or state.importing_in_round:
        return ready
    prepared = [
        member
        for member in ready
        if member.id not in state.importing or any(member.id in each.connected for each in state.quorum_rounds)
    ]
    is_enough = len(prepared) >= state.rules.min_nodes and any(member.is_leader for member in prepared)
    return prepared if is_enough else ready


def _can_form(state: JobState, phase: Forming, now_s: float) -> bool:
    if now_s < max(state.fence_until_s, phase.lease_retry_s, state.storm.wait_until_s) or not _is_due(
        state, phase, len(state.members), now_s
    ):
        return False
    # Last, because it is too early for most events and joins.
    ready = _choose_members(state, phase)
    if not any(member.is_leader for member in ready) or not _is_due(state, phase, len(ready), now_s):
        return False
    return _has_quorum(state, ready)


def _has_quorum(state: JobState, ready: Iterable[MemberRecord]) -> bool:
    """Return whether no other node can continue the job, if the next round forms with these members."""
    quorum_rounds = state.quorum_rounds
    if _must_find_last_round(state, ready):
        if not quorum_rounds:
            return False
        # The members may be leftovers: this leader's old process, or another returned node's, may have formed rounds
        # without them.
        quorum_rounds = tuple(replace(each, claimed=frozenset()) for each in quorum_rounds)
    return may_form_round(quorum_rounds, state.rules.min_nodes)


def _must_find_last_round(state: JobState, members: Iterable[MemberRecord]) -> bool:
    """Return whether these members must show that the last round they know is the job's last (see `JobState`)."""
    if not state.must_find_last_round or state.has_formed_round:
        return False
    return _count_own_nodes(state, members) < state.rules.max_nodes


def _count_own_nodes(state: JobState, members: Iterable[MemberRecord]) -> int:
    """Count all members except spares.

    A spare's index is `max` or more, and proves nothing about the node it replaces.
    """
    return sum(1 for each in members if each.index is None or each.index < state.rules.max_nodes)


def _is_due(state: JobState, phase: Forming, count: int, now_s: float) -> bool:
    rules = state.rules
    if count < rules.min_nodes:
        return False
    # Even if enough are here, because a spare may replace a member with a lease.
    if now_s < state.rejoin_wait_until_s and any(each.has_missing() for each in state.quorum_rounds):
        return False
    if phase.skips_last_call or count >= rules.max_nodes:
        return True
    return now_s >= state.last_join_s + rules.last_call_s and now_s >= state.announcement_wait_until_s


def _propose_round(state: JobState, phase: Forming, now_s: float) -> Decision:
    """Assign the ranks of the next round, and ask whether the leader's own workers would have a lease in it."""
    last_round = state.quorum_rounds[-1] if state.quorum_rounds else None
    members, suspected = _choose_members(state, phase), list_suspected(state)
    assignments = assign_ranks(members, last_round, state.rules.max_nodes, suspected)
    round_number = max(state.round_number, state.highest_known_round) + 1
    attempt = state.attempt + (1 if phase.is_new_attempt else 0)
    leader = next(each for each in assignments if state.members[each.id].is_leader)
    quorum_round = QuorumRound(
        round_number=round_number,
        leader_id=leader.id,
        size=len(assignments),
        leader_group_rank=leader.group_rank,
        is_own=True,
        node_indices=list_node_indices(assignments),
        connected=PersistentMap({each.id: each.group_rank for each in assignments}),
    )
    first, last = state.members[assignments[0].id], state.members[assignments[-1].id]
    world_size = assignments[-1].rank_offset + last.nproc
    plans, notices = _plan_parts(state, round_number, leader.id, assignments, now_s)
    new = NewRound(
        round_number=round_number,
        attempt=attempt,
        world_size=world_size,
        master_port=first.port,
        use_agent_store=first.can_host_store and world_size > 1,
        assignments=assignments,
        quorum_rounds=(*(replace(earlier, is_late=False) for earlier in state.quorum_rounds), quorum_round),
        plans=plans,
    )
    return replace(state, phase=replace(phase, proposed=new)), (*notices, CheckLease(quorum_rounds=new.quorum_rounds))


def _plan_parts(
    state: JobState, round_number: int, leader_id: str, assignments: tuple[RankAssignment, ...], now_s: float
) -> "tuple[Mapping[str, Plan], tuple[Notify, ...]]":
    """Return what features plan for the round. Nothing is loaded if no node has anything for one."""
    if not state.parts and not state.memories and not any(member.offers for member in state.members.values()):
        return NO_ITEMS, ()
    from muster.agent.rendezvous.consensus.halves import PartJob
    from muster.agent.rendezvous.consensus.parts import plan_parts

    job = PartJob(
        round_number=round_number,
        leader_id=leader_id,
        now_s=now_s,
        is_running=False,
        members=state.members,
        assignments={each.id: each for each in assignments},
    )
    return plan_parts(job, state.parts, state.memories)


def assign_ranks(
    members: Iterable[MemberRecord],
    last_round: QuorumRound | None,
    max_nodes: int,
    suspected: frozenset[str] = frozenset(),
) -> tuple[RankAssignment, ...]:
    """Assign ranks by node index; without one, by rank in the last round, then by order of joining.

    Members of the last round precede new ones. If members report their segment (`--rank-order segment`), those of one
    segment are adjacent, and among new ones those come first whose segment lacks most.

    Args:
        members: those that may get an assignment, including the leader.
        last_round: None before the first.
        max_nodes: the most assignments.
        suspected: ids of those that get one only if there are not enough others. The leader always gets one.
    """
    ready = list(members)
    last = len(ready) + (last_round.size if last_round else 0)

    def rank_before(member: MemberRecord) -> int:
        return last_round.connected.get(member.id, last) if last_round else last

    def find_place(member: MemberRecord) -> tuple[bool, int, int, int]:
        return member.index is None, member.index or 0, rank_before(member), member.join_order

    ordered = sorted(
        ready,
        key=lambda p: (
            not p.is_leader,
            p.id in suspected,
            rank_before(p) == last,
            p.index is None,
            p.index or 0,
            p.join_order,
        ),
    )
    chosen = ordered[:max_nodes]
    if any(member.segment for member in ready):
        is_new = {member.id: rank_before(member) == last for member in ready} if last_round else {}
        chosen = _fill_segments(ordered, max_nodes, is_new, suspected)
        first = {member.segment: find_place(member) for member in sorted(chosen, key=find_place, reverse=True)}
        chosen.sort(key=lambda p: (first[p.segment] if p.segment else find_place(p), find_place(p)))
    else:
        chosen.sort(key=find_place)
    role_sizes: dict[str, int] = {}
    places = []
    offset = 0
    for member in chosen:
        places.append((member, offset, role_sizes.get(member.role, 0)))
        offset += member.nproc
        role_sizes[member.role] = role_sizes.get(member.role, 0) + member.nproc
    return tuple(
        RankAssignment(
            id=member.id,
            index=member.index,
            group_rank=group_rank,
            rank_offset=rank_offset,
            role_rank_offset=role_offset,
            role_world_size=role_sizes[member.role],
        )
        for group_rank, (member, rank_offset, role_offset) in enumerate(places)
    )


def _fill_segments(
    ordered: list[MemberRecord], max_nodes: int, is_new: Mapping[str, bool], suspected: frozenset[str]
) -> list[MemberRecord]:
    """Return the first members, with new members of the segments that lack most in the places of lost members.

    Args:
        ordered: the order in which members get places, by all that counts more.
        max_nodes: the number of places.
        is_new: whether a member takes the place of another, by id; empty if there was no round.
        suspected: ids of those that come last in any case.
    """
    chosen = [member for member in ordered if not is_new.get(member.id) and member.id not in suspected][:max_nodes]
    taken = {member.id for member in chosen}
    rest = [member for member in ordered if member.id not in taken]
    counts = Counter(member.segment for member in chosen if member.segment)

    def find_lack(member: MemberRecord) -> tuple[bool, int]:
        count = counts[member.segment] if member.segment else 0
        return member.id in suspected, -(1 + max(counts.values()) - count) if count else 0

    while rest and len(chosen) < max_nodes:
        rest.sort(key=find_lack)  # stable
        chosen.append(rest.pop(0))
        counts[chosen[-1].segment] += 1
    return chosen


def list_node_indices(assignments: tuple[RankAssignment, ...]) -> tuple[int | None, ...]:
    """Return the node index by group rank, at most `INDICES_KEPT`; empty if every group rank is its node's index."""
    if all(assignment.index == assignment.group_rank for assignment in assignments):
        return ()
    return tuple(assignment.index for assignment in assignments[:INDICES_KEPT])


def on_lease_checked(state: JobState, event: LeaseChecked, now_s: float) -> Decision:
    """Form the proposed round if the leader's own workers have a lease in it; otherwise try again soon."""
    phase = state.phase
    if not isinstance(phase, Forming) or phase.proposed is None:
        return state, ()
    new = phase.proposed
    if not event.is_held:
        return replace(state, phase=replace(phase, proposed=None, lease_retry_s=now_s + LEASE_RETRY_S)), ()
    connected = new.quorum_rounds[-1].connected
    importing = {*state.importing, *state.importing_in_round}
    state = replace(
        state,
        phase=RoundRunning(),
        parts={name: plan.state for name, plan in new.plans.items()},
        round_number=new.round_number,
        attempt=new.attempt,
        has_formed_round=True,
        quorum_rounds=new.quorum_rounds,
        assignments=PersistentMap({each.id: each for each in new.assignments}),
        importing=PersistentSet(importing.difference(connected)),
        importing_in_round=PersistentSet(importing.intersection(connected)),
        unacknowledged=PersistentSet(connected),
        failures=RoundFailures(),
        memories=tuple(plan.memory for plan in new.plans.values() if plan.memory is not None),
        storm=replace(state.storm, formed_s=(*state.storm.formed_s, now_s)[-(STORM_ROUNDS + 1) :]),
    )
    state, told = tell_round(state, new)
    return state, (*told, *_notify_spares(state))


def _notify_spares(state: JobState) -> tuple[Notify, ...]:
    spares = len(state.members) - len(state.assignments)
    if spares <= 0 or len(state.assignments) < state.rules.max_nodes:
        return ()
    what = "1 node" if spares == 1 else f"{spares} nodes"
    wait = "it waits as a spare" if spares == 1 else "they wait as spares"
    return (Notify(text=f"{what} more than --nnodes allows ({state.rules.max_nodes}): {wait}"),)


def _end_after_success(state: JobState, phase: RoundRunning, now_s: float) -> Decision:
    """End the job, but wait for members that were lost after they succeeded, which may continue with another leader."""
    if may_form_round(state.quorum_rounds, state.rules.min_nodes) or now_s >= phase.end_wait_until_s:
        return _end_job(state, None)
    if phase.end_wait_until_s < FOREVER:
        return state, ()
    end_wait_until_s = now_s + state.rules.join_timeout_s
    return replace(state, phase=replace(phase, end_wait_until_s=end_wait_until_s)), ()


def _end_after_failure(state: JobState, phase: Forming, final: FinalFailure, now_s: float) -> Decision:
    """End the job, but wait for unreachable members, which may not know that it failed and may continue."""
    if may_form_round(state.quorum_rounds, state.rules.min_nodes) or now_s >= phase.end_wait_until_s:
        return _end_job(state, final)
    if phase.end_wait_until_s < FOREVER or now_s < state.rejoin_wait_until_s:
        return state, ()
    limit_s = state.rules.join_timeout_s
    line = f"{final.describe()}; most nodes are unreachable and may continue: waiting {limit_s:g} s for them"
    return replace(state, phase=replace(phase, end_wait_until_s=now_s + limit_s)), (Notify(text=line),)


def _end_job(state: JobState, final: FinalFailure | None) -> Decision:
    """End the job. `final` says why it failed; None means that it succeeded."""
    present = [member_id for member_id in state.assignments if member_id in state.members]
    report = None
    if final is not None:
        report = build_report(
            state.rules.run_id,
            final,
            state.attempt,
            state.rules.max_restarts + min(state.restarts.free, state.attempt),
            state.failures.seen,
            state.failures.stacks,
            list_suspected_nodes(state.restarts),
        )
    drain = state.phase.drain if isinstance(state.phase, RoundRunning) else None
    is_drained = drain is not None and drain.last_rank is not None
    # A leader only for the job's end has formed no round.
    printer_id = next(iter(present or state.members), None) if report is not None else None
    end = JobEnd(
        succeeded=final is None and not is_drained,
        report=None if report is None else Shared(report),
        printer_id=printer_id,
        is_drained=is_drained,
    )
    told = Send(ids=tuple(state.members), message=end)
    return replace(state, phase=Ending(job_end=replace(end, printer_id=None))), (told,)


def fail_rendezvous(state: JobState) -> Decision:
    """Give up, because no round was formed within the join timeout."""
    rules, count = state.rules, len(state.members)
    if count >= rules.min_nodes and _must_find_last_round(state, state.members.values()):
        known = state.quorum_rounds[-1:]
        lack = f"they do not prove that round {known[0].round_number} was the last" if known else "none knew a round"
        why = (
            "this node was started again and the job may continue on nodes that it cannot reach: "
            f"{_count_own_nodes(state, state.members.values())} of {rules.max_nodes} nodes joined, and {lack},"
        )
    elif count >= rules.min_nodes:
        missing = sum(each.count_missing() for each in state.quorum_rounds[-1:])
        nodes = "1 node" if missing == 1 else f"{missing} nodes"
        verb = "is" if missing == 1 else "are"
        why = f"{nodes} of round {state.round_number} {verb} unreachable and may still be running; no round was formed"
    else:
        why = f"only {count} of at least {rules.min_nodes} nodes joined"
    failed = RendezvousFailed(reason=f"{why} within {rules.join_timeout_s:g} s")
    return replace(state, phase=Ending(job_end=None)), (Send(ids=tuple(state.members), message=failed),)
