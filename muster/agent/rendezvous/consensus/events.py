"""The words of membership: rules, members, the events a leader feeds to `membership.advance` and what comes out."""

from muster.agent.diagnosis.report import Failure, Stack
from muster.agent.rendezvous.consensus.members import MemberRecord
from muster.agent.runtime.records import record

# -- events -------------------------------------------------------------------------------------------------------


@record
class Joined:
    """A member asks to take part; its workers of earlier rounds are gone."""

    peer: MemberRecord


@record
class MemberLost:
    """A member's connection closed, or it fell silent."""

    id: str
    reason: str


@record
class ProcessEnded:
    """A lost member's process was seen to end: comes after its `MemberLost`, which cannot wait for the proof."""

    id: str


@record
class Leaving:
    """A member said that it goes. Its workers may still be stopping: `MemberLost` follows when it is gone."""

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
    round: int


@record
class Failed:
    """Workers of a member failed."""

    id: str
    round: int
    failures: tuple[Failure, ...]
    excuse_s: float = 0.0
    """How long it may take until a node that has been silent for suspiciously long is given up. Its guard kills its
    workers before that, and that is what the others' workers fail of."""


@record
class Idle:
    """No worker of a member shows life; without failures: one does again."""

    id: str
    round: int
    failures: tuple[Failure, ...]


@record
class Succeeded:
    """All workers of a member ended well."""

    id: str
    round: int


@record
class Stopped:
    """No worker of the round is left on a member; it is ready for the next one."""

    id: str
    round: int
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

# -- outputs ------------------------------------------------------------------------------------------------------
