"""Reads from /proc what the processes of the workers' sessions have done. It may take long, so call it in a thread."""

import os
from collections.abc import Collection, Mapping
from typing import TypeAlias

from muster._shared import processes
from muster._shared.records import record
from muster.agent.runtime.loop import run_limited

ProcessKey: TypeAlias = tuple[int, int]
"""A process id and the start time of the process (clock ticks since boot), because ids are reused."""

Sessions: TypeAlias = "Mapping[int, Mapping[ProcessKey, Reading]]"
"""The processes of a worker's session, by the worker's process id."""

SIZES_LIMIT_S = 0.2
"""How long a look waits for the sizes of stack files."""
_FAULT_BYTES = 128 << 10
"""How much the kernel reads ahead for a page that is not in memory."""
_BACKGROUND_SHARE = 0.005
"""CPU share that watchdog threads of an idle worker (NCCL's, a TCPStore's) may use without counting as activity."""
_BACKGROUND_S = 0.02
"""How much the kernel's accounting in ticks may add to that."""
_POLLED_BYTES = 100_000
"""Bytes per second that a thread which polls pipes or /proc may read."""


@record
class Reading:
    """What one process, and the children it has waited for, have done so far. A live process's counters only grow.

    Sums over processes would not work: the counters of a process that ends vanish or are added to its parent's.
    """

    cpu_s: float
    written_bytes: int | None
    """Bytes passed to write(2) and similar calls; None if the kernel does not report them, or a disk does not answer.
    """
    loaded_bytes: int | None = 0
    """Bytes read by read(2) and similar calls, plus roughly those of file pages that were not in memory.

    None if the kernel does not report them.
    """


_NOTHING = Reading(cpu_s=0.0, written_bytes=0)

Processes: TypeAlias = Mapping[ProcessKey, Reading]
"""The processes of one session."""


def find_background_s(took_s: float) -> float:
    """Return how much CPU time an idle worker may use in this many seconds."""
    return _BACKGROUND_S + _BACKGROUND_SHARE * took_s


def count_cpu_s(before: Processes, now: Processes) -> float:
    """Return the CPU seconds that the current processes have used since the earlier reading."""
    return sum(reading.cpu_s - before.get(key, _NOTHING).cpu_s for key, reading in now.items())


def has_written(before: Processes, now: Processes) -> bool:
    """Return whether one of the current processes has written something since the earlier reading."""
    return any(_count(before.get(key, _NOTHING).written_bytes, each.written_bytes) > 0 for key, each in now.items())


def has_loaded(before: Processes, now: Processes, took_s: float) -> bool:
    """Return whether the current processes have read more since the earlier reading than a polling thread does."""
    loaded = sum(_count(before.get(key, _NOTHING).loaded_bytes, each.loaded_bytes) for key, each in now.items())
    return loaded > _POLLED_BYTES * took_s


def _count(before: int | None, now: int | None) -> int:
    """Return the difference; 0 if a look could not read one of the two, which is no activity."""
    return 0 if before is None or now is None else now - before


def complete(now: Processes, other: Processes) -> Processes:
    """Return `now`, and from another look what this one could not read."""
    return {
        key: Reading(
            cpu_s=each.cpu_s,
            written_bytes=known.written_bytes if each.written_bytes is None else each.written_bytes,
            loaded_bytes=known.loaded_bytes if each.loaded_bytes is None else each.loaded_bytes,
        )
        for key, each in now.items()
        for known in (other.get(key, each),)
    }


def has_worked(before: Processes, now: Processes, took_s: float) -> bool:
    """Return whether the current processes have used the CPU, or written or loaded something, in this many seconds."""
    return (
        count_cpu_s(before, now) > find_background_s(took_s)
        or has_written(before, now)
        or has_loaded(before, now, took_s)
    )


