"""Decides which side may form a round if members of the last round are silent. Pure arithmetic over group ranks.

A `QuorumRound` is a round whose members count for the next one: the last, and those that it has not yet replaced.

Silence proves nothing: silent members may be training on the other side of a partition. A process end that was *seen*
proves that its workers are gone, because the guard kills them. So ended members are not counted, and of the rest at
most one side may have a quorum:

- A leader that formed the round itself may continue with at least `min` of its members, or with half of those that
  have not ended.
- Another leader, while the old leader was not seen to end, needs more than half, and the rest must be fewer than `min`.
  Otherwise the old leader, alive behind a partition, could continue as well.
- Once the old leader was seen to end, half is enough for the side with the lowest rank not seen to end.
- When every member is connected or known to have ended, no other side is left.

No two of these can hold at once for disjoint sides. Counting ended members *for* a candidate (joined + ended > half) is
not safe: with three nodes and the leader ended, each survivor would have a quorum alone.

A member that has announced that it leaves takes part in no other round, whatever it hears. Once its workers have
stopped at the step of a drain, or it is gone, it also counts as ended.

Only a process that was connected until the end has *seen* it. A new process that claims a node index also proves that
the old process has ended, but not when. Before its end, the old process may have formed rounds that are unknown here.
So such a claim counts only for the last rule. For a leader that was started again with an empty memory it does not
count at all, unless all `max` nodes are there. Its members may be those that its old process had left behind
(`formation`).

A round that not all of its members have acknowledged does not replace the earlier round yet, because members that never
received it act on the earlier one. Until it is committed, a leader needs a quorum of both (as in Raft's joint
consensus), each by its own rule. That is the first rule for a round that it formed, and the others for one that it took
over. Otherwise the members that made the takeover possible could be counted again, and two sides could continue.
"""

from collections.abc import Iterable
from typing import Annotated

from muster._shared.fields import Count, GroupRank, Limit, Name, RoundNumber, Size
from muster._shared.records import record, replace
from muster.agent.runtime.persistent import PersistentMap

INDICES_KEPT = 64
"""What every member knows of a round must not grow with the number of members."""
ENDED_KEPT = 512
EndedRanks = Annotated[frozenset[GroupRank], Limit(most=ENDED_KEPT)]
"""Group ranks whose process end was seen. A member that knows fewer only needs more others to take over."""


@record
class RecoveredRound:
    """A quorum round as all of its members know it; part of `recovery.RecoveryRecord`."""

    round_number: RoundNumber
    leader_id: Name
    size: Size
    leader_group_rank: GroupRank
    """Group rank of the leader's own node."""
    node_indices: Annotated[tuple[Count | None, ...], Limit(most=INDICES_KEPT)] = ()
    """Node index of each group rank, up to `INDICES_KEPT`; empty if every rank is its node's index."""
    ended: EndedRanks = frozenset()
    """Group ranks whose process end was seen."""

    def is_same(self, other: "QuorumRound | RecoveredRound") -> bool:
        """Return whether both describe the same round."""
        return (self.round_number, self.leader_id) == (other.round_number, other.leader_id)

    def find_contradiction(self) -> str | None:
        """Return a rank that was not in the round."""
        highest = max(self.leader_group_rank, *self.ended, 0)
        return None if highest < self.size else f"rank {highest} in a round of {self.size}"


