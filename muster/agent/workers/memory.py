"""What the kernel counts about the memory of the agent's cgroup. `diagnosis.failures` interprets it after a failure."""

import os
from collections.abc import Iterator

from muster._shared.records import record


@record
class MemoryCgroup:
    """The agent's memory cgroup: its folder and the visible folders above it, innermost first."""

    version: int
    folders: tuple[str, ...]


@record
class MemoryCounters:
    """What the kernel has counted so far."""

    kills: int | None
    """OOM kills in this process's cgroup; None where the kernel does not count them."""
    limit_hits: int
    """How often the limit was reached (v1 failcnt, v2 `max` of memory.events)."""
    machine_kills: int
    """OOM kills anywhere on the machine."""


class MemoryWatch:
    """Reads the counters of this process's cgroup."""

    def __init__(self, proc: str = "/proc") -> None:
        """Find the cgroup.

        Args:
            proc: the proc file system.
        """
        self.proc = proc
        self.cgroup = find_memory_cgroup(proc)
        self.before = self.read()
        """The counters at the last `reset`."""

    def reset(self) -> None:
        """Forget what was counted earlier, because workers are about to start."""
        self.before = self.read()

    def read(self) -> MemoryCounters:
        """Read the counters now."""
        machine_kills = read_fields(f"{self.proc}/vmstat").get("oom_kill", 0)
        if self.cgroup is None:
            return MemoryCounters(kills=None, limit_hits=0, machine_kills=machine_kills)
        own = self.cgroup.folders[0]
        if self.cgroup.version == 2:
            # Counted in the killed process's cgroup, whichever ancestor's limit was reached. Source: the kernel's
            # Documentation/admin-guide/cgroup-v2.rst, memory.events.
            events = read_fields(f"{own}/memory.events")
            return MemoryCounters(
                kills=events.get("oom_kill"), limit_hits=events.get("max", 0), machine_kills=machine_kills
            )
        # Linux before 4.13 has only failcnt, no oom_kill in memory.oom_control.
        return MemoryCounters(
            kills=read_fields(f"{own}/memory.oom_control").get("oom_kill"),
            limit_hits=read_number(f"{own}/memory.failcnt") or 0,
            machine_kills=machine_kills,
        )


def find_memory_cgroup(proc: str) -> MemoryCgroup | None:
    """Return the memory cgroup of this process; None if there is none or it is not mounted.

    Source: cgroups(7), proc(5) on /proc/[pid]/cgroup and /proc/[pid]/mountinfo. In a container with a cgroup namespace
    the path is relative to the mount. Without one it names a folder that the mount does not show; then the mount's top
    folder is used.
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


def _read_cgroup_paths(path: str) -> dict[str, str]:
    """Read the paths by controller; "" stands for cgroup v2."""
    paths: dict[str, str] = {}
    for line in _read_lines(path):
        _, controllers, inside = [*line.split(":", 2), "", ""][:3]
        for controller in controllers.split(","):
            paths[controller] = inside
    return paths


def _read_cgroup_mounts(path: str) -> dict[int, tuple[str, str]]:
    """Read (root, mount point) by version for the mounts with the memory controller."""
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


def read_fields(path: str) -> dict[str, int]:
    """Return the values by name from lines of "name number"."""
    pairs = (line.split() for line in _read_lines(path))
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def read_number(path: str) -> int | None:
    """Read a number; None if the file does not exist or contains "max"."""
    lines = _read_lines(path)
    return int(lines[0]) if lines and lines[0].isdigit() else None
