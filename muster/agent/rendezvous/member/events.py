"""What goes into the member's decisions, and what comes out of them."""

from enum import Enum

from muster._shared.records import record
from muster.agent.rendezvous.interface import NodeMessage, RendezvousEvent
from muster.agent.rendezvous.protocol.messages import LeaderMessage, MemberMessage, QueryReply
from muster.agent.rendezvous.report_messages import Stopped
from muster.agent.rendezvous.transport.links import LinkEnd


@record
class Target:
    """An address to ask for a leader."""

    host: str
    port: int
    group_rank: int | None = None
    """Group rank of the member that listens there; None for the job's endpoint."""


class TimerKind(Enum):
    """The member's timers. Each is set at most once at a time."""

    DEADLINE = "deadline"
    """No leader was found within the join timeout."""
    JOIN = "join"
    """A leader that accepted the connection has not answered the join."""
    ENDPOINT = "endpoint"
    """The endpoint, which was in use, is tried again."""
    PAUSE = "pause"
    """The search may start again after a malformed message."""
    LINGER = "linger"
    """The job's end is known, and its leader has ended: no other member still waits for the end here."""


# -- events ------------------------------------------------------------------------------------------------------------


@record
class Started:
    """The supervisor wants to take part."""

    is_prepared: bool = True
    open_error: str = ""
    """Why no port could be reserved; "" if it was, or if none is needed."""


@record
class NodeSent:
    """The supervisor has a message for the leader."""

    message: NodeMessage


@record
class LocalChecked:
    """The answer to `CheckLocal`."""

    is_local: bool
    is_check: bool = False
    has_formed_round: bool = False
    """Whether the leader on this node has formed a round."""


@record
class EndpointTried:
    """The answer to `OpenEndpoint`."""

    error: str = ""
    """Why this process cannot listen there; "" if it does."""


@record
class Excluded:
    """This node cannot take part, because others could not reach it, or the node at the endpoint refuses it."""

    reason: str


@record
class Answered:
    """A node has answered the search. Its link waits for `TakeLink`."""

    reply: QueryReply
    target: Target
    peer_host: str = ""
    silent_host: str = ""
    """The link's; see `Link`."""
    has_formed_round: bool = False
    """Whether the leader on this node has formed a round."""


@record
class SearchTurned:
    """All addresses were asked once more, or one did not answer."""

    unanswered: tuple[int, ...] = ()
    """Group ranks of the members that have neither answered nor failed to."""
    age_s: float = 0.0
    failure: LinkEnd | None = None
    has_endpoint: bool = False
    """Whether this process listens at the job's endpoint."""


@record
class LeaderSent:
    """A message of the leader, which came in time."""

    message: LeaderMessage
    is_reachable: bool = True
    """With `RoundStart`, whether this process listens where the leader sends other nodes after its end."""


@record
class LeaderMalformed:
    """The leader has sent a message that is malformed."""

    error: str
    promise_until_s: float


@record
class LinkClosed:
    """The link closed without a goodbye: either the leader's process has ended, or the connection broke."""

    reason: str
    promise_until_s: float
    is_leased_elsewhere: bool
    """Whether the leader cannot have given this member up yet."""


@record
class LeaderSilent:
    """The lease has ended because the leader elsewhere sent nothing."""

    silence_s: float
    promise_until_s: float


@record
class QuorumLost:
    """This node leads and its lease has ended, so others may have taken over."""


@record
class LeaderEnded:
    """A refused immediate redial of the same address proves that the leader's process has ended."""

    led_rounds: frozenset[int]


@record
class OtherLeaderFound:
    """Another leader, which knows a later round, has announced itself to the leader on this node."""

    host: str
    port: int


@record
class WaitDue:
    """This node has waited for a while."""

    line: str | None
    """What to print about it."""


@record
class TimerFired:
    """The time of `SetTimer` has come."""

    kind: TimerKind


Event = (
    Started
    | NodeSent
    | LocalChecked
    | EndpointTried
    | Excluded
    | Answered
    | SearchTurned
    | LeaderSent
    | LeaderMalformed
    | LinkClosed
    | LeaderSilent
    | QuorumLost
    | LeaderEnded
    | OtherLeaderFound
    | WaitDue
    | TimerFired
)


# -- actions -----------------------------------------------------------------------------------------------------------


@record
class Post:
    """Post the event to the supervisor."""

    event: RendezvousEvent


@record
class SendUp:
    """Send the message to the leader."""

    message: MemberMessage


@record
class SendStopped:
    """Add what this node offers for the next round, and send it to the leader."""

    stopped: Stopped


@record
class AcknowledgeEnd:
    """Acknowledge the job's end, with the peak memory of this node's largest worker."""


@record
class SendJoin:
    """Ask to take part, while no worker of this node is alive."""


@record
class Search:
    """Ask these addresses, in order of preference, until `StopSearch` or `TakeLink`."""

    targets: tuple[Target, ...]


@record
class AskAgain:
    """Ask all addresses again now, because this node's state has changed."""


@record
class AddTarget:
    """Ask this address as well."""

    target: Target


@record
class StopSearch:
    """Stop searching, if a search is running."""


@record
class TakeLink:
    """Use the link of the last `Answered` as the one to the leader. The search is over."""


@record
class DropLink:
    """Close the link to the leader, if there is one. Nothing renews the lease any more."""


@record
class StopRenewal:
    """Stop renewing the lease."""


@record
class Lead:
    """Lead, or become a candidate. The link to that leader is this node's."""

    takeover: bool


@record
class StopLeading:
    """Send the members to another leader, if this node leads."""

    host: str
    port: int


@record
class FollowLeader:
    """The leader at the other end of the link has accepted this node; renew the lease from its messages."""


@record
class BeginRound:
    """Begin the lease, because workers are about to start.

    Keep or release the port, and use the endpoint as the round needs it.
    """

    hosts_rank_0: bool
    is_alone: bool


@record
class EndRound:
    """Release the lease, because no worker is left.

    Offer a port for the next round, and listen at the endpoint again.
    """


@record
class Probe:
    """Connect to where the leader's process listened. `LeaderEnded` follows if it is refused."""

    host: str
    port: int
    led_rounds: frozenset[int]


@record
class CheckLocal:
    """Check whether the endpoint is an address of this machine. `LocalChecked` follows."""

    is_check: bool = False
    """Whether this node already leads, only because of its --node-rank."""


@record
class OpenEndpoint:
    """Listen at the job's endpoint. `EndpointTried` follows."""


@record
class SetTimer:
    """Feed `TimerFired` after this time; None cancels the timer."""

    kind: TimerKind
    delay_s: float | None


@record
class Wait:
    """Feed `WaitDue` now and then from now on, unless that is done already; or stop doing so."""

    is_on: bool


Action = (
    Post
    | SendUp
    | SendStopped
    | AcknowledgeEnd
    | SendJoin
    | Search
    | AskAgain
    | AddTarget
    | StopSearch
    | TakeLink
    | DropLink
    | StopRenewal
    | Lead
    | StopLeading
    | FollowLeader
    | BeginRound
    | EndRound
    | Probe
    | CheckLocal
    | OpenEndpoint
    | SetTimer
    | Wait
)
