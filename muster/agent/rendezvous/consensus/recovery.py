"""The recovery record: what the next leader must know, so that nothing is lost with a leader. Pure.

The leader keeps the record up to date (`state.update_recovery`) and counts its changes in `version`. It sends it with
every round and every break, at once when a round is committed or a checkpoint is complete, and with the answer to a
heartbeat that names another version. A member keeps what `merge_recovery` makes of it, and brings it to its next
leader, which merges it the same way as long as it has formed no round.

What must hold of `merge_recovery`; `test_recovery` checks it for all records, the simulation for all histories:

- The record of the later round wins. A leader forms a round only with a quorum of the rounds before, and joins count
  what their members know. So the leader that formed the later round knew the earlier one, its attempt and its end.
- Within one round nothing is undone. Attempt and checkpoint only rise, ended ranks only become more, a final failure
  stays, and an earlier round that one side has seen replaced is not needed again. So neither the order in which records
  of a round arrive nor a repeated record changes anything.
- Nothing is invented: each ended rank was ended in one of the two records, and in the same round. Too few ended ranks
  only mean that a candidate needs more others; one too many would let two sides continue.
- Two leaders that do not know of each other may use the same round number. Then the round that was known first keeps
  its quorum; attempt and final failure are still those of the one that got further.
- The causes of failed attempts, with the suspected nodes, are taken as a whole from the record of the later attempt.
- The checkpoint is the job's, not the round's: the one with the highest number stays.
- What features remember is the round's. A round begins with what it continues, which may be older than what an earlier
  round had; within the round it only becomes newer, by the feature's own order.

The leader that formed the running round merges no round into its own. It keeps rounds of others beside it, as rivals
(`membership`). A member merges only what is about the round that it knows, because rounds reach it by `RoundStart` and
`RoundSummary`, which say what its own rank in them is.
"""

from muster._shared.fields import Count, GroupRank, RoundNumber
from muster._shared.records import record, replace
from muster._shared.reports import FinalFailure
from muster.agent.features import load_half
from muster.agent.rendezvous.consensus.quorum import RecoveredRound
from muster.agent.rendezvous.interface import CheckpointCompleted, PartRemembered
from muster.agent.rendezvous.restarts import Restarts
from muster.agent.round import Checkpoint, PartMemories

GroupRanks = tuple[GroupRank | None, ...]
"""A member's own rank in each of a record's quorum rounds; None if it had no assignment."""


@record
class RecoveryRecord:
    """What every member knows of the job. Its size does not grow with the number of members."""

    version: Count = 0
    """How often the leader that sent it has changed it."""
    round_number: RoundNumber = 0
    """The last round; 0 before the first."""
    attempt: Count = 0
    """The attempt of the next round, once this one has ended: the used part of the restart budget."""
    restarts: Restarts = Restarts()
    """What the attempts so far have failed of, and on which nodes."""
    final: FinalFailure | None = None
    """Why the job failed for good in its last round; None while it may continue."""
    quorum_rounds: tuple[RecoveredRound, ...] = ()
    """The last round, preceded by those that it has not yet replaced."""
    checkpoint: Checkpoint | None = None
    """The last checkpoint that all ranks of the job have saved."""
    memories: PartMemories = ()
    """What features remember of the job in its last round."""

    def is_same_round(self, other: "RecoveryRecord") -> bool:
        """Return whether both are about the same round of the same leader."""
        mine, theirs = self.quorum_rounds[-1:], other.quorum_rounds[-1:]
        is_same = all(one.is_same(another) for one, another in zip(mine, theirs, strict=False))
        return self.round_number == other.round_number and len(mine) == len(theirs) and is_same


