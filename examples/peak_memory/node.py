"""The part: reads the peak memory of this node's workers."""

import re
from pathlib import Path

from muster._shared.records import replace
from muster.agent.node.round_parts import PartContext, RoundPart
from muster.agent.telemetry import Observed


class PeakMemoryPart(RoundPart):
    """Needs nothing between two looks."""

    def add_to(self, observed: Observed) -> Observed:
        """See `RoundPart`. A worker that ends meanwhile has no value."""
        peaks = {local_rank: read_peak_mib(pid) for local_rank, pid in observed.pids.items()}
        found = {
            local_rank: {**observed.values.get(local_rank, {}), "peak_memory_mib": peak}
            for local_rank, peak in peaks.items()
            if peak is not None
        }
        return replace(observed, values={**observed.values, **found})


def read_peak_mib(pid: int) -> float | None:
    """Return the most memory that a process has had at a time. Source: proc_pid_status(5), VmHWM."""
    try:
        found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    except OSError:
        return None
    return None if found is None else int(found[1]) / 1024


def create_part(context: PartContext) -> PeakMemoryPart:
    """Create the part of one agent."""
    del context
    return PeakMemoryPart()
