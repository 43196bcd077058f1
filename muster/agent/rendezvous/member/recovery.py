"""What one node knows of the job and sends to its next leader, so that nothing is lost when a leader ends."""

from muster._shared.records import replace
from muster.agent.rendezvous.consensus.actions import RoundBreak
from muster.agent.rendezvous.consensus.members import RecoveryState
from muster.agent.rendezvous.consensus.quorum import RecoveredRound, build_quorum_round
from muster.agent.rendezvous.protocol.leader_messages import RoundFacts, Successor
from muster.agent.round import Checkpoint


class RecoveryTracker:
    """Kept up to date by the member; read by discovery and by the server."""

    def __init__(self, checkpoint: Checkpoint | None = None) -> None:
        """Begin with the last checkpoint of the job's earlier incarnations."""
        self.state = RecoveryState(checkpoint=checkpoint)
        self.successors: tuple[Successor, ...] = ()
        self.group_rank: int | None = None
        """This node's group rank in the last round it knows."""
        self.leader_id: str | None = None
        self.leader_address: tuple[str, int] | None = None
        """Host of the last leader elsewhere, and the port of its process; 0: none."""
        self.led_rounds: set[int] = set()
        """Rounds that the last leader formed while it was this node's leader: its end counts for these."""

    @property
    def round_number(self) -> int:
        """The last round this node knows; 0 before the first."""
        return self.state.round_number

    def record_leader(self, leader_id: str) -> None:
        """A leader has accepted this node."""
        if self.leader_id != leader_id:
            self.leader_id = leader_id
            self.led_rounds = set()

    def record_round(
        self, facts: RoundFacts, quorum_rounds: tuple[RecoveredRound, ...], group_rank: int | None
    ) -> None:
        """A round was formed; `group_rank` is None when this node does not take part in it."""
        self.state = RecoveryState(
            round_number=facts.round_number,
            attempt=facts.attempt,
            startup_signature=facts.startup_signature,
            quorum_rounds=quorum_rounds,
            checkpoint=self.state.checkpoint,
        )
        self.successors = facts.successors
        self.group_rank = group_rank
        self.led_rounds.add(self.round_number)

    def record_commit(self, round_number: int) -> None:
        """All members have acknowledged the round: a quorum of earlier rounds is not needed any more."""
        if round_number == self.round_number:
            quorum_rounds = tuple(each for each in self.state.quorum_rounds if each.round_number >= round_number)
            self.state = replace(self.state, quorum_rounds=quorum_rounds)

    def record_checkpoint(self, checkpoint: Checkpoint | None) -> bool:
        """All ranks have saved this checkpoint; False when this node knows it, or a later one."""
        known = self.state.checkpoint
        if checkpoint is None or (known is not None and known.number >= checkpoint.number):
            return False
        self.state = replace(self.state, checkpoint=checkpoint)
        return True

    def record_break(self, broken: RoundBreak) -> None:
        """The round has ended: remember the number of the next attempt, for the next leader too."""
        self.state = replace(
            self.state,
            attempt=broken.next_attempt,
            startup_signature=broken.startup_signature,
            final=broken.final or self.state.final,
        )
        self.record_ended(broken.broken.round_number, broken.ended)

    def record_ended(self, round_number: int, group_ranks: frozenset[int]) -> None:
        """Processes of these ranks of a round were seen to end."""
        quorum_rounds = tuple(
            replace(each, ended=each.ended | group_ranks) if each.round_number == round_number else each
            for each in self.state.quorum_rounds
        )
        self.state = replace(self.state, quorum_rounds=quorum_rounds)

    def record_leader_end(self, led_rounds: set[int]) -> None:
        """The process that led these rounds was seen to end; one that has not formed a round yet, too."""
        for successor in self.successors:
            if (successor.host, successor.port) == self.leader_address:
                self.record_ended(self.round_number, frozenset({successor.group_rank}))
        for each in self.state.quorum_rounds:
            if each.round_number in led_rounds:
                self.record_ended(each.round_number, frozenset({each.leader_group_rank}))

    def is_leaders_index(self, index: int | None) -> bool:
        """True when the last leader had this node index."""
        if index is None:
            return False
        led = [each for each in self.state.quorum_rounds if each.round_number in self.led_rounds]
        return any(build_quorum_round(each).find_group_rank(index) == each.leader_group_rank for each in led)
