"""Actions of one node: the output of `decisions.decide`, which the supervisor carries out."""

from typing import TypeAlias

from muster.agent.rendezvous.interface import JobEnded, RendezvousFailed
from muster.agent.round import Round
from muster.agent.runtime.records import record


@record
class LocalFailure:
    """A worker of this node that failed; `reason` is set when there was no process to exit, or it still runs."""

    local_rank: int
    reason: str = ""


@record
class SettleFailure:
    """A worker failed: post `FailureSettled` once its last output has been read."""

    number: int
    failure: LocalFailure


@record
class StartWorkers:
    """Start all workers of the round."""

    round: Round
    is_held: bool = False
    """Start them only after `ReleaseStarts`, or after a limited time."""


@record
class ReleaseStarts:
    """Global rank 0 of the round has been started on another node: start the held workers."""


@record
class CancelStarts:
    """Cancel the starts of workers that do not exist yet; no event about them follows."""


@record
class CollectStacks:
    """Collect the stacks of the live workers of round `number`; then, or after a limit, post `StacksCollected`."""

    number: int


@record
class SignalWorkers:
    """Send the signal to the workers themselves, not to their children."""

    signum: int


@record
class StartGracePeriod:
    """Post `GraceExpired` after the shutdown timeout."""


@record
class KillWorkers:
    """SIGKILL every process of the workers until none is left, drain their output, post `WorkersGone`."""


@record
class ReportStarted:
    """Rendezvous: all workers of the round run."""

    number: int


@record
class ReportFailed:
    """Rendezvous: this worker failed."""

    number: int
    failure: LocalFailure


@record
class ReportIdle:
    """Rendezvous: these workers are idle; empty: they are active again. It decides whether the whole job hangs."""

    number: int
    local_ranks: tuple[int, ...]
    reason: str


@record
class ReportSucceeded:
    """Rendezvous: all workers of the round exited with 0."""

    number: int


@record
class ReportStopped:
    """Rendezvous: no worker of the round is left."""

    number: int
    late: tuple[LocalFailure, ...] = ()
    """Failures that no `ReportFailed` has reported."""


@record
class LeaveJob:
    """Rendezvous: this node leaves the job."""

    reason: str


@record
class Finish:
    """The agent is done: report `ended` or `rendezvous_failed`, if set, then exit with `code`."""

    code: int
    ended: JobEnded | None = None
    rendezvous_failed: RendezvousFailed | None = None


Action: TypeAlias = (
    StartWorkers
    | ReleaseStarts
    | CancelStarts
    | CollectStacks
    | SignalWorkers
    | StartGracePeriod
    | KillWorkers
    | ReportStarted
    | SettleFailure
    | ReportFailed
    | ReportIdle
    | ReportSucceeded
    | ReportStopped
    | LeaveJob
    | Finish
)
