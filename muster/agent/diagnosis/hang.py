"""Has this node's worker group stopped showing signs of life? CPU time used and bytes written in the workers' sessions.

Whatever a process of a worker's session writes counts, wherever it goes: a log file, an inherited console, a pipe, a
checkpoint. What it reads does not: a thread that looks at a pipe or at /proc once a second goes on reading while
everything else hangs, and a worker that reads something of use also computes or writes.
"""

import contextlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from muster import _processes
from muster.agent.runtime.loop import Loop, Timer

_BACKGROUND_SHARE = 0.005
"""CPU share that watchdog threads of an idle worker may use (NCCL's, a TCPStore's): half a percent is no life."""
_BACKGROUND_S = 0.02
"""And what the kernel's accounting in ticks may add to it."""

ProcessKey: TypeAlias = tuple[int, int]
"""A process id and when the process started (clock ticks since boot): ids are used again."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What one process has done so far, and the children it has waited for. The counters of a live process only grow.

    Sums over processes would not do: a process that ends takes its counters along, or hands them to its parent.
    """

    cpu_s: float
    written_bytes: int | None
    """By write(2) and its kin; None: the kernel does not tell us."""


@dataclass(frozen=True, kw_only=True)
class Activity:
    """What one worker has done so far."""

    captured_bytes: int
    """Output that went through the agent."""
    processes: Mapping[ProcessKey, Reading]
    """All processes of the worker's session; empty where there is no /proc."""


@dataclass
class _Anchor:
    at_s: float
    activity: Activity


class HangWatch:
    """Tells when no worker of the group has shown life for `limit_s`, each `limit_s` anew, and when one has again."""

    def __init__(
        self,
        loop: Loop,
        *,
        limit_s: float,
        read: Callable[[], Mapping[int, Activity]],
        on_idle: Callable[[str | None], None],
    ) -> None:
        """Begin to watch.

        Args:
            loop: where callbacks run.
            limit_s: seconds without life that make a group hung.
            read: activity by local rank of the live workers; empty when none run.
            on_idle: called with what the workers have not done, and for how long (see `describe_idleness`), when that
                passes the limit and at each further `limit_s`; with None when life returns.
        """
        self._loop = loop
        self._limit_s = limit_s
        self._read = read
        self._on_idle = on_idle
        self._anchors: dict[int, _Anchor] = {}
        self._alive_s = loop.clock.now_s()
        self._idle = False
        self._told_s = 0.0
        self._timer: Timer | None = None
        self._arm()

    def reset(self) -> None:
        """New workers: forget what the old ones did."""
        self._anchors.clear()
        self._alive_s = self._loop.clock.now_s()
        self._idle = False

    def close(self) -> None:
        """Stop watching."""
        if self._timer is not None:
            self._timer.cancel()

    def _arm(self) -> None:
        self._timer = self._loop.call_later(min(5.0, max(0.05, self._limit_s / 10)), self._look)

    def _look(self) -> None:
        now_s = self._loop.clock.now_s()
        activities = self._read()
        lively = {rank for rank, activity in activities.items() if self._has_life(rank, activity, now_s)}
        if not activities or lively:
            self._alive_s = now_s
        idle_s = now_s - self._alive_s
        was_idle, self._idle = self._idle, idle_s >= self._limit_s
        if self._idle and (not was_idle or now_s - self._told_s >= self._limit_s):
            self._told_s = now_s
            self._on_idle(describe_idleness(idle_s, activities))
        elif was_idle and not self._idle:
            self._on_idle(None)
        self._arm()

    def _has_life(self, local_rank: int, activity: Activity, now_s: float) -> bool:
        anchor = self._anchors.get(local_rank)
        if anchor is not None:
            allowed_s = _BACKGROUND_S + _BACKGROUND_SHARE * (now_s - anchor.at_s)
            if not _has_written(anchor.activity, activity) and _count_cpu_s(anchor.activity, activity) <= allowed_s:
                return False
        self._anchors[local_rank] = _Anchor(now_s, activity)
        return True


def _has_written(before: Activity, now: Activity) -> bool:
    if now.captured_bytes != before.captured_bytes:
        return True
    return any(
        (reading.written_bytes or 0) > (_find_reading(before, key).written_bytes or 0)
        for key, reading in now.processes.items()
    )


def _count_cpu_s(before: Activity, now: Activity) -> float:
    """CPU seconds used in between by the processes there are now."""
    return sum(reading.cpu_s - _find_reading(before, key).cpu_s for key, reading in now.processes.items())


def _find_reading(activity: Activity, key: ProcessKey) -> Reading:
    """A process that was not there yet had done nothing."""
    return activity.processes.get(key) or Reading(cpu_s=0.0, written_bytes=0)


def describe_idleness(idle_s: float, activities: Mapping[int, Activity]) -> str:
    """What workers without life have not done, as far as it was looked at; a clause that follows a worker's name.

    Args:
        idle_s: for how long, seconds.
        activities: the last reading, by local rank.
    """
    readings = [reading for activity in activities.values() for reading in activity.processes.values()]
    if not readings:
        return f"hung: no output captured for {idle_s:.0f} s (--hang-timeout)"
    can_see_writes = all(reading.written_bytes is not None for reading in readings)
    output = "nothing written" if can_see_writes else "no output captured"
    share = f"under {_BACKGROUND_SHARE:.1%} of a core counts as none"
    return f"hung: no CPU time used and {output} for {idle_s:.0f} s (--hang-timeout; {share})"


def read_sessions(stack_files: Mapping[int, str | None]) -> dict[int, dict[ProcessKey, Reading]]:
    """The processes of each worker's session, by the worker's process id. Empty where there is no /proc.

    Args:
        stack_files: by the worker's process id, the file it appends its stacks to. It writes there when the agent asks
            for stacks: that is no sign of life.
    """
    sessions: dict[int, dict[ProcessKey, Reading]] = {pid: {} for pid in stack_files}
    if not _processes.LINUX:
        return sessions
    tick_s = 1.0 / os.sysconf("SC_CLK_TCK")
    for name in os.listdir("/proc"):
        stat = _processes.read_stat(int(name)) if name.isdigit() else None
        if stat is None or int(stat[3]) not in sessions:
            continue
        pid = int(name)
        # A process that has ended writes nothing, and only root may ask how much it has written.
        written = 0 if stat[0] in ("Z", "X") else _read_written_bytes(pid)
        stack_file = stack_files.get(pid)
        if written and stack_file is not None:
            # In this order: stacks written in between make it less than before, which counts for nothing.
            written -= _size_bytes(stack_file)
        cpu_s = sum(map(int, stat[11:15])) * tick_s  # utime, stime, cutime, cstime
        sessions[int(stat[3])][pid, int(stat[19])] = Reading(cpu_s=cpu_s, written_bytes=written)
    return sessions


def _read_written_bytes(pid: int) -> int | None:
    """Bytes the process has given to write(2) and its kin; None: it may not be asked, or has gone.

    Source: proc(5), /proc/<pid>/io: readable by who may trace the process, if the kernel counts at all.
    """
    try:
        with open(f"/proc/{pid}/io", encoding="ascii") as file:
            fields = dict(line.rstrip("\n").split(": ", 1) for line in file)
        return int(fields["wchar"])
    except (OSError, KeyError):
        return None


def _size_bytes(path: str) -> int:
    with contextlib.suppress(OSError):
        return os.stat(path).st_size
    return 0
