"""The flags: how much memory snapshots may take, and where copies of them are."""

from typing import Final

from muster._shared.contract import DEFAULT_SNAPSHOT_SHARE, SNAPSHOT_MEMORY, parse_snapshot_memory
from muster._shared.records import record
from muster.agent.cli.command_line import Invocation
from muster.agent.cli.flag_table import Flag
from muster.agent.errors import UsageError

FLAGS: Final = (
    Flag(
        name="snapshot-memory",
        metavar="SIZE",
        default="40%",
        ours=True,
        has_variable=False,
        text="The most memory that snapshots of muster.snapshots may take on this node. 40% is a share of the memory "
        "that the machine and all cgroups leave free. 64G is a number of bytes. 0: no snapshots are kept.",
    ),
    Flag(
        name="snapshot-copies",
        metavar="N",
        default="1",
        ours=True,
        has_variable=False,
        text="How many other nodes keep a copy of a node's snapshots, 0 or 1. The copy outlives the node.",
    ),
)


@record
class SnapshotSettings:
    """What the flags say."""

    share: int = DEFAULT_SNAPSHOT_SHARE
    """Thousandths of the free memory that this node's snapshots may take; 0 means that only `limit_bytes` counts."""
    limit_bytes: int | None = None
    """The most that they may take. None means no other limit, and 0 no snapshots."""
    copies: int = 1
    """How many other nodes keep a copy: 0 or 1."""


def read(invocation: Invocation) -> SnapshotSettings:
    """Read the flags."""
    text = invocation.values.text("snapshot-memory")
    found = (DEFAULT_SNAPSHOT_SHARE, None) if text is None else parse_snapshot_memory(text)
    if found is None:
        raise UsageError(f"--snapshot-memory {text!r}: must be {SNAPSHOT_MEMORY}")
    copies = invocation.values.integer("snapshot-copies", maximum=1)
    return SnapshotSettings(share=found[0], limit_bytes=found[1], copies=1 if copies is None else copies)
