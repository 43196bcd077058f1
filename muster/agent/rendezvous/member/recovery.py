"""What one node knows of the job and carries to its next leader, so that no leader takes it to its grave."""

from muster.agent.rendezvous.consensus.members import RecoveryState
from muster.agent.rendezvous.consensus.quorum import build_base
from muster.agent.rendezvous.interface import BreakKind
from muster.agent.rendezvous.protocol.leader_messages import RoundBreak, RoundSummary, Successor
from muster.agent.runtime.records import replace


class RecoveryTracker:
    """Kept up by the member, read by whoever looks for a leader or is asked for one."""

    def __init__(self) -> None:
        self.carry = RecoveryState()
        self.successors: tuple[Successor, ...] = ()
        self.rank: int | None = None
        """This node's group rank in the last round it knows."""
        self.leader_id: str | None = None
        self.leader_place: tuple[str, int] | None = None
        """Where the last leader elsewhere was, and the port that is its process's own; 0: none."""
        self.session_rounds: set[int] = set()
        """Rounds that the last leader formed while it was ours: its end counts for these."""

    @property
    def round(self) -> int:
        """The last round this node knows; 0 before the first."""
        return self.carry.round

    def meet_leader(self, leader_id: str) -> None:
        """A leader has taken this node in."""
        if self.leader_id != leader_id:
            self.leader_id = leader_id
            self.session_rounds = set()

    def take_roster(self, roster: RoundSummary, rank: int | None) -> None:
        """A round was formed; `rank` is None when this node has no seat in it."""
        self.carry = roster.recovery_state
        self.successors = roster.successors
        self.rank = rank
        self.session_rounds.add(self.round)

    def settle(self, number: int) -> None:
        """All members of the round have it: those before are no base any more."""
        if number == self.round:
            bases = tuple(base for base in self.carry.quorum_bases if base.number >= number)
            self.carry = replace(self.carry, quorum_bases=bases)

    def take_break(self, broken: RoundBreak) -> None:
        """The round is over; what the next attempt will be is known from now on, also to the next leader."""
        final = broken.reason if broken.kind is BreakKind.FINAL else self.carry.final_reason
        self.carry = replace(
            self.carry, attempt=broken.next_attempt, startup_signature=broken.startup_signature, final_reason=final
        )

    def note_ended(self, number: int, ranks: frozenset[int]) -> None:
        """Processes of a round were seen to end."""
        bases = tuple(
            replace(base, ended=base.ended | ranks) if base.number == number else base
            for base in self.carry.quorum_bases
        )
        self.carry = replace(self.carry, quorum_bases=bases)

    def note_leader_ended(self, rounds: set[int]) -> None:
        """The process that led these rounds was seen to end."""
        for base in self.carry.quorum_bases:
            if base.number in rounds:
                self.note_ended(base.number, frozenset({base.leader_rank}))

    def is_leaders_index(self, index: int | None) -> bool:
        """True when the last leader had this node index."""
        if index is None:
            return False
        led = [base for base in self.carry.quorum_bases if base.number in self.session_rounds]
        return any(build_base(base).find_rank(index) == base.leader_rank for base in led)
