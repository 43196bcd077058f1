"""Events of one node: the input of `decisions.decide`.

Those of rendezvous are in `rendezvous.interface`, also those that the node sends on as they are: Saved, StoodStill,
SnapshotKept, SnapshotCopied, SnapshotSought.

An event about workers or a timer carries the number of the round that it belongs to: an older round's changes nothing.
"""

from collections.abc import Mapping
from enum import Enum
from typing import TYPE_CHECKING, TypeAlias

from muster._shared.contract import AskKind
from muster._shared.records import record
from muster.agent.rendezvous.interface import (
    DrainCommitted,
    DrainWithdrawn,
    NodeFacts,
    RendezvousEvent,
    Saved,
    SnapshotCopied,
    SnapshotKept,
    SnapshotSought,
    StoodStill,
)

if TYPE_CHECKING:
    from muster._shared.preflight import Finding
    from muster._shared.reports import RankProgress, RankView
    from muster.agent.rendezvous.drain_ceiling import RankSlot


class TimerPurpose(Enum):
    """What a timer is for."""

    START = "start"
    """Start the round's workers: the back-off is over, or the wait for global rank 0."""
    STACKS = "stacks"
    """Do not wait for stacks any longer."""
    GRACE = "grace"
    """The grace period of a stop is over, or that of ranks that have been told a drain's step."""
    SLOW = "slow"
    """Say which workers have not ended since the signal of a stop."""
    LOOK = "look"
    """Look again at what the workers have published: a drain's ceiling was written."""
    DRAIN = "drain"
    """The time of a drain is over."""
    LINES = "lines"
    """Print the lines that are held back: the job is not being stopped."""
    CHECKS = "checks"
    """Start the round's workers, although the checks of this machine are not over."""


@record
class RoundTimer:
    """A timer of the round; each round has at most one for each purpose and drain."""

    purpose: TimerPurpose
    round_number: int
    number: int = 0
    """Of the drain that it is for; 0: it is for none, or for the preemption of this node."""


@record
class AgentStarted:
    """The agent is ready to take part in the job: it knows whether it could host a store."""


@record
class WorkersPrepared:
    """From now on workers would start at once."""


@record
class LocalChecked:
    """What the checks of this machine have found, before or after the workers were started."""

    findings: "tuple[Finding, ...]" = ()
    facts: NodeFacts | None = None
    """What the other nodes compare; None: nothing new."""
    site_checks: tuple[str, ...] = ()
    """The executables that the site has added, which run from now on: their findings follow."""
    is_last: bool = False
    """No findings follow."""


@record
class WorkerStarted:
    """A worker of the round exists."""

    round_number: int
    local_rank: int


@record
class WorkerExited:
    """A worker of the round has ended; `code` as of `os.waitstatus_to_exitcode` (negative: signal)."""

    round_number: int
    local_rank: int
    code: int
    fencings: int = 0
    """How often the guard has fenced this node since the round's workers were started."""
    asked: int | None = None
    """During a drain: the step that it last asked `should_stop` about."""


@record
class SpawnFailed:
    """A worker of the round could not be started."""

    round_number: int
    local_rank: int
    reason: str
    errno: int | None = None
    """Of the call that failed; None where no system call has."""


@record
class StoreLost:
    """The agent hosts the store of the round, and it has none (any more); `reason` is a clause about rank 0.

    Or it has learned that its workers cannot reach MASTER_ADDR.
    """

    round_number: int
    reason: str
    check: str = ""
    """The check that says so; "": none."""


@record
class FailureSettled:
    """After `SettleFailure`: the worker's last output has been read, so its failure can be collected."""

    round_number: int
    local_rank: int


@record
class WorkersIdle:
    """No worker of the round has been active for the hang timeout."""

    round_number: int
    reason: str
    is_urgent: bool = False
    """Or torch is about to end one that waits in a collective."""


@record
class WorkersActive:
    """After `WorkersIdle`: a worker of the round is active again."""

    round_number: int


@record
class StacksRequested:
    """Print the stacks of all workers (SIGUSR2)."""


@record
class WorkerStack:
    """What a live worker of this node was doing."""

    text: str = ""
    """Its Python stacks; "": it gave none."""
    view: "RankView | None" = None
    """What its flight recorder says; None: it was not read."""
    progress: "RankProgress | None" = None
    """How far it is; None: it was not looked at twice."""


@record
class StacksCollected:
    """`CollectStacks` of the round is done as far as possible; by local rank."""

    round_number: int
    stacks: Mapping[int, WorkerStack]


@record
class TimerExpired:
    """The delay of a `StartTimer` has passed."""

    timer: RoundTimer


@record
class WorkersGone:
    """After `KillWorkers` of the round: no process of the workers is left, and their output is on disk."""

    round_number: int


@record
class WorkersNotEnded:
    """After `KillWorkers` of the round: these processes have not ended within the limit."""

    round_number: int
    pids: tuple[int, ...]


@record
class SignalReceived:
    """The agent received a signal that ends this node."""

    signum: int
    guard_died: bool = False
    """It is the death signal: no guard would sweep after the agent, so there is no grace period."""
    is_asked: bool = False
    """A worker of this node has asked `should_stop`: a drain can stop all ranks at one step."""
    at_s: float = 0.0
    """By the agent's clock."""
    debugged: int | None = None
    """The local rank whose debugger has the terminal."""
    is_quit: bool = False
    """It is not a signal: a debugger was quit, which ends the whole job."""
    still_s: float = 0.0
    """For how long all workers of this node have stood still."""
    is_at_terminal: bool = False
    """The agent's standard input is a terminal: a person can be asked."""


class Choice(Enum):
    """What the person at the terminal chooses after Ctrl-C, with `--interrupt-action ask`."""

    SAVE = "save and stop"
    STOP = "stop"
    CONTINUE = "continue"


@record
class PersonChose:
    """After `AskPerson`: the choice; None: what was typed is none."""

    choice: Choice | None


@record
class SlotsRead:
    """After `ReadSlots` of the round: what the workers have published, by local rank; None: there is no page."""

    round_number: int
    drain: int
    slots: "tuple[RankSlot, ...] | None"


@record
class Requested:
    """A person asks for something through this node; `request` is the number of the question."""

    request: int
    kind: AskKind
    limit_s: float


WorkersEvent: TypeAlias = (
    WorkerStarted
    | WorkerExited
    | SpawnFailed
    | StoreLost
    | FailureSettled
    | WorkersIdle
    | WorkersActive
    | StoodStill
    | StacksCollected
    | WorkersGone
    | WorkersNotEnded
    | Saved
    | SnapshotKept
    | SnapshotCopied
    | SnapshotSought
    | SlotsRead
    | DrainCommitted
    | DrainWithdrawn
)
"""About the workers of a round: `decisions.ACCEPTED` says which phase accepts which."""

Event: TypeAlias = (
    RendezvousEvent
    | WorkersEvent
    | AgentStarted
    | WorkersPrepared
    | LocalChecked
    | StacksRequested
    | TimerExpired
    | SignalReceived
    | PersonChose
    | Requested
)