class FileSizes:
    """Sizes of files that may be on a hanging disk. A separate thread reads them, and at most one waits."""

    def __init__(self, limit_s: float = SIZES_LIMIT_S) -> None:
        self._limit_s = limit_s
        self._is_reading = False

    def read(self, paths: Collection[str]) -> Mapping[str, int | None]:
        """Return the sizes, or 0 for files that do not exist; none or None while the disk does not answer.

        Raises:
            RuntimeError: no thread is left.
        """
        if self._is_reading:
            return {}
        found: dict[str, int | None] = {}

        def read_all() -> None:
            for path in paths:
                found[path] = _size_bytes(path)
            self._is_reading = False

        self._is_reading = True
        try:
            return found if run_limited([read_all], self._limit_s) else {}
        except RuntimeError:
            self._is_reading = False
            raise


def read_sessions(
    stack_files: Mapping[int, str | None], sizes: FileSizes | None = None
) -> dict[int, dict[ProcessKey, Reading]]:
    """Read the processes of each worker's session, by the worker's process id.

    Args:
        stack_files: the file to which a worker appends its stacks, by the worker's process id. It writes there when the
            agent requests stacks, which does not count as activity.
        sizes: reads how much that is; None if what is written does not matter.

    Raises:
        OSError, RuntimeError: no descriptors or threads are left.
    """
    sessions: dict[int, dict[ProcessKey, Reading]] = {pid: {} for pid in stack_files}
    tick_s = 1.0 / os.sysconf("SC_CLK_TCK")
    for own_pid in processes.list_pids():
        stat = processes.read_stat(own_pid)
        if stat is None or int(stat[3]) not in sessions:
            continue
        # An ended process writes nothing, and only root may read its count.
        written, loaded = (0, 0) if stat[0] in ("Z", "X") else _read_io(own_pid)
        cpu_s = sum(map(int, stat[11:15])) * tick_s  # utime, stime, cutime, cstime
        if loaded is not None:
            loaded += (int(stat[9]) + int(stat[10])) * _FAULT_BYTES  # majflt, cmajflt
        sessions[int(stat[3])][own_pid, int(stat[19])] = Reading(
            cpu_s=cpu_s, written_bytes=written, loaded_bytes=loaded
        )
    for pid, members in sessions.items():
        if not members and os.path.exists(f"/proc/{pid}"):
            raise OSError(f"process {pid} cannot be read")
    return sessions if sizes is None else _subtract_stacks(sessions, stack_files, sizes)


def _subtract_stacks(
    sessions: Mapping[int, Mapping[ProcessKey, Reading]], stack_files: Mapping[int, str | None], sizes: FileSizes
) -> dict[int, dict[ProcessKey, Reading]]:
    """Subtract what the workers have written into their stack files; while their disk hangs, count nothing.

    The files are read last, so stacks written in between lower the result, which does not count as activity.
    """
    found = sizes.read(tuple(path for path in stack_files.values() if path is not None))

    def subtract(pid: int, reading: Reading) -> Reading:
        path = stack_files[pid]
        if path is None or not reading.written_bytes:
            return reading
        size = found.get(path)
        written = None if size is None else reading.written_bytes - size
        return Reading(cpu_s=reading.cpu_s, written_bytes=written, loaded_bytes=reading.loaded_bytes)

    return {pid: {key: subtract(pid, each) for key, each in members.items()} for pid, members in sessions.items()}


def _read_io(pid: int) -> tuple[int | None, int | None]:
    """Return the bytes that the process has passed to write(2) and read(2), and similar calls.

    Return (None, None) if it cannot be read, or has ended.

    Source: proc(5), /proc/<pid>/io: readable with the right to trace the process, if the kernel counts at all.
    """
    try:
        with open(f"/proc/{pid}/io", encoding="ascii") as file:
            fields = dict(line.rstrip("\n").split(": ", 1) for line in file)
        return int(fields["wchar"]), int(fields["rchar"])
    except (OSError, KeyError):
        return None, None


def _size_bytes(path: str) -> int | None:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0
    except OSError:
        return None
