"""Events of one node: the input of `decisions.decide`. Those of rendezvous are in `rendezvous.interface`."""

from muster.agent.runtime.records import record


@record
class WorkerStarted:
    """A worker of round `number` exists."""

    number: int
    local_rank: int


@record
class WorkerExited:
    """A worker of round `number` has ended; `code` as of `os.waitstatus_to_exitcode` (negative: signal)."""

    number: int
    local_rank: int
    code: int


@record
class SpawnFailed:
    """A worker of round `number` could not be started."""

    number: int
    local_rank: int
    reason: str


@record
class WorkersIdle:
    """The workers of round `number` have been idle for the hang timeout; without ranks: one is active again."""

    number: int
    local_ranks: tuple[int, ...] = ()
    reason: str = ""


@record
class StacksCollected:
    """`CollectStacks` of round `number` is done as far as possible, or its limit has passed."""

    number: int


@record
class GraceExpired:
    """The grace period of a stop has passed."""


@record
class WorkersGone:
    """After `KillWorkers`: no process of the workers is left, and their output is on disk."""


@record
class SignalReceived:
    """The agent received a signal that ends this node."""

    signum: int
    guard_died: bool = False
    """It is the death signal: no guard would sweep after the agent, so there is no grace period."""


@record
class Fenced:
    """The guard has killed the workers because the lease ran out."""


@record
class FailureSettled:
    """After `SettleFailure`: the worker's last output has been read, so its failure can be collected."""

    number: int
    local_rank: int
