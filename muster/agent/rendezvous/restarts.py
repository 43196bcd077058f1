"""What the leader keeps of failures, over attempts and leaders: a part of the recovery record. Pure."""

from typing import Annotated

from muster._shared.fields import Count, Limit
from muster._shared.records import record, replace

Signature = Annotated[str, Limit(most=32)]

MOST_FAULTS = 16
"""The most nodes whose failures are kept."""


@record
class CauseCount:
    """One cause of failed attempts since the last progress."""

    signature: Signature
    """See `verdicts.find_signature`."""
    count: Count
    is_stepless: bool
    """Whether the last attempt that failed of it is known to have done no step."""
    early: bool = False
    """Whether it was a start-up error within seconds."""


@record
class NodeFault:
    """A node that was the first to fail."""

    machine: Annotated[str, Limit(most=64)]
    """The machine's boot id; "" if unknown."""
    node_index: Count | None
    host: Annotated[str, Limit(most=128)]
    cause: Annotated[str, Limit(most=32)]
    """The class of the last failure."""
    count: Count
    """Failures without progress in between; for a device or a link, all failures."""
    is_shared: bool = False
    """Whether several nodes of the job were on the machine, so that only the one with the same index is meant."""
    is_suspected: bool = False

    def matches(self, machine: str, node_index: int | None) -> bool:
        """Return whether a member is this node, or one on its machine."""
        if not self.machine or self.machine != machine:
            return not self.machine and self.node_index is not None and self.node_index == node_index
        return not self.is_shared or self.node_index == node_index


@record
class Restarts:
    """What is known of the attempts so far."""

    free: Count = 0
    """How many restarts have used none of the allowed ones."""
    causes: Annotated[tuple[CauseCount, ...], Limit(most=8)] = ()
    """Causes since the last progress; that of the last attempt is last."""
    has_reported: bool = False
    """Whether the job's script is known to report its steps, or to have done some with an optimizer of torch."""
    faults: Annotated[tuple[NodeFault, ...], Limit(most=MOST_FAULTS)] = ()

    @property
    def repeats(self) -> int:
        """How often attempts have failed of the last one's cause without progress in between; 0 after progress."""
        return self.causes[-1].count if self.causes else 0

    def forget_causes(self) -> "Restarts":
        """Forget causes after progress: earlier failures no longer count, except those of suspected nodes."""
        faults = tuple(each for each in self.faults if each.is_suspected)
        return replace(self, causes=(), has_reported=True, faults=faults)

    def record_progress(self) -> "Restarts":
        """Record that the ended round had made progress before it failed, so that only its own failure counts."""
        last = tuple(replace(each, count=1, is_stepless=False, early=False) for each in self.causes[-1:])
        return replace(self.forget_causes(), causes=last)