@record
class QuorumRound:
    """A round that was formed, and which of its members are connected or have ended."""

    round_number: int
    leader_id: str
    """The leader that formed it. Two leaders that do not know of each other may use the same number."""
    size: int
    leader_group_rank: int
    """Group rank of the leader's own node in that round."""
    is_own: bool = False
    """Whether the leader that holds this record formed it."""
    is_late: bool = False
    """Whether the leader learned of it only after it had formed the running round, which therefore does not replace it.
    """
    node_indices: tuple[int | None, ...] = ()
    """Node index of each group rank, up to `INDICES_KEPT`; empty if every rank is its node's index."""
    connected: PersistentMap[str, int] = PersistentMap()
    """Member id -> group rank, for the members that are connected now."""
    ended: frozenset[int] = frozenset()
    """Group ranks whose process end was seen."""
    claimed: frozenset[int] = frozenset()
    """Group ranks whose node index was claimed by a new process."""

    def is_same(self, other: "QuorumRound | RecoveredRound") -> bool:
        """Return whether both describe the same round."""
        return (self.round_number, self.leader_id) == (other.round_number, other.leader_id)

    def find_group_rank(self, index: int) -> int | None:
        """Return the group rank that the node with this index had."""
        if not self.node_indices:
            return index if 0 <= index < self.size else None
        return self.node_indices.index(index) if index in self.node_indices else None

    def with_claim(self, member_id: str, index: int | None) -> "QuorumRound":
        """Record a member that was not part of this round, but has the node index of one of its ranks.

        Its process is a new one: the scheduler started it because the old one had ended.
        """
        if index is None or member_id in self.connected:
            return self
        group_rank = self.find_group_rank(index)
        if group_rank is None or group_rank in self.claimed or group_rank in self.connected.values():
            return self
        return replace(self, claimed=self.claimed | {group_rank})

    def without(self, member_id: str, *, has_left: bool) -> "QuorumRound":
        """Record that a member is gone. A member that has left as announced counts as ended."""
        group_rank = self.connected.get(member_id)
        ended = self.ended | {group_rank} if has_left and group_rank is not None else self.ended
        return replace(self, connected=self.connected.without(member_id), ended=ended)

    def find_lowest_alive(self) -> int:
        """Return the lowest group rank not seen to end; `size` if all have ended."""
        return next((each for each in range(self.size) if each not in self.ended), self.size)

    def count_missing(self) -> int:
        """Return how many are neither connected nor known to have ended."""
        return self.size - len(self.ended.union(self.claimed, self.connected.values()))

    def has_missing(self) -> bool:
        """Return whether `count_missing` is not 0. This is cheap in most cases, because it is called at every join."""
        at_most = len(self.ended) + len(self.claimed) + len(self.connected)
        return at_most < self.size or self.count_missing() > 0

    def build_recovered(self) -> RecoveredRound:
        """Return what the round's members must know of it."""
        return RecoveredRound(
            round_number=self.round_number,
            leader_id=self.leader_id,
            size=self.size,
            leader_group_rank=self.leader_group_rank,
            node_indices=self.node_indices,
            ended=self.ended if len(self.ended) <= ENDED_KEPT else frozenset(sorted(self.ended)[:ENDED_KEPT]),
        )


def build_quorum_round(recovered: RecoveredRound) -> QuorumRound:
    """Return what a member knows of a quorum round, as a quorum round without connected members."""
    return QuorumRound(
        round_number=recovered.round_number,
        leader_id=recovered.leader_id,
        size=recovered.size,
        leader_group_rank=recovered.leader_group_rank,
        node_indices=recovered.node_indices,
        ended=recovered.ended,
    )


def may_continue(last: QuorumRound, min_nodes: int) -> bool:
    """Return whether the leader that formed this round may form the next one with the members connected to it."""
    connected = len(set(last.connected.values()) - last.ended)
    alive = last.size - len(last.ended)
    return connected >= min_nodes or 2 * connected >= alive or not last.has_missing()


def may_take_over(last: QuorumRound, min_nodes: int) -> bool:
    """Return whether a candidate, or a leader that lost its state, may form a round with the connected members."""
    if not last.has_missing():
        return True
    ranks = set(last.connected.values()) - last.ended
    alive = last.size - len(last.ended)
    if last.leader_group_rank not in last.ended and last.leader_group_rank not in ranks:
        return 2 * len(ranks) > alive and alive - len(ranks) < min_nodes
    return 2 * len(ranks) > alive or (2 * len(ranks) == alive and last.find_lowest_alive() in ranks)


def find_quorum_size(last: QuorumRound, min_nodes: int) -> int:
    """Return how many of the round, the leader's own node included, must stay so that no other side can continue."""
    alive = last.size - len(last.ended)
    if last.is_own:
        return min(min_nodes, (alive + 1) // 2)
    if not last.has_missing():
        return 0
    ranks = set(last.connected.values()) - last.ended
    is_half_enough = (
        last.leader_group_rank in last.ended or last.leader_group_rank in ranks
    ) and last.find_lowest_alive() in ranks
    return (alive + 1) // 2 if is_half_enough else alive // 2 + 1


def may_form_round(quorum_rounds: Iterable[QuorumRound], min_nodes: int) -> bool:
    """Return whether every quorum round allows it. Without any quorum round no other side can exist."""
    return all((may_continue if each.is_own else may_take_over)(each, min_nodes) for each in quorum_rounds)
