"""The messages that hold failures or stacks: loaded with the network, or when a worker first fails or a person asks.

As those of `interface`, each is declared once: sent by one side, decided on by the other.
"""

from muster._shared.fields import Count, Port, RoundNumber
from muster._shared.records import record
from muster._shared.reports import Answer, Failures, Stacks
from muster.agent.rendezvous.interface import RequestAnswered
from muster.agent.round import Holdings

# -- from a node -------------------------------------------------------------------------------------------------------


@record
class Failed:
    """Workers of the node failed. RoundBroken (FAILURE or FINAL) follows."""

    round_number: RoundNumber
    failures: Failures
    has_stepped: bool = False
    """A rank of the node has done a step in this round."""


@record
class Idle:
    """No worker of the node makes progress (one failure per worker), or one does again (no failures)."""

    round_number: RoundNumber
    failures: Failures
    is_urgent: bool = False
    """torch is about to end a worker that waits: whether other nodes are idle does not matter any more."""


@record
class StacksTaken:
    """The answer to StacksWanted: the stacks of the node's workers."""

    round_number: RoundNumber
    number: Count
    stacks: Stacks
    missing: Count = 0
    """So many workers gave none."""


@record
class Stopped:
    """After RoundBroken: no worker of the round is left on the node; it is ready for the next one."""

    round_number: RoundNumber
    failures: Failures = ()
    """Those that no `Failed` has reported."""
    stacks: Stacks = ()
    port: Port = 0
    """The MASTER_PORT that the node has reserved for the next round; the member adds it."""
    can_host_store: bool = False
    """Its agent would host the store of the next round, if it gets rank 0; the member adds it."""
    snapshots: Holdings = ()
    """What it has in memory for the next round to continue; the member adds it."""
    has_stepped: bool = False
    """A rank of the node has done a step in this round."""


EvidenceMessage = Failed | Idle | StacksTaken | Stopped
"""What a node sends once it has collected failures or stacks."""


# -- from the leader ---------------------------------------------------------------------------------------------------


@record
class RequestAnswer(RequestAnswered):
    """`RequestAnswered` as it travels."""

    request: Count
    answer: Answer
