"""Events of one node: the input of `decisions.decide`.

Events of rendezvous are in `rendezvous.interface`, including those that the node sends on unchanged: Saved, StoodStill
and PartReport.

An event about workers or a timer carries the number of its round. An event of an older round changes nothing.
"""

from collections.abc import Mapping
from enum import Enum
from typing import TYPE_CHECKING, TypeAlias

from muster._shared.contract import AskKind
from muster._shared.records import record
from muster.agent.rendezvous.interface import (
    DrainCommitted,
    DrainWithdrawn,
    PartReport,
    RendezvousEvent,
    Saved,
    StoodStill,
)

if TYPE_CHECKING:
    from muster._shared.reports import FailedCheck, RankProgress, RankView
    from muster.agent.rendezvous.drain_ceiling import RankSlot


class TimerPurpose(Enum):
    """What a timer is for."""

    START = "start"
    """Start the round's workers: the back-off, or the wait for global rank 0, is over."""
    STACKS = "stacks"
    """Do not wait for stacks any longer."""
    LEAVE = "leave"
    """The time in which workers leave the round is over."""
    GRACE = "grace"
    """The grace period of a stop is over."""
    TOLD = "told"
    """The grace period of ranks that have been told a drain's step is over."""
    SLOW = "slow"
    """Print which workers have not ended since the signal of a stop."""
    LOOK = "look"
    """Look again at what the workers have published: a drain's ceiling was written."""
    DRAIN = "drain"
    """The time limit of a drain is over."""
    LINES = "lines"
    """Print the lines that are held back: the job is not being stopped."""


@record
class RoundTimer:
    """A timer of the round; each round has at most one for each purpose and drain."""

    purpose: TimerPurpose
    round_number: int
    number: int = 0
    """Number of the drain that the timer is for; 0 if it is for none, or for the preemption of this node."""


@record
class AgentStarted:
    """The agent is ready to take part in the job and knows whether it could host a store."""


@record
class WorkersPrepared:
    """From now on workers would start at once."""


@record
class WorkerStarted:
    """A worker of the round exists."""

    round_number: int
    local_rank: int


@record
class WorkerExited:
    """A worker of the round has ended; `code` is that of `os.waitstatus_to_exitcode` (negative for a signal)."""

    round_number: int
    local_rank: int
    code: int
    fencings: int = 0
    """How often the guard has fenced this node since the round's workers were started."""
    asked: int | None = None
    """During a drain, the step that the worker last asked `should_stop` about."""


@record
class WorkersCanLeave:
    """These workers can leave the round and take part in the next one."""

    round_number: int
    local_ranks: frozenset[int]


@record
class WorkerLeft:
    """A worker has left the round. It waits for the next one."""

    round_number: int
    local_rank: int


@record
class SpawnFailed:
    """A worker of the round could not be started."""

    round_number: int
    local_rank: int
    reason: str
    errno: int | None = None
    """The error of the call that failed; None if no system call has."""
    check: "FailedCheck | None" = None
    """What has found why."""


@record
class StoreLost:
    """The agent should host the round's store but has none (any more), or by a feature's check no worker can work.

    `reason` is a clause about rank 0.
    """

    round_number: int
    reason: str
    check: "FailedCheck | None" = None
    """What has found this."""


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
    """Or torch is about to end a worker that waits in a collective."""


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
    """The worker's Python stacks; "" if it gave none."""
    view: "RankView | None" = None
    """What the worker's flight recorder says; None if it was not read."""
    progress: "RankProgress | None" = None
    """The worker's progress; None if it was not looked at twice."""


@record
class StacksCollected:
    """`CollectStacks` of the round is done as far as possible; the stacks are by local rank."""

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
    """Whether it is the death signal: without a guard nothing sweeps after the agent, so there is no grace period."""
    is_asked: bool = False
    """Whether a worker of this node has asked `should_stop`, so that a drain can stop all ranks at one step."""
    at_s: float = 0.0
    """By the agent's clock."""
    foreground: int | None = None
    """The local rank that Ctrl-C is for, because it has the terminal; None: it is for the job."""
    quit_reason: str = ""
    """Why a feature ends the whole job, in a clause, which is no signal; "": it is one."""
    still_s: float = 0.0
    """How long all workers of this node have stood still."""
    is_at_terminal: bool = False
    """Whether the agent's standard input is a terminal, where a person can be asked."""


class Choice(Enum):
    """What the person at the terminal chooses after Ctrl-C, with `--interrupt-action ask`."""

    SAVE = "save and stop"
    STOP = "stop"
    CONTINUE = "continue"


@record
class PersonChose:
    """The choice after `AskPerson`; None if the typed text is no choice."""

    choice: Choice | None


@record
class SlotsRead:
    """After `ReadSlots` of the round, what the workers have published, by local rank; None if there is no page."""

    round_number: int
    drain: int
    slots: "tuple[RankSlot, ...] | None"


@record
class Requested:
    """A request of a person through this node; `request` is its number."""

    request: int
    kind: AskKind
    limit_s: float


WorkersEvent: TypeAlias = (
    WorkerStarted
    | WorkerExited
    | WorkersCanLeave
    | WorkerLeft
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
    | PartReport
    | SlotsRead
    | DrainCommitted
    | DrainWithdrawn
)
"""Events about the workers of a round; the table of `decisions` says which phase accepts which."""

Event: TypeAlias = (
    RendezvousEvent
    | WorkersEvent
    | AgentStarted
    | WorkersPrepared
    | StacksRequested
    | TimerExpired
    | SignalReceived
    | PersonChose
    | Requested
)
