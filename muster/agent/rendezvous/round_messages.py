"""Builds what a new round is to each member: its ranks, and the addresses of the nodes that it may need. Pure.

Addresses enter with the join (`MemberRecord`).
"""

from collections.abc import Iterable
from itertools import islice

from muster._shared.fields import Shared
from muster._shared.records import replace
from muster.agent.rendezvous.consensus.actions import RoundFacts, RoundStart, RoundSummary, Send, Successor
from muster.agent.rendezvous.consensus.members import MemberRecord
from muster.agent.rendezvous.consensus.state import Decision, JobState, NewRound, RoundRunning, update_recovery
from muster.agent.round import Source

SUCCESSORS = 8


def tell_round(state: JobState, new: NewRound) -> Decision:
    """Send each member of the new round its ranks, and all other members what they must know of it."""
    state = update_recovery(state)
    leader_host = find_leader_host(state.members.values())
    members = [state.members[assignment.id] for assignment in new.assignments]
    successors = (
        Successor(
            group_rank=group_rank, index=member.index, host=member.address or leader_host, port=member.listen_port
        )
        for group_rank, member in enumerate(members)
        if not member.is_leader
    )
    facts = Shared(
        RoundFacts(
            recovery=state.recovery.value,
            successors=tuple(islice(successors, SUCCESSORS)),
            group_world_size=len(members),
            world_size=new.world_size,
            master_addr=members[0].address or leader_host,
            master_port=new.master_port,
            use_agent_store=new.use_agent_store,
        )
    )
    neighbours: list[Source | None] = [None] * len(members)
    if state.rules.copies_snapshots and len(members) > 1:  # the neighbour has the next ranks
        sources = [build_source(member, group_rank, leader_host) for group_rank, member in enumerate(members)]
        neighbours = [*sources[1:], sources[0]]
    starts = [
        Send(
            ids=(assignment.id,),
            message=RoundStart(
                facts=facts,
                group_ranks=_list_group_ranks(new, assignment.id),
                rank_offset=assignment.rank_offset,
                role_rank_offset=assignment.role_rank_offset,
                role_world_size=assignment.role_world_size,
                source=_find_source(state, new, assignment.id, leader_host),
                neighbour=neighbour,
            ),
        )
        for assignment, neighbour in zip(new.assignments, neighbours, strict=True)
    ]
    state = replace(state, formed=(new, facts))
    spares = (tell_running_round(state, member_id) for member_id in state.members if member_id not in state.assignments)
    return state, (*starts, *(send for sends in spares for send in sends))


def tell_running_round(state: JobState, member_id: str) -> tuple[Send, ...]:
    """Send the running round to a member without an assignment, which needs the successors to find the next leader."""
    if state.formed is None or not isinstance(state.phase, RoundRunning) or member_id in state.assignments:
        return ()
    new, facts = state.formed
    is_spare = len(state.assignments) >= state.rules.max_nodes
    summary = RoundSummary(facts=facts, group_ranks=_list_group_ranks(new, member_id), is_spare=is_spare)
    return (Send(ids=(member_id,), message=summary),)


def _list_group_ranks(new: NewRound, member_id: str) -> tuple[int | None, ...]:
    return tuple([each.connected.get(member_id) for each in new.quorum_rounds])  # twice as fast as a generator


def _find_source(state: JobState, new: NewRound, member_id: str, leader_host: str) -> Source | None:
    if member_id not in new.sources:
        return None
    holder_id, group_rank = new.sources[member_id]
    holder = state.members.get(holder_id)
    return None if holder is None else build_source(holder, group_rank, leader_host)


def build_source(holder: MemberRecord, group_rank: int, leader_host: str) -> Source:
    """Return where a member is reached for a part of a snapshot, whose owner had this rank."""
    return Source(host=holder.address or leader_host, port=holder.listen_port, group_rank=group_rank)


def find_leader_host(members: Iterable[MemberRecord]) -> str:
    """Return the address of the leader's machine as the other nodes see it; loopback if all are on it."""
    seen = ""
    for member in members:
        if member.is_leader and member.address:
            return member.address
        seen = seen or member.leader_address
    return seen or "127.0.0.1"
