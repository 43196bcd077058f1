"""What the two halves say to each other: JSON in a `PartReport`."""

from typing import Annotated, Final

from muster._shared.fields import AS_OBJECT, Count, Limit, Name, Processes, Seconds
from muster._shared.records import record

LIMIT_BYTES: Final = 2048


@record
class NodeFacts:
    """What must be equal on all nodes. "", None and missing values are unknown."""

    workspace: Name = ""
    """A digest of the packed workspace."""
    script: Name = ""
    """A digest of the script, if there is no workspace."""
    versions: Annotated[tuple[tuple[Name, Name], ...], Limit(most=16), AS_OBJECT] = ()
    """Versions by name: ("torch", "2.13.0")."""
    nproc: Processes = 1
    devices: Count | None = None
    """The number of GPUs that answer."""
    clock_s: Seconds = 0.0
    """This node's wall clock when they were sent."""
