"""What one node knows of the job and sends to its next leader, so that nothing is lost when a leader ends."""

from muster.agent.rendezvous.consensus.members import RecoveryState
from muster.agent.rendezvous.consensus.quorum import build_base
from muster.agent.rendezvous.interface import BreakKind
from muster.agent.rendezvous.protocol.leader_messages import RoundBreak, RoundSummary, Successor
from muster.agent.runtime.records import replace


class RecoveryTracker:
    """Kept up to date by the member; read by discovery and by the server."""

    def __init__(self) -> None:
        self.state = RecoveryState()
        self.successors: tuple[Successor, ...] = ()
        self.rank: int | None = None
        """This node's group rank in the last round it knows."""
        self.leader_id: str | None = None
        self.leader_address: tuple[str, int] | None = None
        """Host of the last leader elsewhere, and the port of its process; 0: none."""
        self.leader_rounds: set[int] = set()
        """Rounds that the last leader formed while it was this node's leader: its end counts for these."""

    @property
    def round(self) -> int:
        """The last round this node knows; 0 before the first."""
        return self.state.round

    def record_leader(self, leader_id: str) -> None:
        """A leader has accepted this node."""
        if self.leader_id != leader_id:
            self.leader_id = leader_id
            self.leader_rounds = set()

    def record_round(self, summary: RoundSummary, rank: int | None) -> None:
        """A round was formed; `rank` is None when this node does not take part in it."""
        self.state = summary.recovery_state
        self.successors = summary.successors
        self.rank = rank
        self.leader_rounds.add(self.round)

    def record_commit(self, number: int) -> None:
        """All members have acknowledged the round: earlier rounds are no quorum base any more."""
        if number == self.round:
            bases = tuple(base for base in self.state.quorum_bases if base.number >= number)
            self.state = replace(self.state, quorum_bases=bases)

    def record_break(self, broken: RoundBreak) -> None:
        """The round has ended: remember the number of the next attempt, for the next leader too."""
        final = broken.reason if broken.kind is BreakKind.FINAL else self.state.final_reason
        self.state = replace(
            self.state, attempt=broken.next_attempt, startup_signature=broken.startup_signature, final_reason=final
        )

    def record_ended(self, number: int, ranks: frozenset[int]) -> None:
        """Processes of these ranks of a round were seen to end."""
        bases = tuple(
            replace(base, ended=base.ended | ranks) if base.number == number else base
            for base in self.state.quorum_bases
        )
        self.state = replace(self.state, quorum_bases=bases)

    def record_leader_end(self, rounds: set[int]) -> None:
        """The process that led these rounds was seen to end."""
        for base in self.state.quorum_bases:
            if base.number in rounds:
                self.record_ended(base.number, frozenset({base.leader_rank}))

    def is_leaders_index(self, index: int | None) -> bool:
        """True when the last leader had this node index."""
        if index is None:
            return False
        led = [base for base in self.state.quorum_bases if base.number in self.leader_rounds]
        return any(build_base(base).find_rank(index) == base.leader_rank for base in led)
