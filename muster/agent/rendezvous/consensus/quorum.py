"""Who may form a round when some of the last one cannot be heard: pure arithmetic over counts of ranks.

Silence proves nothing: the silent ones may be training on the other side of a partition. A process end that was
*observed* proves that its workers are gone. So ended members leave the sum, and of the rest at most one side may win:

- The leader in office may go on with at least `min` members of the last round, or with half of those not ended.
- Others may go on without a leader seen to end only with more than half, and only when those who are left cannot
  reach `min` (else the old leader, alive behind a partition, would go on as well).
- Once the leader was seen to end, half is enough for the side that holds the lowest rank not seen to end.
- When every member is accounted for, joined or ended, nobody is left to collide with.

No two of these can hold at once for disjoint sides. Counting the ended *for* a candidate instead of leaving them out
(joined + ended > half) is not safe: with three nodes and the leader dead, both survivors would win alone.

An end is only *seen* by who was linked until then. That a node's index was claimed by a new process also proves the
old one's end, but not when it came: before it, the old process may have formed rounds that we never heard of. Such
late evidence counts for the last rule only.

A round that not all of its members have confirmed is not yet a base on its own: those who never heard of it act on
the one before. Until then a majority of both is needed (as in Raft's joint consensus), each by its own rule: who took
over is in office for the rounds it formed, and still somebody who took over for those before. Else the votes of a
takeover could go elsewhere, and two sides go on.
"""

from collections.abc import Iterable

from muster.agent.rendezvous.consensus.persistent import PersistentMap
from muster.agent.runtime.records import record, replace

INDICES_KEPT = 64
"""What every member carries of a round must not grow with the number of members."""


@record
class CarriedBase:
    """What one member carries of a base: the counts, its own rank, the ends it knows of."""

    number: int
    by: str
    size: int
    leader: int
    indices: tuple[int | None, ...] = ()
    rank: int | None
    """None: it had no seat."""
    ended: frozenset[int]


@record
class QuorumBase:
    """A round that was formed, and who of it is accounted for."""

    number: int
    by: str
    """Id of the leader that formed it. Two leaders that do not know of each other may use one number."""
    size: int
    leader: int
    """Group rank of the leader's own node in that round."""
    own: bool = False
    """Formed by the leader that holds it, in its present office."""
    late: bool = False
    """It came to light after the running round had been formed, which therefore does not replace it."""
    indices: tuple[int | None, ...] = ()
    """Node index of each group rank, as far as `INDICES_KEPT`; empty when every rank is its node's index."""
    held: PersistentMap[str, int] = PersistentMap()
    """Member id -> group rank, of those connected now."""
    ended: frozenset[int] = frozenset()
    """Group ranks whose process end was seen."""
    claimed: frozenset[int] = frozenset()
    """Group ranks whose node index was claimed by a new process."""

    def is_same(self, other: "QuorumBase | CarriedBase") -> bool:
        """True for what somebody else knows of this round."""
        return (self.number, self.by) == (other.number, other.by)

    def find_rank(self, index: int) -> int | None:
        """The group rank that the node with this index had."""
        if not self.indices:
            return index if 0 <= index < self.size else None
        return self.indices.index(index) if index in self.indices else None

    def with_claim(self, member_id: str, index: int | None) -> "QuorumBase":
        """After a member was heard that did not bring this base along, but has the node index of one of its ranks.

        Its process is a new one: the scheduler started it because the old one had ended.
        """
        if index is None or member_id in self.held:
            return self
        rank = self.find_rank(index)
        if rank is None or rank in self.claimed or rank in self.held.values():
            return self
        return replace(self, claimed=self.claimed | {rank})

    def lowest_alive(self) -> int:
        """The lowest rank not seen to end; `size` when all have ended."""
        return next((rank for rank in range(self.size) if rank not in self.ended), self.size)

    def missing(self) -> int:
        """How many are neither connected nor known to have ended."""
        return self.size - len(self.ended.union(self.claimed, self.held.values()))

    def is_missing_some(self) -> bool:
        """True when `missing` is not 0; mostly found without looking at each, and asked at every join."""
        at_most = len(self.ended) + len(self.claimed) + len(self.held)
        return at_most < self.size or self.missing() > 0

    def carried_by(self, member_id: str) -> CarriedBase:
        """What this member carries of it."""
        return CarriedBase(
            number=self.number,
            by=self.by,
            size=self.size,
            leader=self.leader,
            indices=self.indices,
            rank=self.held.get(member_id),
            ended=self.ended,
        )


def build_base(carried: CarriedBase) -> QuorumBase:
    """A base as far as its carrier knows it, holding nobody."""
    return QuorumBase(
        number=carried.number,
        by=carried.by,
        size=carried.size,
        leader=carried.leader,
        indices=carried.indices,
        ended=carried.ended,
    )


def may_go_on(base: QuorumBase, min_nodes: int) -> bool:
    """True when the leader in office may form the next round with the members it holds."""
    held = len(set(base.held.values()) - base.ended)
    alive = base.size - len(base.ended)
    return held >= min_nodes or 2 * held >= alive or not base.is_missing_some()


def may_take_over(base: QuorumBase, min_nodes: int) -> bool:
    """True when a candidate, or a leader that lost its state, may form the next round with those who joined it."""
    if not base.is_missing_some():
        return True
    ranks = set(base.held.values()) - base.ended
    alive = base.size - len(base.ended)
    if base.leader not in base.ended and base.leader not in ranks:
        return 2 * len(ranks) > alive and alive - len(ranks) < min_nodes
    return 2 * len(ranks) > alive or (2 * len(ranks) == alive and base.lowest_alive() in ranks)


def count_votes(base: QuorumBase, min_nodes: int) -> int:
    """How many of the round, with the leader's own node, must stay with a leader so that nobody else can go on."""
    alive = base.size - len(base.ended)
    if base.own:
        return min(min_nodes, (alive + 1) // 2)
    if not base.is_missing_some():
        return 0
    ranks = set(base.held.values()) - base.ended
    is_half_enough = (base.leader in base.ended or base.leader in ranks) and base.lowest_alive() in ranks
    return (alive + 1) // 2 if is_half_enough else alive // 2 + 1


def may_form(bases: Iterable[QuorumBase], min_nodes: int) -> bool:
    """True when every base allows it; without any base there is nobody to collide with."""
    return all((may_go_on if base.own else may_take_over)(base, min_nodes) for base in bases)
