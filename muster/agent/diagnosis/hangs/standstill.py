"""Since when all workers of a node stand still: long before they count as hung, while nothing is learned yet. Pure.

A worker stands still if it does no step, enters and completes no collective, uses no CPU time, and writes and loads
nothing. While it waits in a collective, other threads of it may write and use a little CPU time. So one that computes,
compiles, loads its data or saves a checkpoint does not stand still, and the watch says nothing.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from muster.agent.diagnosis.hangs.sessions import count_cpu_s, find_background_s, has_loaded, has_written

if TYPE_CHECKING:
    from muster.agent.diagnosis.hang import Activity

LEAST_S = 50.0
"""After so long it is said for the first time, and then at intervals that double."""
FACTOR = 5.0
"""And not before so many times the longest time that they have stood still before."""
_WAITING_SHARE = 0.1
"""CPU share that other threads of a worker may use while it waits in a collective."""


class StandStill:
    """Told of each look at the workers of a node."""

    def __init__(self) -> None:
        self.for_s = 0.0
        """For how long all of them have stood still; 0: one does not, or none runs."""
        self._before: Mapping[int, Activity] = {}
        self._before_s = 0.0
        self._since_s: dict[int, float] = {}
        """By local rank, of those that run."""
        self._longest_s = 0.0
        self._said_s = 0.0

    def record(self, activities: "Mapping[int, Activity]", now_s: float) -> None:
        """Record what a look has found, by local rank."""
        took_s = now_s - self._before_s
        before, self._before, self._before_s = self._before, activities, now_s
        self._since_s = {
            rank: self._since_s[rank] if rank in before and _stands_still(before[rank], activity, took_s) else now_s
            for rank, activity in activities.items()
        }
        last_s, self.for_s = self.for_s, now_s - max(self._since_s.values(), default=now_s)
        if self.for_s < last_s:
            self._longest_s = max(self._longest_s, last_s)

    def forget(self) -> None:
        """The workers could not be looked at, and may not have been able to work."""
        self._before = {}

    def find_due_s(self, limit_s: float) -> float | None:
        """For how long they have stood still, if that is to be said now; 0: they did, and go on; None: nothing.

        Args:
            limit_s: after which workers that are quiet count as hung: it is no use to say it just before.
        """
        if self.for_s < self._said_s:
            self._said_s = 0.0
            return 0.0
        least_s = max(LEAST_S, FACTOR * self._longest_s)
        if self.for_s < max(least_s, 2 * self._said_s) or 2 * least_s > limit_s:
            return None
        self._said_s = self.for_s
        return self.for_s


def _stands_still(before: "Activity", now: "Activity", took_s: float) -> bool:
    is_same = (before.progress_ns, before.phase, before.collectives) == (now.progress_ns, now.phase, now.collectives)
    if not is_same or has_loaded(before.processes, now.processes, took_s):
        return False
    cpu_s = count_cpu_s(before.processes, now.processes)
    if before.is_waiting and now.is_waiting:
        return cpu_s <= _WAITING_SHARE * took_s
    has_output = before.captured_bytes != now.captured_bytes or has_written(before.processes, now.processes)
    return not has_output and cpu_s <= find_background_s(took_s)
