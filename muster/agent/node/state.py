"""The words that `decisions` thinks in: events that come, actions that follow, and the node's state in between.

Events of rendezvous stand in its package.
"""

import signal
from enum import Enum

from muster.agent.node.actions import Finish
from muster.agent.round import Round
from muster.agent.runtime.records import record

# -- events ----------------------------------------------------------------------------------------------------------


# -- actions ---------------------------------------------------------------------------------------------------------


# -- state -----------------------------------------------------------------------------------------------------------


class NodePhase(Enum):
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
class NodeState:
    """All the node knows. Local ranks are 0..nproc-1."""

    nproc: int
    phase: NodePhase = NodePhase.JOINING
    round: Round | None = None
    alive: frozenset[int] = frozenset()
    """Workers that exist."""
    awaited: frozenset[int] = frozenset()
    """Workers asked for that neither exist nor have failed to."""
    succeeded: frozenset[int] = frozenset()
    collecting_stacks: bool = False
    killing: bool = False
    """`KillTree` is under way."""
    stop_signal: int = signal.SIGTERM
    rank0_started: int = 0
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