def find_rank_contradiction(known: RecoveryRecord, group_ranks: tuple[int | None, ...]) -> str | None:
    """Return what is wrong with a member's own ranks, for `find_contradiction` of the messages that have both."""
    if len(group_ranks) != len(known.quorum_rounds):
        return f"{len(group_ranks)} ranks in {len(known.quorum_rounds)} rounds"
    sizes = ((each, rank) for each, rank in zip(known.quorum_rounds, group_ranks, strict=True) if rank is not None)
    return next((f"rank {rank} in a round of {each.size}" for each, rank in sizes if rank >= each.size), None)


def merge_recovery(known: RecoveryRecord, other: RecoveryRecord) -> RecoveryRecord:
    """Return what is known with both records: see above. The version is that of the winning record."""
    if known == other:
        return known
    later, earlier = (other, known) if other.round_number > known.round_number else (known, other)
    if later.round_number == earlier.round_number:
        later = _merge_equals(later, earlier)
    checkpoint = find_later(later.checkpoint, earlier.checkpoint)
    quorum_rounds = tuple(_unite_ended(each, earlier.quorum_rounds) for each in later.quorum_rounds)
    return replace(later, quorum_rounds=quorum_rounds, checkpoint=checkpoint)


def _merge_equals(known: RecoveryRecord, other: RecoveryRecord) -> RecoveryRecord:
    """Return two records of one round number: what each leader, or the one leader at different times, has sent."""
    quorum_rounds = known.quorum_rounds
    if known.is_same_round(other):
        quorum_rounds = tuple(each for each in quorum_rounds if any(each.is_same(one) for one in other.quorum_rounds))
    used = max((known, other), key=lambda each: (each.attempt, *_order_restarts(each.restarts)))
    return replace(
        known,
        version=max(known.version, other.version),
        attempt=used.attempt,
        restarts=used.restarts,
        final=known.final or other.final,
        quorum_rounds=quorum_rounds,
        memories=_merge_memories(known.memories, other.memories),
    )


def _merge_memories(known: PartMemories, other: PartMemories) -> PartMemories:
    """Return the newer memory of each feature. Of a feature that this node does not have, any total order will do."""
    if known == other:
        return known
    found = {memory.feature: memory for memory in known}
    for memory in other:
        mine = found.get(memory.feature)
        half = None if mine in (None, memory) else load_half(memory.feature, "leader")
        if mine is None:
            found[memory.feature] = memory
        elif mine != memory:
            found[memory.feature] = max(mine, memory, key=repr) if half is None else half.choose_newer(mine, memory)
    return tuple(sorted(found.values(), key=lambda memory: memory.feature))


def _order_restarts(restarts: Restarts) -> tuple[int, int, bool, str]:
    """Order two records of one attempt. The one that knows more wins; any total order will do."""
    return restarts.free, sum(each.count for each in restarts.faults), restarts.has_reported, repr(restarts)


def _unite_ended(quorum_round: RecoveredRound, others: tuple[RecoveredRound, ...]) -> RecoveredRound:
    ended = quorum_round.ended.union(*(each.ended for each in others if quorum_round.is_same(each)))
    return quorum_round if ended == quorum_round.ended else replace(quorum_round, ended=ended)


def list_news(known: RecoveryRecord, found: RecoveryRecord) -> tuple[PartRemembered | CheckpointCompleted, ...]:
    """Return what a node learns of the running round and the job, if it knew the first record and now the second."""
    is_same = found.round_number == known.round_number
    new = (memory for memory in found.memories if memory not in known.memories) if is_same else ()
    news: list[PartRemembered | CheckpointCompleted] = [
        PartRemembered(round_number=found.round_number, memory=memory) for memory in new
    ]
    if found.checkpoint is not None and found.checkpoint != known.checkpoint:
        news.append(CheckpointCompleted(checkpoint=found.checkpoint))
    return tuple(news)


def find_later(known: Checkpoint | None, other: Checkpoint | None) -> Checkpoint | None:
    """Return the checkpoint with the higher number, from another leader or the job's earlier incarnation."""
    if known is None or other is None:
        return known or other
    return other if other.number > known.number else known
