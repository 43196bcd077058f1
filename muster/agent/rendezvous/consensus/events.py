"""Events of the leader: what it feeds to `decisions.decide`.

Those that a member reports are also the messages that it sends, with the limits of `_shared.fields`.
"""

from muster._shared.contract import AskKind
from muster._shared.fields import Count, Line, Name, Port, RoundNumber, Seconds, Step
from muster._shared.records import record
from muster._shared.reports import Failures, Stacks
from muster.agent.rendezvous.consensus.actions import LateRanks
from muster.agent.rendezvous.consensus.members import MemberRecord
from muster.agent.rendezvous.interface import DrainReport
from muster.agent.round import CheckpointPath


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

    id: Name
    reason: Line
    ends_job: bool = False
    """Its user has ended the whole job there."""
    is_interrupt: bool = False
    """By a Ctrl-C."""


@record
class Prepared:
    """A member has imported what its workers need."""

    id: Name


@record
class RoundAcknowledged:
    """A member has received a round."""

    id: Name
    round_number: RoundNumber


@record
class Failed:
    """Workers of a member failed."""

    id: Name
    round_number: RoundNumber
    failures: Failures
    suspicion_s: Seconds = 0.0
    """How long until the leader declares every node lost that it suspects now; 0: it suspects none. A suspected node's
    guard kills its workers before that, which makes the workers of other nodes fail."""


@record
class Idle:
    """All workers of a member are idle. Without failures: one of them is active again."""

    id: Name
    round_number: RoundNumber
    failures: Failures
    is_urgent: bool = False
    """torch is about to end a worker that waits: whether others are idle does not matter any more."""


@record
class Succeeded:
    """All workers of a member succeeded."""

    id: Name
    round_number: RoundNumber
    drained_rank: Count | None = None
    """The global rank that ended last, if any of them has stopped at the step of a drain."""


@record
class DrainAsked:
    """A member asks to end the round at one step of all ranks."""

    id: Name
    round_number: RoundNumber
    reason: Line
    limit_s: Seconds
    """How long it may take until the workers have ended."""


@record
class DrainReported:
    """The workers of a member wait at a ceiling, or no step can be agreed on with them."""

    id: Name
    round_number: RoundNumber
    drain: Count
    report: DrainReport


@record
class DrainFollowed:
    """The workers of a member have done what the drain wants of them, or its limit is over."""

    id: Name
    round_number: RoundNumber
    drain: Count
    late: LateRanks = ()
    """Those that have not."""


@record
class Asked:
    """A person asks for something through this member."""

    id: Name
    round_number: RoundNumber
    request: Count
    """The member's number of it."""
    kind: AskKind
    limit_s: Seconds


@record
class StacksTaken:
    """The stacks of a member's workers."""

    id: Name
    round_number: RoundNumber
    number: Count
    stacks: Stacks
    missing: Count = 0
    """So many workers gave none."""


@record
class StoodStill:
    """All workers of a member have stood still for so long; 0: they go on."""

    id: Name
    round_number: RoundNumber
    for_s: Seconds


@record
class Saved:
    """All workers of a member have saved a checkpoint of the step."""

    id: Name
    round_number: RoundNumber
    step: Step
    path: CheckpointPath = ""
    """Where it is; "": none of them has named a path."""


@record
class Stopped:
    """No worker of the round is left on a member; it is ready for the next one."""

    id: Name
    round_number: RoundNumber
    port: Port
    can_host_store: bool = False
    failures: Failures = ()
    stacks: Stacks = ()


@record
class LeaseChecked:
    """The answer to `actions.CheckLease`."""

    is_held: bool
    """The leader's own workers have a lease in the proposed round."""


@record
class TimerFired:
    """The time of `actions.SetTimer` has come."""

    round_number: int
    """Of the action."""


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
    | DrainAsked
    | DrainReported
    | DrainFollowed
    | Asked
    | StacksTaken
    | StoodStill
    | Saved
    | Stopped
    | LeaseChecked
    | TimerFired
)
