"""Actions of the leader: what `decisions.decide` has it do, and the messages that it sends."""

from typing import Annotated

from muster._shared.fields import Count, GroupRank, Host, Limit, Name, Port, Shared, Size
from muster._shared.records import record
from muster._shared.reports import Report
from muster.agent.rendezvous.consensus.quorum import QuorumRound
from muster.agent.rendezvous.consensus.recovery import GroupRanks, RecoveryRecord, find_rank_contradiction
from muster.agent.rendezvous.interface import BreakKind, NoticeKind, PlainLeaderMessage, RendezvousFailed, RoundBroken
from muster.agent.rendezvous.report_messages import RequestAnswer
from muster.agent.round import PartShares


@record
class Successor:
    """The address of a member of the round that may take over when the leader is lost."""

    group_rank: GroupRank
    index: Count | None
    host: Host
    port: Port


@record
class RoundFacts:
    """What every member must know of a round. Its size does not grow with the number of members."""

    recovery: RecoveryRecord
    successors: Annotated[tuple[Successor, ...], Limit(most=64)]
    """The first members that may take over."""
    group_world_size: Size
    world_size: Size
    master_addr: Host
    master_port: Port
    use_agent_store: bool = False
    """Whether the agent with group rank 0 hosts the store, and all workers are its clients."""


@record
class RoundStart:
    """A round in which the member has an assignment."""

    facts: Shared[RoundFacts]
    group_ranks: GroupRanks
    """The member's own rank in each quorum round of the recovery record; the last is in this round."""
    rank_offset: Count
    role_rank_offset: Count
    role_world_size: Size
    shares: PartShares = ()
    """What the parts of features on the member's node must know of the round."""

    @property
    def group_rank(self) -> int:
        """The member's own rank in this round."""
        return self.group_ranks[-1] or 0

    def find_contradiction(self) -> str | None:
        """Find a rank that is not in the round."""
        facts = self.facts.value
        if not self.group_ranks or self.group_ranks[-1] is None:
            return "no group rank"
        if self.group_rank >= facts.group_world_size or self.rank_offset >= facts.world_size:
            return f"group rank {self.group_rank} of {facts.group_world_size}"
        return find_rank_contradiction(facts.recovery, self.group_ranks)


@record
class RoundSummary:
    """A round in which the member has no assignment.

    Like the others, the member must be able to find the next leader.
    """

    facts: Shared[RoundFacts]
    group_ranks: GroupRanks
    """See `RoundStart`."""
    is_spare: bool = False
    """Whether the job is full, so that the member waits as a spare."""

    def find_contradiction(self) -> str | None:
        """See `codec`."""
        return find_rank_contradiction(self.facts.value.recovery, self.group_ranks)


@record
class RecoveryChanged:
    """Every member of the round has acknowledged it, or all ranks have saved a checkpoint.

    Members learn of other changes with the next round or heartbeat.
    """

    recovery: Shared[RecoveryRecord]


@record
class RoundBreak:
    """The round has ended."""

    broken: RoundBroken
    """What the member's node must do. The member itself knows whether it leads."""
    recovery: Shared[RecoveryRecord]
    """What follows from the break: the next attempt, why there is none, or whose part has ended with a drain."""

    def find_contradiction(self) -> str | None:
        """Find a final failure without `BreakKind.FINAL`, or the kind without a final failure."""
        is_final = self.broken.kind is BreakKind.FINAL
        return None if is_final == (self.recovery.value.final is not None) else "'final' contradicts 'kind'"


@record
class JobEnd:
    """The job has ended."""

    succeeded: bool
    report: Shared[Report] | None
    printer_id: Name | None
    """The member that prints the report."""
    is_drained: bool = False


SentMessage = (
    RoundStart
    | RoundSummary
    | RecoveryChanged
    | RoundBreak
    | PlainLeaderMessage
    | RequestAnswer
    | JobEnd
    | RendezvousFailed
)


@record
class Send:
    """Send the message to these members."""

    ids: tuple[str, ...]
    message: SentMessage


@record
class DropMembers:
    """Close the connections of these members, which then count as lost."""

    ids: tuple[str, ...]
    reason: str


@record
class CheckLease:
    """Answer with `events.LeaseChecked`: would the leader's own workers have a lease if these were the rounds?

    Members that are needed may be free to join another leader by now; then this leader would have no lease.
    """

    quorum_rounds: tuple[QuorumRound, ...]


@record
class SetTimer:
    """Feed `events.TimerFired` at this time. It replaces the timer set before."""

    round_number: int
    due_s: float
    """When the timer fires; infinity means that no timer is needed."""


@record
class Notify:
    """One line for the leader's console."""

    text: str
    kind: NoticeKind = NoticeKind.LINE
    ranks: tuple[int, ...] = ()
    feature: str = ""


Action = Send | Notify | DropMembers | CheckLease | SetTimer
