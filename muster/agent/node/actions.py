"""Actions of one node: the output of `decisions.decide`. One union for each part of the agent that carries them out."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeAlias

from muster._shared.layouts import StatusPageLayout
from muster._shared.records import record
from muster.agent.node.events import RoundTimer, WorkerStack
from muster.agent.rendezvous.interface import (
    JobEnded,
    PartOrder,
    PartRemembered,
    PlainNodeMessage,
    RendezvousFailed,
)
from muster.agent.round import Checkpoint, Round

if TYPE_CHECKING:
    from muster._shared.reports import Answer, FailedCheck


@record
class LocalFailure:
    """A worker of this node that failed; `reason` is set if no process exited, or if it still runs."""

    local_rank: int
    reason: str = ""
    errno: int | None = None
    """The error of the call that could not start the worker."""
    check: "FailedCheck | None" = None
    """What has found `reason`."""


# -- workers ---------------------------------------------------------------------------------------------------------


@record
class ParkWorkers:
    """Prepare a start that will come soon, as far as this needs no ranks."""

    count: int
    """How many processes it will need, if all workers leave the round that can."""


@record
class StartWorkers:
    """Start all workers of the round."""

    round: Round


@record
class CancelStarts:
    """Cancel the starts of workers that do not exist yet; no event about them follows."""


@record
class LeaveRound:
    """Ask these workers to leave the round, and post `WorkerLeft` for each that has."""

    local_ranks: frozenset[int]


@record
class SignalWorkers:
    """Send the signal to the workers themselves, not to their children."""

    signum: int
    local_ranks: frozenset[int] | None = None
    """None: to all."""


@record
class InterruptWorker:
    """Send one worker SIGINT: it has the terminal."""

    local_rank: int


@record
class KillWorkers:
    """Send SIGKILL to every process of the workers until none is left, drain their output, and post `WorkersGone`.

    Post `WorkersNotEnded` instead if some have not ended within the limit.
    """

    round_number: int
    keeps: bool = False
    """Whether workers that have left the round stay for the next one."""


@record
class ReadSlots:
    """Read what the workers of the round have published, and post `SlotsRead`."""

    round_number: int
    drain: int
    """Number of the drain that this is for."""
    kind: int = StatusPageLayout.STOP
    """The drain's kind."""


@record
class WriteCommand:
    """Write a drain's command for all workers of the node."""

    drain: int
    step: int
    """The ceiling, or the committed step."""
    is_committed: bool
    kind: int = StatusPageLayout.STOP


@record
class WithdrawCommand:
    """Withdraw the command, so that workers that wait continue."""


@record
class WriteDeadline:
    """Write when the workers will be ended, whether or not they have saved."""

    delay_s: float | None
    """Seconds from now; None means that there is no such limit any more."""


@record
class TellPart:
    """Pass on to a feature's part what the leader says, or what the job remembers."""

    message: PartOrder | PartRemembered


WorkerAction: TypeAlias = (
    ParkWorkers
    | StartWorkers
    | CancelStarts
    | LeaveRound
    | SignalWorkers
    | InterruptWorker
    | KillWorkers
    | ReadSlots
    | WriteCommand
    | WithdrawCommand
    | WriteDeadline
    | TellPart
)

# -- diagnosis -------------------------------------------------------------------------------------------------------


@record
class SettleFailure:
    """After a worker's failure, post `FailureSettled` once its last output has been read."""

    round: Round
    failure: LocalFailure


@record
class CollectStacks:
    """Collect the stacks of the live workers, then post `StacksCollected`."""

    round: Round
    is_hang: bool = False
    """Read the workers' flight recorders first."""


@record
class PrintStacks:
    """Print the stacks of the live workers on the console, and equal stacks only once."""

    round: Round


@record
class PrintPage:
    """Print these stacks of workers that stood still and are being stopped."""

    round: Round
    stacks: Mapping[int, WorkerStack]


@record
class SendStacks:
    """Collect the stacks of the live workers, and report them to the leader."""

    round: Round
    number: int


DiagnosisAction: TypeAlias = SettleFailure | CollectStacks | PrintStacks | PrintPage | SendStacks

# -- rendezvous ------------------------------------------------------------------------------------------------------


@record
class JoinJob:
    """Ask to take part in the job."""

    is_prepared: bool


@record
class Send:
    """Send this to the leader."""

    message: PlainNodeMessage


@record
class ReportFailed:
    """Send `Failed` for this worker."""

    round: Round
    failure: LocalFailure


@record
class ReportIdle:
    """Send `Idle` for these workers; empty if they are active again. The leader decides whether the whole job hangs."""

    round: Round
    local_ranks: tuple[int, ...] = ()
    reason: str = ""
    is_urgent: bool = False


@record
class ReportStopped:
    """Send `Stopped`, because no worker of the round is left."""

    round: Round
    late: tuple[LocalFailure, ...] = ()
    """Failures that no `ReportFailed` has reported."""
    stacks: Mapping[int, WorkerStack]
    """Stacks by local rank, as far as they were collected."""


RendezvousAction: TypeAlias = JoinJob | Send | ReportFailed | ReportIdle | ReportStopped

# -- the agent itself ------------------------------------------------------------------------------------------------


@record
class StartTimer:
    """Post `TimerExpired` after the delay. No timer is cancelled, because one of an older round has no effect."""

    timer: RoundTimer
    delay_s: float


@record
class BeginRound:
    """The node takes part in the round from now on; record this and open its log folders."""

    round: Round


@record
class RecordFencing:
    """Record that the guard has killed the workers."""


@record
class KeepCheckpoint:
    """Write the checkpoint to the run's folder, for the job's next incarnation."""

    checkpoint: Checkpoint


@record
class PrintLine:
    """Print one line of the agent on the console."""

    text: str


@record
class AnswerPerson:
    """Send the answer to these requests of people."""

    requests: tuple[int, ...]
    answer: "Answer"


@record
class AskPerson:
    """Ask the person at the terminal what Ctrl-C is to do; `PersonChose` follows. Until then the console waits."""


@record
class EndQuestion:
    """Release the console, because the question at the terminal is over."""


@record
class RecordJobFailure:
    """Record that the job has failed. Every agent of the job learns it now, and some of them exit in a given order."""


@record
class Finish:
    """Report `ended` or `rendezvous_failed` if set, then exit with `code`."""

    code: int
    ended: JobEnded | None = None
    rendezvous_failed: RendezvousFailed | None = None
    at_once: bool = False
    """Whether to exit even if this node leads and other nodes still stop their workers."""


AgentAction: TypeAlias = (
    StartTimer
    | BeginRound
    | RecordFencing
    | KeepCheckpoint
    | PrintLine
    | AnswerPerson
    | AskPerson
    | EndQuestion
    | RecordJobFailure
    | Finish
)

Action: TypeAlias = WorkerAction | DiagnosisAction | RendezvousAction | AgentAction
