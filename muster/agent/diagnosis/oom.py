"""Finds out from the cgroup's counters whether the kernel killed a process for memory.

A SIGKILL that the agent did not send has few possible senders. The counter of OOM kills in the worker's own cgroup
proves an OOM kill. A reached limit, or a kill anywhere on the machine, only makes one likely and is called a guess.
"""

from muster._shared.reports import OomEvidence
from muster.agent.workers.memory import MemoryCgroup, MemoryWatch, read_number

_UNLIMITED_BYTES = 1 << 60
"""cgroup v1 shows "no limit" as the largest multiple of a page that fits into a long."""


class OomWatch:
    """Compares the current counters with those of the last `MemoryWatch.reset`."""

    def __init__(self, memory: MemoryWatch) -> None:
        self._memory = memory

    @property
    def counts_kills(self) -> bool:
        """Whether the kernel counts the OOM kills of this node's own cgroup. Then none counted means none."""
        return self._memory.cgroup is not None and self._memory.before.kills is not None

    def check(self) -> OomEvidence | None:
        """Return the evidence of an OOM kill since the reset; None if there is none."""
        before, now, cgroup = self._memory.before, self._memory.read(), self._memory.cgroup
        if cgroup is not None and now.kills is not None and before.kills is not None and now.kills > before.kills:
            name = "memory.events" if cgroup.version == 2 else "memory.oom_control"
            return _describe(cgroup, certain=True, source=f"{cgroup.folders[0]}/{name}")
        if cgroup is not None and now.limit_hits > before.limit_hits and now.kills is None:
            return _describe(cgroup, certain=False, source=f"{cgroup.folders[0]}/memory.failcnt")
        if now.machine_kills > before.machine_kills:
            return _describe(cgroup, certain=False, source=f"{self._memory.proc}/vmstat")
        return None


def _describe(cgroup: MemoryCgroup | None, *, certain: bool, source: str) -> OomEvidence:
    limit = find_limit(cgroup) if cgroup else None
    return OomEvidence(
        certain=certain,
        limit_bytes=limit[0] if limit else None,
        peak_bytes=_read_peak(limit[1]) if limit else None,
        source=source,
    )


def find_limit(cgroup: MemoryCgroup) -> tuple[int, str] | None:
    """Return the lowest limit of the cgroup and those above it, and its folder; None if unlimited."""
    name = "memory.max" if cgroup.version == 2 else "memory.limit_in_bytes"
    limits = [(limit, folder) for folder in cgroup.folders if (limit := read_number(f"{folder}/{name}")) is not None]
    limits = [(limit, folder) for limit, folder in limits if limit < _UNLIMITED_BYTES]
    return min(limits, key=lambda found: found[0]) if limits else None


def _read_peak(folder: str) -> int | None:
    for name in ("memory.peak", "memory.max_usage_in_bytes"):  # v2 (Linux 5.19), v1
        peak = read_number(f"{folder}/{name}")
        if peak is not None:
            return peak
    return None
