"""Rank assignment: which member gets which rank. Pure."""

from collections.abc import Iterable

from muster.agent.rendezvous.consensus.members import MemberRecord, RankAssignment
from muster.agent.rendezvous.consensus.quorum import INDICES_KEPT, QuorumRound


def assign_ranks(
    members: Iterable[MemberRecord], last_round: QuorumRound | None, max_nodes: int
) -> tuple[RankAssignment, ...]:
    """Assign ranks by node index; without one, by rank in the last round, then by order of joining.

    Members of the last round go before new ones.

    Args:
        members: those that may get an assignment, the leader among them.
        last_round: None before the first.
        max_nodes: how many assignments there are at most.
    """
    ready = list(members)
    last = len(ready) + (last_round.size if last_round else 0)

    def rank_before(member: MemberRecord) -> int:
        return last_round.connected.get(member.id, last) if last_round else last

    chosen = sorted(
        ready,
        key=lambda p: (not p.is_leader, rank_before(p) == last, p.index is None, p.index or 0, p.join_order),
    )[:max_nodes]
    chosen.sort(key=lambda p: (p.index is None, p.index or 0, rank_before(p), p.join_order))
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


def list_node_indices(assignments: tuple[RankAssignment, ...]) -> tuple[int | None, ...]:
    """Node index by group rank, at most `INDICES_KEPT`; empty when every group rank is its node's index."""
    if all(assignment.index == assignment.group_rank for assignment in assignments):
        return ()
    return tuple(assignment.index for assignment in assignments[:INDICES_KEPT])
