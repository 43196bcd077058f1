"""All faults, in the order in which they are tried."""

from collections.abc import Mapping
from typing import Final

from muster.cli.rehearse.faults.fault import Fault
from muster.cli.rehearse.faults.nodes import agent_killed, app_restarted, first_lost, lost, preempted
from muster.cli.rehearse.faults.places import cut_long, cut_short, disk_full, disk_slow, out_of_memory
from muster.cli.rehearse.faults.ranks import (
    crashes,
    killed,
    loader_killed,
    raises,
    slow,
    stopped,
    stopped_in_collective,
)

FAULTS: Final[Mapping[str, Fault]] = {
    module.FAULT.name: module.FAULT
    for module in (
        *(killed, raises, crashes, stopped, stopped_in_collective, slow, loader_killed),
        *(preempted, first_lost, lost, agent_killed, app_restarted),
        *(cut_short, cut_long, disk_full, disk_slow, out_of_memory),
    )
}
