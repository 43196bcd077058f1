"""All faults, in the order in which they are tried."""

from collections.abc import Mapping
from typing import Final

from muster.cli.rehearse.faults import nodes, places, ranks
from muster.cli.rehearse.faults.fault import Fault

FAULTS: Final[Mapping[str, Fault]] = {
    fault.name: fault
    for fault in (
        *(ranks.KILLED, ranks.RAISES, ranks.CRASHES, ranks.STOPPED, ranks.STOPPED_IN_COLLECTIVE, ranks.SLOW),
        *(ranks.LOADER_KILLED, nodes.PREEMPTED, nodes.FIRST_LOST, nodes.LOST, nodes.AGENT_KILLED, nodes.APP_RESTARTED),
        *(places.CUT_SHORT, places.CUT_LONG, places.DISK_FULL, places.DISK_SLOW, places.OUT_OF_MEMORY),
    )
}
