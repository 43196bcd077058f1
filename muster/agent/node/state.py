"""The words that `decisions` thinks in: events that come, actions that follow, and the node's state in between.

Events of rendezvous stand in its package.
"""

import signal
from enum import Enum
from typing import TypeAlias

from muster.agent.rendezvous.interface import JobEnded, RendezvousLost, Round
from muster.agent.runtime.records import record

# -- events ----------------------------------------------------------------------------------------------------------


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
class Hung:
    """The workers of round `number` have shown no sign of life for the hang timeout; without ranks: one has again."""

    number: int
    local_ranks: tuple[int, ...] = ()
    reason: str = ""


@record
class StacksTaken:
    """`TakeStacks` is done, as far as it could be."""


@record
class GraceOver:
    """The grace period of a stop has passed."""


@record
class TreeGone:
    """After `KillTree`: no process of the workers is left, and their output is on disk."""


@record
class SignalCame:
    """The agent was sent a signal that means: go."""

    signum: int
    guard_died: bool = False
    """It is the death signal: nobody would sweep after us, so nothing gets a grace period."""


@record
class Fenced:
    """The guard has killed the workers because the lease ran out."""


# -- actions ---------------------------------------------------------------------------------------------------------


@record
class StartWorkers:
    """Start all workers of the round."""

    round: Round
    is_held: bool = False
    """Not before `OpenStarts`, or a limited time."""


@record
class OpenStarts:
    """Global rank 0 of the round has been started elsewhere: start the workers that were held."""


@record
class CancelStarts:
    """Workers asked for that do not exist yet shall not come into being; nothing is heard of them again."""


@record
class TakeStacks:
    """Take the stacks of the live workers (at most 2 s), then post `StacksTaken`."""


@record
class SignalWorkers:
    """Send the signal to the workers themselves, not to their children."""

    signum: int


@record
class ArmGrace:
    """Post `GraceOver` after the shutdown timeout."""


@record
class KillTree:
    """SIGKILL every process of the workers until none is left, drain their output, post `TreeGone`."""


@record
class TellStarted:
    """Rendezvous: all workers of the round run."""

    number: int


@record
class TellFailed:
    """Rendezvous: these workers failed. `reason` is set when there was no exit to speak of."""

    number: int
    local_ranks: tuple[int, ...]
    reason: str = ""


@record
class TellIdle:
    """Rendezvous: these workers show no life; none: they do again. It decides whether the whole job hangs."""

    number: int
    local_ranks: tuple[int, ...]
    reason: str


@record
class TellSucceeded:
    """Rendezvous: all workers of the round ended well."""

    number: int


@record
class TellStopped:
    """Rendezvous: no worker of the round is left."""

    number: int


@record
class TellLeave:
    """Rendezvous: this node goes."""

    reason: str


@record
class Finish:
    """The agent's work is done; exit with `code` after `ended` has been reported, if there is one."""

    code: int
    ended: JobEnded | None = None
    lost: RendezvousLost | None = None


Action: TypeAlias = (
    StartWorkers
    | OpenStarts
    | CancelStarts
    | TakeStacks
    | SignalWorkers
    | ArmGrace
    | KillTree
    | TellStarted
    | TellFailed
    | TellIdle
    | TellSucceeded
    | TellStopped
    | TellLeave
    | Finish
)


# -- state -----------------------------------------------------------------------------------------------------------


class Phase(Enum):
    """Where the node stands."""

    JOINING = "joining"
    """No workers; waiting for a round."""
    RUNNING = "running"
    """Workers of the round are being started or run."""
    SUCCEEDED = "succeeded"
    """All workers of the round ended well; waiting for the others."""
    STOPPING = "stopping"
    """The round's workers are being stopped."""
    ENDED = "ended"
    """`Finish` has been given out; nothing matters any more."""


@record
class State:
    """All the node knows. Local ranks are 0..nproc-1."""

    nproc: int
    phase: Phase = Phase.JOINING
    round: Round | None = None
    alive: frozenset[int] = frozenset()
    """Workers that exist."""
    awaited: frozenset[int] = frozenset()
    """Workers asked for that neither exist nor have failed to."""
    succeeded: frozenset[int] = frozenset()
    taking_stacks: bool = False
    killing: bool = False
    """`KillTree` is under way."""
    stop_signal: int = signal.SIGTERM
    opened: int = 0
    """The last round whose global rank 0 is known to have been started elsewhere."""
    next_round: Round | None = None
    """A round that formed while the last one's workers were still being stopped (after a change of leader)."""
    next_is_held: bool = False
    finish: Finish | None = None
    """What to finish with once the workers are gone; None: tell that they are, and go on."""

    @property
    def number(self) -> int:
        """The round's number, 0 before the first."""
        return self.round.number if self.round else 0
