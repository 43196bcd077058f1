"""Actions of the leader: what `decisions.decide` asks it to do, and the messages that it sends."""

from muster._shared.fields import Count, Name, Paragraph, RoundNumber, Shared
from muster._shared.records import record
from muster._shared.reports import FinalFailure, Report
from muster.agent.rendezvous.consensus.members import RankAssignment
from muster.agent.rendezvous.consensus.quorum import EndedRanks, QuorumRound
from muster.agent.rendezvous.interface import BreakKind, NoticeKind, PlainLeaderMessage, RendezvousFailed, RoundBroken
from muster.agent.rendezvous.report_messages import RequestAnswer


@record
class RoundCommitted:
    """Every member of the round has acknowledged it: a quorum of older rounds is not needed any more."""

    round_number: RoundNumber


@record
class RoundBreak:
    """The round has ended."""

    broken: RoundBroken
    """What the member's node is to do. The member itself knows whether it leads."""
    next_attempt: Count
    startup_signature: Paragraph | None
    final: FinalFailure | None = None
    """With `BreakKind.FINAL`, and only with it."""
    ended: EndedRanks = frozenset()
    """With `BreakKind.DRAINED`: group ranks that have asked to leave and whose workers have ended."""

    def find_contradiction(self) -> str | None:
        """See `codec`."""
        is_final = self.broken.kind is BreakKind.FINAL
        return None if is_final == (self.final is not None) else "'final' contradicts 'kind'"


@record
class JobEnd:
    """The job has ended."""

    succeeded: bool
    report: Shared[Report] | None
    printer_id: Name | None
    """The member that prints the report."""
    is_drained: bool = False


SentMessage = RoundCommitted | RoundBreak | PlainLeaderMessage | RequestAnswer | JobEnd | RendezvousFailed


@record
class Send:
    """Send the message to these members."""

    ids: tuple[str, ...]
    message: SentMessage


@record
class FormRound:
    """Send each member of the round its ranks; rank 0's port is `master_port`."""

    round_number: int
    attempt: int
    restarts_left: int
    world_size: int
    master_port: int
    use_agent_store: bool
    """Rank 0's agent hosts the store. Not for a single worker, which has no other to wait for."""
    assignments: tuple[RankAssignment, ...]
    """In order of group rank."""
    quorum_rounds: tuple[QuorumRound, ...]
    startup_signature: str | None


@record
class DropMembers:
    """Close the connections of these members: they count as lost."""

    ids: tuple[str, ...]
    reason: str


@record
class CheckLease:
    """Answer with `events.LeaseChecked`: would the leader's own workers have a lease if these were the rounds?

    Members that are needed may be free to join another leader by now: then this leader would have none.
    """

    quorum_rounds: tuple[QuorumRound, ...]


@record
class SetTimer:
    """Feed `events.TimerFired` at this time; it replaces the timer set before."""

    round_number: int
    due_s: float
    """Infinity: no timer is needed."""


@record
class Notify:
    """One line for the leader's console."""

    text: str
    kind: NoticeKind = NoticeKind.LINE


Action = Send | FormRound | Notify | DropMembers | CheckLease | SetTimer
