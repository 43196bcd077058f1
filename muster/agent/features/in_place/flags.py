"""The flag."""

from typing import Final

from muster.agent.cli.command_line import Invocation
from muster.agent.cli.flag_table import Flag

FLAGS: Final = (
    Flag(
        name="spare-workers",
        metavar="N",
        default="0",
        ours=True,
        text="How many processes of this node have run the script up to its main (worker.in_place). One takes a lost "
        "rank's place. Each takes the memory of a worker.",
    ),
)


def read(invocation: Invocation) -> int:
    """Return how many spares this node has."""
    return invocation.values.integer("spare-workers", maximum=1024) or 0
