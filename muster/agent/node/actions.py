"""Actions of one node: the output of `decisions.decide`. One union for each part of the agent that carries them out."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeAlias

from muster._shared.contract import StatusPageLayout
from muster._shared.records import record
from muster.agent.node.events import RoundTimer, WorkerStack
from muster.agent.rendezvous.interface import (
    CopySnapshot,
    JobEnded,
    KeepSnapshot,
    PlainNodeMessage,
    RendezvousFailed,
    SnapshotConfirmed,
    SnapshotFound,
)
from muster.agent.round import Checkpoint, Round

if TYPE_CHECKING:
    from muster._shared.reports import Answer


@record
class LocalFailure:
    """A worker of this node that failed; `reason` is set when there was no process to exit, or it still runs."""

    local_rank: int
    reason: str = ""
    errno: int | None = None
    """Of the call that could not start it."""
    check: str = ""
    """The preflight check that has found `reason`; "": none has."""


# -- workers ---------------------------------------------------------------------------------------------------------


@record
class ParkWorkers:
    """Prepare a start that will come soon, as far as it needs no ranks."""


@record
class StartWorkers:
    """Start all workers of the round."""

    round: Round


@record
class CancelStarts:
    """Cancel the starts of workers that do not exist yet; no event about them follows."""


@record
class SignalWorkers:
    """Send the signal to the workers themselves, not to their children."""

    signum: int


@record
class InterruptWorker:
    """Send one worker SIGINT: its debugger has the terminal."""

    local_rank: int


@record
class KillWorkers:
    """SIGKILL every process of the workers until none is left, drain their output, post `WorkersGone`.

    Post `WorkersNotEnded` instead when some have not ended within the limit.
    """

    round_number: int


@record
class ReadSlots:
    """Read what the workers of the round have published, and post `SlotsRead`."""

    round_number: int
    drain: int
    """Number of the drain that it is for."""
    kind: int = StatusPageLayout.STOP
    """Of that drain."""


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
    """Workers that wait go on."""


@record
class WriteDeadline:
    """Write when the workers will be ended, whether they have saved or not."""

    delay_s: float | None
    """None: no such limit any more."""


@record
class KeepSnapshots:
    """Do with this node's snapshots what the leader says."""

    told: KeepSnapshot | CopySnapshot | SnapshotFound | SnapshotConfirmed


WorkerAction: TypeAlias = (
    ParkWorkers
    | StartWorkers
    | CancelStarts
    | SignalWorkers
    | InterruptWorker
    | KillWorkers
    | ReadSlots
    | WriteCommand
    | WithdrawCommand
    | WriteDeadline
    | KeepSnapshots
)

# -- diagnosis -------------------------------------------------------------------------------------------------------


@record
class SettleFailure:
    """A worker failed: post `FailureSettled` once its last output has been read."""

    round: Round
    failure: LocalFailure


@record
class CollectStacks:
    """Collect the stacks of the live workers, then post `StacksCollected`."""

    round: Round
    is_hang: bool = False
    """Read their flight recorders first."""


@record
class PrintStacks:
    """Print the stacks of the live workers on the console, equal ones once."""

    round: Round


@record
class PrintPage:
    """Print these stacks: workers that have stood still are being stopped."""

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
class ReachMaster:
    """Find out whether the round's MASTER_ADDR can be reached; if it cannot, post `StoreLost`."""

    round: Round


@record
class ReportFailed:
    """Send `Failed` of this worker."""

    round: Round
    failure: LocalFailure


@record
class ReportIdle:
    """Send `Idle` of these workers; empty: they are active again. The leader decides whether the whole job hangs."""

    round: Round
    local_ranks: tuple[int, ...] = ()
    reason: str = ""
    is_urgent: bool = False


@record
class ReportStopped:
    """Send `Stopped`: no worker of the round is left."""

    round: Round
    late: tuple[LocalFailure, ...] = ()
    """Failures that no `ReportFailed` has reported."""
    stacks: Mapping[int, WorkerStack]
    """By local rank, as far as they were collected."""


RendezvousAction: TypeAlias = JoinJob | Send | ReachMaster | ReportFailed | ReportIdle | ReportStopped

# -- the agent itself ------------------------------------------------------------------------------------------------


@record
class StartTimer:
    """Post `TimerExpired` after the delay. No timer is cancelled: one of an older round changes nothing."""

    timer: RoundTimer
    delay_s: float


@record
class BeginRound:
    """The node takes part in the round from now on: record it, and open its log folders."""

    round: Round


@record
class RecordFencing:
    """Record that the guard has killed the workers."""


@record
class KeepCheckpoint:
    """Write it to the run's folder, for the job's next incarnation."""

    checkpoint: Checkpoint


@record
class PrintLine:
    """Print one line of the agent on the console."""

    text: str


@record
class AnswerPerson:
    """Answer these requests of people."""

    requests: tuple[int, ...]
    answer: "Answer"


@record
class AskPerson:
    """Ask the person at the terminal what Ctrl-C is to do; `PersonChose` follows. The console waits."""


@record
class EndQuestion:
    """The question at the terminal is over: release the console."""


@record
class RecordJobFailure:
    """The job has failed, as every agent of it learns now: some of them exit in an order."""


@record
class Finish:
    """The agent is done: report `ended` or `rendezvous_failed`, if set, then exit with `code`."""

    code: int
    ended: JobEnded | None = None
    rendezvous_failed: RendezvousFailed | None = None


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
