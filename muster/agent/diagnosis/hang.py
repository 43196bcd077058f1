"""Has this node's worker group stopped showing signs of life? CPU time of the workers' sessions, and their output."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from muster import _processes
from muster.agent.runtime.loop import Loop, Timer

_BACKGROUND_SHARE = 0.005
"""CPU share that watchdog threads of an idle worker may use (NCCL's, a TCPStore's): half a percent is no life."""
_BACKGROUND_S = 0.02
"""And what the kernel's accounting in ticks may add to it."""


@dataclass(frozen=True, kw_only=True)
class Activity:
    """What one worker has done so far."""

    cpu_s: float
    output_bytes: int


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
        on_idle: Callable[[float], None],
    ) -> None:
        """Begin to watch.

        Args:
            loop: where callbacks run.
            limit_s: seconds without life that make a group hung.
            read: activity by local rank of the live workers; empty when none run.
            on_idle: called with the seconds of idleness when they pass the limit and at each further `limit_s`, with
                0.0 when life returns.
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
            self._on_idle(idle_s)
        elif was_idle and not self._idle:
            self._on_idle(0.0)
        self._arm()

    def _has_life(self, local_rank: int, activity: Activity, now_s: float) -> bool:
        anchor = self._anchors.get(local_rank)
        if anchor is not None:
            used_s = activity.cpu_s - anchor.activity.cpu_s
            allowed_s = _BACKGROUND_S + _BACKGROUND_SHARE * (now_s - anchor.at_s)
            # Less than before: a child of the worker has ended, which is life.
            if activity.output_bytes == anchor.activity.output_bytes and 0.0 <= used_s <= allowed_s:
                return False
        self._anchors[local_rank] = _Anchor(now_s, activity)
        return True


def read_session_cpu_s() -> dict[int, float]:
    """CPU seconds used by all live processes of each session, by session id. Empty where there is no /proc."""
    if not _processes.LINUX:
        return {}
    tick_s = 1.0 / os.sysconf("SC_CLK_TCK")
    used: dict[int, float] = {}
    for pid in _processes.list_parents():
        stat = _processes.read_stat(pid)
        if stat is not None:
            session = int(stat[3])
            used[session] = used.get(session, 0.0) + (int(stat[11]) + int(stat[12])) * tick_s
    return used
