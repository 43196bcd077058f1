"""Finds out from the cgroup's counters whether the kernel killed a process for memory.

A SIGKILL that the agent did not send has few possible senders. The counter of OOM kills in the worker's own cgroup
proves one; a limit that was reached, or a kill anywhere on the machine, only makes it likely and is called a guess.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # only a failure loads the report
    from muster.agent.diagnosis.report import OomEvidence

_UNLIMITED_BYTES = 1 << 60
"""cgroup v1 shows "no limit" as the largest multiple of a page that fits into a long."""


@dataclass(frozen=True, kw_only=True)
class MemoryCgroup:
    """The agent's memory cgroup: its folder and those above it, innermost first, as far as they are visible."""

    version: int
    folders: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class _Counters:
    kills: int | None
    """OOM kills in this process's cgroup; None where the kernel does not count them."""
    limit_hits: int
    """How often the limit was reached (v1 failcnt, v2 `max` of memory.events)."""
    machine_kills: int
    """OOM kills anywhere on the machine."""


class OomWatch:
    """Compares the current counters with those of the last `reset`."""

    def __init__(self, proc: str = "/proc") -> None:
        """Find the cgroup.

        Args:
            proc: the proc file system.
        """
        self._proc = proc
        self._cgroup = find_memory_cgroup(proc)
        self._before = self._read()

    def reset(self) -> None:
        """Forget earlier kills, because workers are about to start."""
        self._before = self._read()

    def check(self) -> "OomEvidence | None":
        """Evidence of an OOM kill since `reset`; None when there is none."""
        before, now = self._before, self._read()
        if now.kills is not None and before.kills is not None and now.kills > before.kills:
            return self._describe(certain=True, source=self._counter_file())
        if self._cgroup is not None and now.limit_hits > before.limit_hits and now.kills is None:
            return self._describe(certain=False, source=f"{self._cgroup.folders[0]}/memory.failcnt")
        if now.machine_kills > before.machine_kills:
            return self._describe(certain=False, source=f"{self._proc}/vmstat")
        return None

    def _describe(self, *, certain: bool, source: str) -> "OomEvidence":
        from muster.agent.diagnosis.report import OomEvidence

        limit = find_limit(self._cgroup) if self._cgroup else None
        return OomEvidence(
            certain=certain,
            limit_bytes=limit[0] if limit else None,
            peak_bytes=_read_peak(limit[1]) if limit else None,
            source=source,
        )

    def _counter_file(self) -> str:
        assert self._cgroup is not None  # noqa: S101  # only a cgroup has its own counter
        name = "memory.events" if self._cgroup.version == 2 else "memory.oom_control"
        return f"{self._cgroup.folders[0]}/{name}"

    def _read(self) -> _Counters:
        machine_kills = _read_fields(f"{self._proc}/vmstat").get("oom_kill", 0)
        if self._cgroup is None:
            return _Counters(kills=None, limit_hits=0, machine_kills=machine_kills)
        own = self._cgroup.folders[0]
        if self._cgroup.version == 2:
            # Counted in the killed process's cgroup, whichever ancestor's limit was reached. Source: the kernel's
            # Documentation/admin-guide/cgroup-v2.rst, memory.events.
            events = _read_fields(f"{own}/memory.events")
            return _Counters(kills=events.get("oom_kill"), limit_hits=events.get("max", 0), machine_kills=machine_kills)
        # oom_kill in memory.oom_control came with Linux 4.13; before that failcnt is all there is.
        return _Counters(
            kills=_read_fields(f"{own}/memory.oom_control").get("oom_kill"),
            limit_hits=_read_number(f"{own}/memory.failcnt") or 0,
            machine_kills=machine_kills,
        )


def find_memory_cgroup(proc: str) -> MemoryCgroup | None:
    """The memory cgroup of this process; None when there is none or it is not mounted.

    Source: cgroups(7), proc(5) on /proc/[pid]/cgroup and /proc/[pid]/mountinfo. In a container with a cgroup
    namespace the path is relative to the mount; without one it names a folder that the mount does not show, and the
    mount's top folder is used.
    """
    paths = _read_cgroup_paths(f"{proc}/self/cgroup")
    mounts = _read_cgroup_mounts(f"{proc}/self/mountinfo")
    for version, controller in ((1, "memory"), (2, "")):
        if controller not in paths or version not in mounts:
            continue
        root, mount = mounts[version]
        inside = paths[controller]
        if root != "/" and (inside + "/").startswith(root + "/"):
            inside = inside[len(root) :]
        own = os.path.normpath(f"{mount}/{inside}")
        if not _is_within(own, mount) or not os.path.isdir(own):
            own = mount
        if os.path.exists(f"{own}/memory.events" if version == 2 else f"{own}/memory.failcnt"):
            return MemoryCgroup(version=version, folders=tuple(_walk_up(own, mount)))
    return None


def _is_within(path: str, top: str) -> bool:
    return f"{path}/".startswith(f"{top}/")


def _walk_up(path: str, top: str) -> Iterator[str]:
    while _is_within(path, top):
        yield path
        path = os.path.dirname(path)


def find_limit(cgroup: MemoryCgroup) -> tuple[int, str] | None:
    """The lowest limit of the cgroup and those above it, and its folder; None: unlimited."""
    name = "memory.max" if cgroup.version == 2 else "memory.limit_in_bytes"
    limits = [(limit, folder) for folder in cgroup.folders if (limit := _read_number(f"{folder}/{name}")) is not None]
    limits = [(limit, folder) for limit, folder in limits if limit < _UNLIMITED_BYTES]
    return min(limits, key=lambda found: found[0]) if limits else None


def _read_peak(folder: str) -> int | None:
    for name in ("memory.peak", "memory.max_usage_in_bytes"):  # v2 (Linux 5.19), v1
        peak = _read_number(f"{folder}/{name}")
        if peak is not None:
            return peak
    return None


def _read_cgroup_paths(path: str) -> dict[str, str]:
    """By controller; "" is cgroup v2."""
    paths: dict[str, str] = {}
    for line in _read_lines(path):
        _, controllers, inside = [*line.split(":", 2), "", ""][:3]
        for controller in controllers.split(","):
            paths[controller] = inside
    return paths


def _read_cgroup_mounts(path: str) -> dict[int, tuple[str, str]]:
    """(root, mount point) by version, of the mounts with the memory controller."""
    mounts: dict[int, tuple[str, str]] = {}
    for line in _read_lines(path):
        left, _, right = line.partition(" - ")
        fields, kinds = left.split(), right.split()
        if len(fields) < 5 or len(kinds) < 3:
            continue
        if kinds[0] == "cgroup2":
            mounts[2] = (fields[3], fields[4])
        elif kinds[0] == "cgroup" and "memory" in kinds[2].split(","):
            mounts[1] = (fields[3], fields[4])
    return mounts


def _read_lines(path: str) -> list[str]:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().splitlines()
    except OSError:
        return []


def _read_fields(path: str) -> dict[str, int]:
    """Lines of "name number"."""
    pairs = (line.split() for line in _read_lines(path))
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def _read_number(path: str) -> int | None:
    """None when the file does not exist or contains "max"."""
    lines = _read_lines(path)
    return int(lines[0]) if lines and lines[0].isdigit() else None
