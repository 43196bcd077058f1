"""Actions of one node: what `decisions.decide` asks the supervisor to do."""

from typing import TypeAlias

from muster.agent.rendezvous.interface import JobEnded, RendezvousFailed
from muster.agent.round import Round
from muster.agent.runtime.records import record


@record
class StartWorkers:
    """Start all workers of the round."""

    round: Round
    is_held: bool = False
    """Not before `ReleaseStarts`, or a limited time."""


@record
class ReleaseStarts:
    """Global rank 0 of the round has been started elsewhere: start the workers that were held."""


@record
class CancelStarts:
    """Workers asked for that do not exist yet shall not come into being; nothing is heard of them again."""


@record
class CollectStacks:
    """Take the stacks of the live workers of round `number`; then, in any case after a limit, post `StacksTaken`."""

    number: int


@record
class SignalWorkers:
    """Send the signal to the workers themselves, not to their children."""

    signum: int


@record
class StartGracePeriod:
    """Post `GraceOver` after the shutdown timeout."""


@record
class KillWorkers:
    """SIGKILL every process of the workers until none is left, drain their output, post `TreeGone`."""


@record
class ReportStarted:
    """Rendezvous: all workers of the round run."""

    number: int


@record
class ReportFailed:
    """Rendezvous: these workers failed. `reason` is set when there was no exit to speak of."""

    number: int
    local_ranks: tuple[int, ...]
    reason: str = ""


@record
class ReportIdle:
    """Rendezvous: these workers show no life; none: they do again. It decides whether the whole job hangs."""

    number: int
    local_ranks: tuple[int, ...]
    reason: str


@record
class ReportSucceeded:
    """Rendezvous: all workers of the round ended well."""

    number: int


@record
class ReportStopped:
    """Rendezvous: no worker of the round is left."""

    number: int


@record
class LeaveJob:
    """Rendezvous: this node goes."""

    reason: str


@record
class Finish:
    """The agent's work is done; exit with `code` after `ended` has been reported, if there is one."""

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
    | ReportFailed
    | ReportIdle
    | ReportSucceeded
    | ReportStopped
    | LeaveJob
    | Finish
)
