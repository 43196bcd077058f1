"""Events of the leader: what it feeds to `decisions.decide`."""

from muster.agent.diagnosis.report import Failure, Stack
from muster.agent.rendezvous.consensus.members import MemberRecord
from muster.agent.runtime.records import record


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
    """A lost member's process was seen to end: comes after its `MemberLost`, which cannot wait for the proof."""

    id: str


@record
class Leaving:
    """A member announced that it leaves. Its workers may still be stopping: `MemberLost` follows when it is gone."""

    id: str
    reason: str


@record
class Prepared:
    """A member has imported what its workers need."""

    id: str


@record
class RoundAcknowledged:
    """A member has received a round."""

    id: str
    round_number: int


@record
class Failed:
    """Workers of a member failed."""

    id: str
    round_number: int
    failures: tuple[Failure, ...]
    suspicion_s: float = 0.0
    """How long until the leader declares every node lost that it suspects now; 0: it suspects none. A suspected node's
    guard kills its workers before that, which makes the workers of other nodes fail."""


@record
class Idle:
    """All workers of a member are idle. Without failures: one of them is active again."""

    id: str
    round_number: int
    failures: tuple[Failure, ...]


@record
class Succeeded:
    """All workers of a member succeeded."""

    id: str
    round_number: int


@record
class Stopped:
    """No worker of the round is left on a member; it is ready for the next one."""

    id: str
    round_number: int
    port: int
    failures: tuple[Failure, ...] = ()
    stacks: tuple[Stack, ...] = ()


@record
class Tick:
    """Time has passed: `next_due_s` was reached."""


Event = (
    Joined
    | MemberLost
    | ProcessEnded
    | Leaving
    | Prepared
    | RoundAcknowledged
    | Failed
    | Idle
    | Succeeded
    | Stopped
    | Tick
)
