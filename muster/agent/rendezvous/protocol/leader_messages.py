"""Messages from the leader to its members. Those that `consensus` sends are in `consensus.actions`."""

from typing import Annotated

from muster._shared.codec import MessageUnion
from muster._shared.fields import (
    Count,
    GroupRank,
    Host,
    Limit,
    Line,
    Name,
    Paragraph,
    Port,
    RoundNumber,
    Seconds,
    Shared,
    Size,
)
from muster._shared.records import record
from muster.agent.rendezvous.consensus.actions import SentMessage
from muster.agent.rendezvous.consensus.quorum import EndedRanks, RecoveredRound
from muster.agent.round import Checkpoint


@record
class Successor:
    """The address of a member of the round that may take over when the leader is lost."""

    group_rank: GroupRank
    index: Count | None
    host: Host
    port: Port


@record
class Welcome:
    """The leader has accepted the member."""

    leader_id: Name
    listen_port: Port
    """A port that only the leader's process listens on; 0: none."""
    release: Name = ""
    """See `Join`."""


@record
class HeartbeatReply:
    """The leader has received a heartbeat."""

    number: Count
    at_s: Seconds
    """The leader's CLOCK_BOOTTIME, to be sent back."""
    ended: tuple[RoundNumber, EndedRanks] | None = None
    """A round, and the group ranks of it whose process end was seen."""


@record
class RoundFacts:
    """What every member must know of a round. Its size does not grow with the number of members."""

    round_number: RoundNumber
    attempt: Count
    startup_signature: Paragraph | None
    successors: Annotated[tuple[Successor, ...], Limit(most=64)]
    """The first members that may take over."""
    restarts_left: Count
    group_world_size: Size
    world_size: Size
    master_addr: Host
    master_port: Port
    use_agent_store: bool = False
    """The agent with group rank 0 hosts the store: all workers are its clients."""
    checkpoint: Checkpoint | None = None
    """The last one that all ranks of the job have saved."""


@record
class RoundStart:
    """A round in which the member has an assignment."""

    facts: Shared[RoundFacts]
    quorum_rounds: tuple[RecoveredRound, ...]
    """As the member is to know them: with its own rank."""
    group_rank: GroupRank
    rank_offset: Count
    role_rank_offset: Count
    role_world_size: Size

    def find_contradiction(self) -> str | None:
        """A rank that is not in the round."""
        facts = self.facts.value
        if self.group_rank >= facts.group_world_size or self.rank_offset >= facts.world_size:
            return f"group rank {self.group_rank} of {facts.group_world_size}"
        return None


@record
class RoundSummary:
    """A round in which the member has no assignment: it must find the next leader like the others."""

    facts: Shared[RoundFacts]
    quorum_rounds: tuple[RecoveredRound, ...]
    is_spare: bool = False
    """The job is full: the member waits as a spare."""


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
    """It is a mistake of the caller."""


@record
class Redirect:
    """Another leader knows a later round."""

    host: Host
    port: Port


@record
class Goodbye:
    """The leader closes this connection; its process has not ended."""

    reason: Line


JobMessage = SentMessage | RoundStart | RoundSummary | Exit | Rejected
"""About rounds and the job's end."""

LeaderMessage = Welcome | HeartbeatReply | Redirect | Goodbye | JobMessage

LEADER_MESSAGES: MessageUnion[LeaderMessage] = MessageUnion(LeaderMessage)
