"""Who gets which rank. Pure."""

from collections.abc import Iterable

from muster.agent.rendezvous.consensus.members import MemberRecord, RankAssignment
from muster.agent.rendezvous.consensus.quorum import INDICES_KEPT, QuorumBase


def assign_ranks(
    members: Iterable[MemberRecord], base: QuorumBase | None, max_nodes: int
) -> tuple[RankAssignment, ...]:
    """Node index decides; without one, the order of the last round, then of joining. Survivors go before spares.

    Args:
        members: who may get a seat, the leader among them.
        base: the last round; None before the first.
        max_nodes: seats there are at most.
    """
    ready = list(members)
    last = len(ready) + (base.size if base else 0)

    def rank_before(peer: MemberRecord) -> int:
        return base.held.get(peer.id, last) if base else last

    chosen = sorted(
        ready,
        key=lambda p: (not p.is_leader, rank_before(p) == last, p.index is None, p.index or 0, p.order),
    )[:max_nodes]
    chosen.sort(key=lambda p: (p.index is None, p.index or 0, rank_before(p), p.order))
    role_sizes: dict[str, int] = {}
    places = []
    offset = 0
    for peer in chosen:
        places.append((peer, offset, role_sizes.get(peer.role, 0)))
        offset += peer.nproc
        role_sizes[peer.role] = role_sizes.get(peer.role, 0) + peer.nproc
    return tuple(
        RankAssignment(
            id=peer.id,
            index=peer.index,
            group_rank=group_rank,
            rank_offset=rank_offset,
            role_rank_offset=role_offset,
            role_world_size=role_sizes[peer.role],
        )
        for group_rank, (peer, rank_offset, role_offset) in enumerate(places)
    )


def keep_indices(seats: tuple[RankAssignment, ...]) -> tuple[int | None, ...]:
    """Node index by group rank; empty when the two are the same, cut where it would grow with the job."""
    if all(seat.index == seat.group_rank for seat in seats):
        return ()
    return tuple(seat.index for seat in seats[:INDICES_KEPT])
