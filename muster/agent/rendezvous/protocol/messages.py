"""Messages between nodes before they are leader and member: leader queries, and announcements after a takeover.

`Message` is what a link carries: any message in any direction. Each receiver reads the union of those that it expects.
"""

from enum import Enum

from muster._shared.codec import MessageUnion
from muster._shared.fields import Count, GroupRank, Host, Name, Port, RoundNumber
from muster._shared.records import record
from muster.agent.rendezvous.protocol.job_rules import JobRules
from muster.agent.rendezvous.protocol.leader_messages import LeaderMessage, Rejected
from muster.agent.rendezvous.protocol.member_messages import Join, MemberMessage


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
    rules: JobRules
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
