"""Builds what a new round is to each member: its ranks, and the addresses of the nodes that it may need. Pure.

Addresses enter with the join (`MemberRecord`).
"""

from itertools import islice

from muster._shared.fields import Shared
from muster._shared.records import replace
from muster.agent.config import RendezvousConfig
from muster.agent.rendezvous.consensus.actions import RoundFacts, RoundStart, RoundSummary, Send, Successor
from muster.agent.rendezvous.consensus.members import find_leader_host
from muster.agent.rendezvous.consensus.state import Decision, JobState, NewRound, RoundRunning, update_recovery
from muster.agent.round import PartShare, Round, find_lineage

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
    starts = [
        Send(
            ids=(assignment.id,),
            message=RoundStart(
                facts=facts,
                group_ranks=_list_group_ranks(new, assignment.id),
                rank_offset=assignment.rank_offset,
                role_rank_offset=assignment.role_rank_offset,
                role_world_size=assignment.role_world_size,
                shares=_list_shares(new, assignment.id),
            ),
        )
        for assignment in new.assignments
    ]
    state = replace(state, formed=(new, facts))
    spares = (tell_running_round(state, member_id) for member_id in state.members if member_id not in state.assignments)
    return state, (*starts, *(send for sends in spares for send in sends))


def build_round(start: RoundStart, config: RendezvousConfig) -> Round:
    """Return a round as the node with this configuration needs it, which the leader does not know."""
    facts, recovery = start.facts.value, start.facts.value.recovery
    return Round(
        number=recovery.round_number,
        attempt=recovery.attempt,
        restarts_left=max(0, config.max_restarts - (recovery.attempt - recovery.restarts.free)),
        repeats=recovery.restarts.repeats,
        group_rank=start.group_rank,
        group_world_size=facts.group_world_size,
        rank_offset=start.rank_offset,
        world_size=facts.world_size,
        role_rank_offset=start.role_rank_offset,
        role_world_size=start.role_world_size,
        master_addr=facts.master_addr,
        master_port=facts.master_port,
        use_agent_store=facts.use_agent_store,
        hosts_store=facts.use_agent_store and start.group_rank == 0,
        node_index=start.group_rank if config.node_index is None else config.node_index,
        checkpoint=recovery.checkpoint,
        lineage=find_lineage(recovery.round_number, recovery.quorum_rounds[-1].leader_id),
        memories=recovery.memories,
        shares=start.shares,
    )


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


def _list_shares(new: NewRound, member_id: str) -> tuple[PartShare, ...]:
    return tuple(
        PartShare(feature=name, content=plan.shares[member_id])
        for name, plan in new.plans.items()
        if member_id in plan.shares
    )
