"""Detects that a process which owes the agent an answer stands still: a template, or the process of a store.

It is not known how long an answer may take: an import may compile something, and a fork copies all page tables. So the
limit is on standing still, which means that neither the process nor one below it has run, not even for a moment. An
import that reads slowly, computes, or waits for a program that it has started does not stand still.

An import that waits for one answer from a network looks like one that waits for a lock. For both the limit is long.
"""

from collections.abc import Callable, Container, Mapping

from muster._shared import processes
from muster.agent.runtime.loop import Loop

IMPORT_LIMIT_S = 60.0
"""The limit for a process that imports."""
ANSWER_LIMIT_S = 10.0
"""The limit for a process that has imported everything."""
SLOW_S = 60.0
"""How long after the request a line says that the answer is still missing."""

LOOK_S = 1.0
_PARENT, _SESSION = 1, 3  # indices in `_shared.processes.read_stat`

Activity = Mapping[int, tuple[str, ...]]
"""By process id, a value that changes whenever the process runs."""


class StallWatch:
    """Watches a process that owes an answer, until `end` is called."""

    def __init__(
        self,
        loop: Loop,
        pid: int,
        limit_s: float,
        on_stalled: Callable[[list[int]], None],
        *,
        list_others: Callable[[], frozenset[int]] = frozenset,
        on_slow: Callable[[], None] | None = None,
    ) -> None:
        """Begin.

        Args:
            loop: the agent's. The watch counts looks instead of seconds, so time in which the agent could not run does
                not count.
            pid: the process.
            limit_s: how long it may stand still.
            on_stalled: called once when it has, with the processes that stand still: this one and those below it.
            list_others: processes in its session that are no longer related to it.
            on_slow: called once after `SLOW_S` if the process does not stand still.
        """
        self._loop = loop
        self._pid = pid
        self._limit_s = limit_s
        self._on_stalled = on_stalled
        self._list_others = list_others
        self._on_slow = on_slow
        self._activity: Activity | None = None
        self._since_s = 0.0
        self._still_s = 0.0
        self._has_ended = False
        self._timer = loop.call_later(LOOK_S, self._look)

    def end(self) -> None:
        """End the watch: the answer has come, or is no longer expected. May be called again."""
        self._has_ended = True
        self._timer.cancel()

    def _look(self) -> None:
        others = self._list_others()
        self._loop.call_in_thread(lambda: read_activity(self._pid, others), self._judge)

    def _judge(self, activity: Activity) -> None:
        if self._has_ended:
            return
        self._since_s += LOOK_S
        self._still_s = self._still_s + LOOK_S if activity == self._activity else 0.0
        self._activity = activity
        if self._still_s >= self._limit_s:
            self.end()
            self._on_stalled(list(activity))
            return
        on_slow = self._on_slow
        if on_slow is not None and self._since_s >= SLOW_S and not self._still_s:
            self._on_slow = None
            on_slow()
        self._timer = self._loop.call_later(LOOK_S, self._look)


def read_activity(root: int, others: Container[int]) -> Activity:
    """Return values that change when this process, one in its session or one below it runs.

    Their CPU time has a resolution of 10 ms. A main thread that wakes up for less time changes its counts of switches.

    Args:
        root: the process.
        others: processes that are omitted, with what is below them.
    """
    stats = {pid: stat for pid in processes.list_pids() if pid not in others and (stat := processes.read_stat(pid))}
    tree = {root} & stats.keys()
    found = tree
    while found:
        found = {pid for pid, stat in stats.items() if _is_below(stat, root, tree)} - tree
        tree |= found
    return {pid: (*stats[pid][11:13], *_read_switches(pid)) for pid in sorted(tree) if stats[pid][0] not in "ZX"}


def _is_below(stat: list[str], root: int, tree: set[int]) -> bool:
    return int(stat[_PARENT]) in tree or int(stat[_SESSION]) == root


def _read_switches(pid: int) -> list[str]:
    """Count the main thread's switches, voluntary and not; empty if it has ended or the kernel counts none."""
    return [value for name, value in processes.read_status(pid).items() if "ctxt_switches" in name]
