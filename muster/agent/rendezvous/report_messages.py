"""The messages that hold failures or stacks. They are loaded with the network, or at the first failure or request.

Like those of `interface`, each is declared once: one side sends it, and the other decides on it.
"""

from muster._shared.fields import Count, Port, RoundNumber
from muster._shared.records import record
from muster._shared.reports import Answer, Failures, Stacks
from muster.agent.rendezvous.interface import RequestAnswered
from muster.agent.round import PartOffers

# -- from a node -------------------------------------------------------------------------------------------------------


@record
class Failed:
    """Workers of the node failed. RoundBroken (FAILURE or FINAL) follows."""

    round_number: RoundNumber
    failures: Failures
    has_stepped: bool = False
    """Whether a rank of the node has done a step in this round."""


@record
class Idle:
    """No worker of the node makes progress (one failure per worker), or one does again (no failures)."""

    round_number: RoundNumber
    failures: Failures
    is_urgent: bool = False
    """Whether torch is about to end a worker that waits, so that the idleness of other nodes no longer matters."""


@record
class StacksTaken:
    """The answer to StacksWanted: the stacks of the node's workers."""

    round_number: RoundNumber
    number: Count
    stacks: Stacks
    missing: Count = 0
    """The number of workers that gave none."""


@record
class Stopped:
    """After RoundBroken: no worker of the round is left on the node; it is ready for the next one."""

    round_number: RoundNumber
    failures: Failures = ()
    """Failures that no `Failed` has reported."""
    stacks: Stacks = ()
    port: Port = 0
    """The MASTER_PORT that the node has reserved for the next round; the member adds it."""
    can_host_store: bool = False
    """Whether its agent would host the store of the next round, if it gets rank 0; the member adds it."""
    offers: PartOffers = ()
    """What it has for features in the next round; the member adds it."""
    has_stepped: bool = False
    """Whether a rank of the node has done a step in this round."""


EvidenceMessage = Failed | Idle | StacksTaken | Stopped
"""What a node sends once it has collected failures or stacks."""


# -- from the leader ---------------------------------------------------------------------------------------------------


@record
class RequestAnswer(RequestAnswered):
    """`RequestAnswered` in the form in which it travels."""

    request: Count
    answer: Answer
