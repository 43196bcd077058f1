"""Events of the leader, which it feeds to `decisions.decide`. They include messages of members."""

from typing import Generic, TypeVar

from muster._shared.fields import RoundNumber
from muster._shared.records import record
from muster.agent.rendezvous.consensus.members import MemberRecord
from muster.agent.rendezvous.interface import PlainNodeMessage
from muster.agent.rendezvous.report_messages import EvidenceMessage


@record
class RoundAcknowledged:
    """The member has received a round."""

    round_number: RoundNumber


MemberReport = RoundAcknowledged | PlainNodeMessage | EvidenceMessage
M_co = TypeVar("M_co", covariant=True)


@record
class Reported(Generic[M_co]):
    """A message of a member."""

    id: str
    message: M_co
    suspicion_s: float = 0.0
    """With the first `Failed`, how long until the leader declares every node lost that it suspects now; 0 if it
    suspects none.

    A suspected node's guard kills its workers before that, which makes the workers of other nodes fail.
    """


@record
class Joined:
    """A member asks to take part; its workers of earlier rounds have ended."""

    member: MemberRecord


@record
class MemberLost:
    """A member's connection closed, or the member was silent for too long."""

    id: str
    reason: str


@record
class ProcessEnded:
    """A lost member's process was seen to end. This follows its `MemberLost`, which cannot wait for the proof."""

    id: str


@record
class LeaseChecked:
    """The answer to `actions.CheckLease`."""

    is_held: bool
    """Whether the leader's own workers have a lease in the proposed round."""


@record
class TimerFired:
    """The time of `actions.SetTimer` has come."""

    round_number: int
    """The action's round."""


LeaderEvent = Joined | MemberLost | ProcessEnded | LeaseChecked | TimerFired
"""All but messages."""
Event = LeaderEvent | Reported[MemberReport]
