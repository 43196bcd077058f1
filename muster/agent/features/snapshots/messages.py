"""What the two halves say to each other, and what a node has of snapshots.

`leader` and `node_snapshots` decide on these records. Between nodes they travel as the content of a `PartReport`,
`PartOrder`, `PartOffer`, `PartShare` or `PartMemory`.
"""

import json
from typing import Annotated, Final, TypeVar

from muster._shared.codec import MessageUnion, decode, encode_message
from muster._shared.fields import SPARSE, Count, GroupRank, Host, Limit, Port, Processes, Size, Step
from muster._shared.records import record

FEATURE: Final = "snapshots"
T = TypeVar("T")
_LIMIT_BYTES: Final = 6144


def pack(message: object) -> str:
    """Return a record as the content of what travels."""
    return encode_message(message, _LIMIT_BYTES)


def unpack(kind: type[T], content: str) -> T:
    """Read a record of a known class.

    Raises:
        MalformedMessageError: it is none.
    """
    return decode(kind, json.loads(content))


@record
class Generation:
    """A snapshot of the whole job, which all ranks have saved at one step."""

    lineage: Count
    """Names the round in which it was saved; a later round has a greater lineage."""
    step: Step
    size: Size
    """How many nodes that round had."""
    is_replicated: bool = False
    """Whether the tensors are the same on all ranks."""
    is_partial: Annotated[bool, SPARSE] = False
    """Whether a round has continued it although a part is lost; no later round returns to an older generation for that
    part."""

    @property
    def key(self) -> tuple[int, int]:
        """Lineage and step, which together name it."""
        return self.lineage, self.step


@record
class Holding:
    """What a node has in memory of a generation: all that one node of its round saved."""

    generation: Generation
    group_rank: GroupRank
    """Group rank of the node whose ranks have saved it."""
    first_rank: Count
    """The lowest global rank of that node then."""
    nproc: Processes
    is_copy: bool = False
    """Whether that node has sent it, because this node is its neighbour."""


@record
class Holdings:
    """What a node has in memory: its offer for the next round."""

    holdings: Annotated[tuple[Holding, ...], Limit(most=24)]


@record
class Source:
    """The node that has what another one lacks of the generation that a round continues."""

    host: Host
    port: Port
    group_rank: GroupRank
    """Group rank, in the earlier round, of the node whose part it is."""


@record
class Share:
    """What one node must know of a round that continues a snapshot."""

    source: Source | None = None
    """Where its part of the snapshot is, if it has none."""
    neighbour: Source | None = None
    """The node that gets a copy of its part; None if there is no other."""


# -- from a node -------------------------------------------------------------------------------------------------------


@record
class SnapshotKept:
    """All ranks of the node have a snapshot of the step, and keep it until it is confirmed or KeepSnapshot comes."""

    step: Step
    advance: Count
    """Roughly how many steps the node's ranks do in a second."""
    is_replicated: bool = False
    is_split: bool = False
    """Whether its ranks keep different ones, of which this is the latest. Then another mark is needed."""


@record
class SnapshotCopied:
    """The neighbour has the snapshot of `CopySnapshot`, verified."""

    lineage: Count
    step: Step
    has_failed: bool = False
    """Whether the neighbour could not take it; no more are sent in this round."""


@record
class SnapshotSought:
    """A worker needs what this global rank has saved of the snapshot that the round continues: `SnapshotFound`."""

    rank: Count


Report = SnapshotKept | SnapshotCopied | SnapshotSought

# -- from the leader ---------------------------------------------------------------------------------------------------


@record
class KeepSnapshot:
    """Keep the first snapshot of the round at or above this step, and send `SnapshotKept`."""

    step: Step


@record
class CopySnapshot:
    """Send this snapshot to the neighbour, and then `SnapshotCopied`. All ranks of the round have it."""

    lineage: Count
    step: Step
    neighbour: Source


@record
class CopiesEnded:
    """All neighbours have the snapshot, so the one before it is not needed any more."""

    is_over: bool = False
    """Whether no more are sent in this round."""


@record
class SnapshotFound:
    """The answer to `SnapshotSought`."""

    rank: Count
    source: Source | None
    """A node that has it; None if none has."""


Order = KeepSnapshot | CopySnapshot | CopiesEnded | SnapshotFound

REPORTS: MessageUnion[Report] = MessageUnion(Report)
ORDERS: MessageUnion[Order] = MessageUnion(Order)
