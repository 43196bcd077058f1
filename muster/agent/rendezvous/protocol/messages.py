"""Messages between nodes before they are leader and member: leader queries, and announcements after a takeover.

`Message` is what a link carries: any message in any direction. Each receiver reads the union of those that it expects.
"""

from enum import Enum
from typing import Annotated

from muster._shared.codec import MessageUnion
from muster._shared.fields import (
    SPARSE,
    Count,
    GroupRank,
    Host,
    Line,
    Name,
    Port,
    Processes,
    Range,
    RoundNumber,
    Seconds,
    Shared,
)
from muster._shared.records import record
from muster.agent.rendezvous.consensus.actions import SentMessage
from muster.agent.rendezvous.consensus.events import MemberReport
from muster.agent.rendezvous.consensus.recovery import GroupRanks, RecoveryRecord, find_rank_contradiction
from muster.agent.rendezvous.interface import Saved, Summary
from muster.agent.rendezvous.protocol.job_rules import JobRules
from muster.agent.round import PartOffers


@record
class Welcome:
    """The leader has accepted the member."""

    leader_id: Name
    listen_port: Port
    """A port on which only the leader's process listens; 0 if none."""


@record
class HeartbeatReply:
    """The leader has received a heartbeat."""

    number: Count
    at_s: Seconds
    """The leader's CLOCK_BOOTTIME, which the member sends back."""
    recovery: Shared[RecoveryRecord] | None = None
    """The recovery record, if the heartbeat named another version than the leader's."""


@record
class Exit:
    """All members have acknowledged the job's end: exit."""

    peak_bytes: Count = 0
    """The peak memory of the job's largest worker, as far as members have reported it."""


@record
class Rejected:
    """This node is not accepted."""

    reason: Line
    usage: bool = False
    """Whether it is a mistake of the caller."""


@record
class Redirect:
    """Another leader knows a later round."""

    host: Host
    port: Port


@record
class Goodbye:
    """The leader closes this connection; its process has not ended."""

    reason: Line


JobMessage = SentMessage | Exit | Rejected
"""Messages about rounds and the job's end."""

LeaderMessage = Welcome | HeartbeatReply | Redirect | Goodbye | JobMessage

LEADER_MESSAGES: MessageUnion[LeaderMessage] = MessageUnion(LeaderMessage)


Duration = Annotated[float, Range(least=0.0, most=1e7)]


@record
class Join:
    """A node asks to take part, while none of its workers is alive."""

    run_id: Name
    id: Name
    index: Count | None
    nproc: Processes
    role: Name
    host: Name
    port: Port
    """The MASTER_PORT it reserved for the next round."""
    listen_port: Port
    """Port where it accepts links after a takeover; 0 if none."""
    local_addr: Host | None
    rules: JobRules
    """The rules with which it was started."""
    recovery: Annotated[RecoveryRecord, SPARSE] = RecoveryRecord()
    """What it knows of the job, so that nothing is lost with a leader."""
    group_ranks: Annotated[GroupRanks, SPARSE] = ()
    """Its own ranks in the quorum rounds of that record."""
    highest_round: RoundNumber = 0
    """The highest round that it has heard of, if that is higher than the record's."""
    last_leader_id: Name | None = None
    """The last leader that it joined. That leader may have formed rounds that this node never received."""
    is_prepared: bool = True
    """False while it still imports what its workers need."""
    can_host_store: bool = False
    """Whether its agent would host the round's store, if it gets rank 0."""
    stop_limit_s: Duration = 60.0
    """The most time that it takes to stop its workers, by its own configuration."""
    offers: PartOffers = ()
    """What it has for features in the next round."""
    saved: Annotated[Saved | None, SPARSE] = None
    """What it has last reported of a checkpoint, which may have been lost with the link."""
    machine: Name = ""
    """The machine's boot id; "" if unknown."""
    machine_name: Name = ""
    """An administrator's name for the machine, if it is not the host; "" if unknown."""
    segment: Name = ""
    """Its NVLink domain; "" if unknown, or if ranks are not ordered by it."""

    def find_contradiction(self) -> str | None:
        """See `codec`."""
        return find_rank_contradiction(self.recovery, self.group_ranks)


@record
class Heartbeat:
    """The member is alive. The reply renews its lease."""

    number: Count
    echo_s: Seconds | None
    """The leader's own time stamp from its last reply; None before the first."""
    recovery_version: Count = 0
    """The version of the recovery record that this leader sent last; 0 if it has sent none."""


@record
class EndAcknowledged:
    """The member has received the job's end."""

    peak_bytes: Count = 0
    """The peak memory of its largest worker; 0 if unknown."""


MemberMessage = Join | Heartbeat | EndAcknowledged | Summary | MemberReport

MEMBER_MESSAGES: MessageUnion[MemberMessage] = MessageUnion(MemberMessage)


class DiscoveryRole(Enum):
    """What a node is at the moment."""

    LEADER = "leader"
    CANDIDATE = "candidate"
    FOLLOWING = "following"
    SEEKING = "seeking"


@record
class LeaderQuery:
    """Asks a node what its role is and where its leader is."""

    run_id: Name


@record
class StreamOpened:
    """What follows on this connection is a feature's; see `interface.Stream`."""

    run_id: Name
    feature: Name


@record
class Announcement:
    """An acting leader announces itself at the job's endpoint."""

    run_id: Name
    id: Name
    round_number: RoundNumber
    port: Port
    rules: JobRules
    """The rules with which its job was started."""


@record
class QueryReply:
    """The reply to a `LeaderQuery`."""

    role: DiscoveryRole
    round_number: RoundNumber
    group_rank: GroupRank | None
    """Its own group rank in that round."""
    id: Name
    index: Count | None
    leader: tuple[Host, Port] | None
    """Address of its leader, if that is another node."""
    rules: Shared[JobRules]
    """The rules with which it was started."""


@record
class AnnouncementAcknowledged:
    """The reply to an `Announcement`: this node accepts it."""


@record
class AnnouncementRefused:
    """The reply to an `Announcement`: this node leads a later round."""

    port: Port


FirstMessage = LeaderQuery | Announcement | StreamOpened | Join
QueryAnswer = QueryReply | Rejected
AnnouncementAnswer = AnnouncementAcknowledged | AnnouncementRefused

Message = MemberMessage | LeaderMessage | FirstMessage | QueryAnswer | AnnouncementAnswer

FIRST_MESSAGES: MessageUnion[FirstMessage] = MessageUnion(FirstMessage)
QUERY_ANSWERS: MessageUnion[QueryAnswer] = MessageUnion(QueryAnswer)
ANNOUNCEMENT_ANSWERS: MessageUnion[AnnouncementAnswer] = MessageUnion(AnnouncementAnswer)
