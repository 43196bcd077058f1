"""The state of one node, input and output of `decisions.decide`."""

import signal
from enum import Enum

from muster.agent.node.actions import Finish, LocalFailure
from muster.agent.round import Round
from muster.agent.runtime.records import record


class NodePhase(Enum):
    """What the node is doing."""

    JOINING = "joining"
    """No workers; waiting for a round."""
    RUNNING = "running"
    """Workers of the round are being started or run."""
    SUCCEEDED = "succeeded"
    """All workers of the round exited with 0; waiting for the other nodes."""
    STOPPING = "stopping"
    """The round's workers are being stopped."""
    ENDED = "ended"
    """`Finish` has been returned; later events change nothing."""


@record
class NodeState:
    """The whole state of the node. Local ranks are 0..nproc-1."""

    nproc: int
    phase: NodePhase = NodePhase.JOINING
    round: Round | None = None
    alive: frozenset[int] = frozenset()
    """Workers that exist."""
    awaited: frozenset[int] = frozenset()
    """Workers that `StartWorkers` asked for and that have neither started nor failed to start."""
    succeeded: frozenset[int] = frozenset()
    unreported: tuple[LocalFailure, ...] = ()
    """Failures that rendezvous does not have yet."""
    reported: frozenset[int] = frozenset()
    """Workers whose failure rendezvous has. Idleness is no failure: it is reported besides."""
    collecting_stacks: bool = False
    killing: bool = False
    """`KillWorkers` is under way."""
    stop_signal: int = signal.SIGTERM
    rank0_started: int = 0
    """The number of the last round whose global rank 0 is known to have been started."""
    next_round: Round | None = None
    """A round that formed while the last one's workers were still being stopped (after a change of leader)."""
    next_is_held: bool = False
    finish: Finish | None = None
    """What to finish with once the workers are gone; None: report that they are gone, and continue."""

    @property
    def number(self) -> int:
        """The round's number, 0 before the first."""
        return self.round.number if self.round else 0
