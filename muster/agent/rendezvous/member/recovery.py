"""Holds what one node knows of the job and sends to its next leader, so that nothing is lost at a leader's end.

Pure.
"""

from muster._shared.records import record, replace
from muster.agent.rendezvous.consensus.actions import RoundFacts, Successor
from muster.agent.rendezvous.consensus.quorum import build_quorum_round
from muster.agent.rendezvous.consensus.recovery import RecoveryRecord, find_later, merge_recovery


@record
class MemberRecovery:
    """The recovery record, and what only this node knows beside it."""

    record: RecoveryRecord = RecoveryRecord()
    group_ranks: tuple[int | None, ...] = ()
    """This node's own ranks in the quorum rounds of the record."""
    version: int = 0
    """The version of the record that the leader has sent last; 0 if none yet."""
    highest_round: int = 0
    """The highest round that this node has heard of, because a leader that lost its memory begins with 1 again."""
    successors: tuple[Successor, ...] = ()
    leader_id: str | None = None
    leader_address: tuple[str, int] | None = None
    """Host of the last leader elsewhere, and the port of its process; 0 if none."""
    led_rounds: frozenset[int] = frozenset()
    """Rounds that the last leader formed while it was this node's leader. Its end counts for these."""

    @property
    def round_number(self) -> int:
        """The last round this node knows; 0 before the first."""
        return self.record.round_number

    @property
    def group_rank(self) -> int | None:
        """This node's own rank in that round; None if it has no assignment."""
        return self.group_ranks[-1] if self.group_ranks else None

    def with_leader(self, leader_id: str) -> "MemberRecovery":
        """Return the record after a leader has accepted this node."""
        led_rounds = self.led_rounds if self.leader_id == leader_id else frozenset()
        return replace(self, version=0, leader_id=leader_id, led_rounds=led_rounds)

    def with_round(self, facts: RoundFacts, group_ranks: tuple[int | None, ...]) -> "MemberRecovery":
        """Return the record after a round was formed.

        The last of `group_ranks` is None if this node does not take part in it.
        """
        told = facts.recovery
        return replace(
            self,
            record=replace(told, checkpoint=find_later(self.record.checkpoint, told.checkpoint)),
            group_ranks=group_ranks,
            version=told.version,
            highest_round=max(self.highest_round, told.round_number),
            successors=facts.successors,
            led_rounds=self.led_rounds | {told.round_number},
        )

    def with_record(self, told: RecoveryRecord) -> "MemberRecovery":
        """Return the record with a change by the leader. In a change of another round only the checkpoint counts."""
        if not self.record.is_same_round(told):
            checkpoint = find_later(self.record.checkpoint, told.checkpoint)
            return replace(self, version=told.version, record=replace(self.record, checkpoint=checkpoint))
        merged = merge_recovery(self.record, told)
        ranks = zip(self.record.quorum_rounds, self.group_ranks, strict=True)
        kept = tuple(rank for each, rank in ranks if any(each.is_same(one) for one in merged.quorum_rounds))
        return replace(self, version=told.version, record=merged, group_ranks=kept)

    def with_ended(self, round_number: int, group_ranks: frozenset[int]) -> "MemberRecovery":
        """Return the record after processes of these ranks of a round were seen to end."""
        quorum_rounds = tuple(
            replace(each, ended=each.ended | group_ranks) if each.round_number == round_number else each
            for each in self.record.quorum_rounds
        )
        return replace(self, record=replace(self.record, quorum_rounds=quorum_rounds))

    def with_leader_end(self, led_rounds: frozenset[int]) -> "MemberRecovery":
        """Return the record after the process that led these rounds was seen to end, even one without a round yet."""
        made = self
        for successor in self.successors:
            if (successor.host, successor.port) == self.leader_address:
                made = made.with_ended(self.round_number, frozenset({successor.group_rank}))
        for each in self.record.quorum_rounds:
            if each.round_number in led_rounds:
                made = made.with_ended(each.round_number, frozenset({each.leader_group_rank}))
        return made

    def is_leaders_index(self, index: int | None) -> bool:
        """Return whether the last leader had this node index."""
        if index is None:
            return False
        led = [each for each in self.record.quorum_rounds if each.round_number in self.led_rounds]
        return any(build_quorum_round(each).find_group_rank(index) == each.leader_group_rank for each in led)
