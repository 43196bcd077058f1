"""Reads from /proc the CPU and memory use of workers and their children. It may block, so call it in a thread.

Children are found by `/proc/PID/task/PID/children`. A kernel without CONFIG_PROC_CHILDREN lacks it, and then only the
worker's own process counts. Children of threads other than the first are not seen.
"""

import os
from collections.abc import Iterator, Mapping

from muster._shared import processes
from muster._shared.records import record

_LIMIT = 64
"""The most processes that are read for one worker."""


@record
class Usage:
    """What one worker uses at one moment."""

    at_s: float
    """The time, by the clock that the reader was given."""
    cpu_s: float
    """CPU time so far, including children that it has waited for."""
    memory_bytes: int
    """Resident memory. Shared pages count with each process."""


def read_usage(pids: Mapping[int, int], at_s: float) -> dict[int, Usage]:
    """Read all workers, by local rank. A worker that has ended is omitted.

    Args:
        pids: process ids by local rank.
        at_s: the time now.
    """
    tick_s, page_bytes = 1.0 / os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
    found: dict[int, Usage] = {}
    for local_rank, pid in pids.items():
        ticks = pages = 0
        for stat in _read_stats(pid):
            ticks += sum(map(int, stat[11:15]))  # utime, stime, cutime, cstime
            pages += int(stat[21])  # rss
        if pages:
            found[local_rank] = Usage(at_s=at_s, cpu_s=ticks * tick_s, memory_bytes=pages * page_bytes)
    return found


def compute_cpu(before: Usage | None, now: Usage) -> float | None:
    """Return the cores used in between; None if unknown."""
    if before is None or now.at_s <= before.at_s:
        return None
    return max(0.0, round((now.cpu_s - before.cpu_s) / (now.at_s - before.at_s), 3))


def _read_stats(pid: int) -> Iterator[list[str]]:
    """Read the stats of the process and its descendants."""
    waiting, read = [pid], 0
    while waiting and read < _LIMIT:
        each = waiting.pop()
        stat = processes.read_stat(each)
        read += 1
        if stat is not None and len(stat) > 21:
            yield stat
            waiting += _list_children(each)


def _list_children(pid: int) -> list[int]:
    try:
        fd = os.open(f"/proc/{pid}/task/{pid}/children", os.O_RDONLY)
    except OSError:
        return []
    try:
        return list(map(int, os.read(fd, 4096).rpartition(b" ")[0].split()))
    except (OSError, ValueError):
        return []
    finally:
        os.close(fd)
