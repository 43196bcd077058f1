"""Messages from the leader to its members. Those that `consensus` sends are in `consensus.actions`."""

from muster._shared.codec import MessageUnion
from muster._shared.fields import Count, Host, Line, Name, Port, Seconds, Shared
from muster._shared.records import record
from muster.agent.rendezvous.consensus.actions import SentMessage
from muster.agent.rendezvous.consensus.recovery import RecoveryRecord


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
