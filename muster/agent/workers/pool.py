"""The live workers of one node: starts them, signals them, and kills their whole process tree."""

import os
import signal
from collections.abc import Callable, Container

from muster._shared import processes
from muster._shared.records import record
from muster.agent.errors import SpawnError
from muster.agent.runtime.loop import Loop, Timer
from muster.agent.runtime.signals import ChildWatch, find_session
from muster.agent.workers.spec import WorkerSpec, WorkerStarter

_FIRST_PAUSE_S = 0.02
_LONGEST_PAUSE_S = 0.64
"""The longest pause before a sweep lists all processes again.

A sweep lists them again once all that it killed have ended. The agent does not see the end of a live child's child. For
such processes it looks again after pauses, each twice as long as the one before.
"""


class _Sweep:
    """One sweep that is in progress."""

    def __init__(
        self, on_swept: Callable[[], None], on_not_ended: Callable[[tuple[int, ...]], None], end_s: float
    ) -> None:
        self.on_swept = on_swept
        self.on_not_ended = on_not_ended
        self.end_s = end_s
        """When the sweep gives up, by the loop's clock."""
        self.killed: set[int] = set()
        """Processes that the last look killed and that have not been collected yet."""
        self.is_looking = False
        self.collected: set[int] = set()
        """Processes collected since the current look began: their numbers may be other processes' by now."""
        self.pause_s = _FIRST_PAUSE_S
        self.timer: Timer | None = None


@record
class LiveWorker:
    """A started worker."""

    round_number: int
    """The round it was started for."""
    local_rank: int
    pid: int
    started_s: float


@record
class WorkerEnd:
    """How a worker ended."""

    worker: LiveWorker
    code: int
    """As from os.waitstatus_to_exitcode."""
    ended_s: float
    signalled_s: float | None = None
    """When the agent had sent the workers a signal before the end; None if it had not."""


class WorkerPool:
    """Starts, signals and sweeps the workers of one round at a time. Reports through the callbacks it is given."""

    def __init__(
        self,
        loop: Loop,
        children: ChildWatch,
        starter: WorkerStarter,
        *,
        on_started: Callable[[LiveWorker], None],
        on_spawn_failed: Callable[[int, int, SpawnError], None],
        on_ended: Callable[[WorkerEnd], None],
    ) -> None:
        """Keep the callbacks: for a started worker, for (round number, local rank, why), and for a worker's end."""
        self._loop = loop
        self._children = children
        children.on_orphan_end = self._forget_killed
        self._starter = starter
        self._on_started = on_started
        self._on_spawn_failed = on_spawn_failed
        self._on_ended = on_ended
        self._by_pid: dict[int, LiveWorker] = {}
        self._kept: set[int] = set()
        """Processes that wait for their next round."""
        self._signalled_s: float | None = None
        self._sweep: _Sweep | None = None

    @property
    def live(self) -> list[LiveWorker]:
        """Workers that have not been reaped."""
        return list(self._by_pid.values())

    def start(self, number: int, specs: list[WorkerSpec]) -> None:
        """Start one worker per spec for round `number`."""
        self._signalled_s = None
        self._starter.start(
            specs,
            lambda local_rank, pid: self._add_worker(number, local_rank, pid),
            lambda local_rank, error: self._on_spawn_failed(number, local_rank, error),
        )

    def keep(self, pid: int, on_end: Callable[[], None]) -> None:
        """Spare a process that waits for its next round, and all processes of its session; call back if it ends."""

        def forget(_code: int) -> None:
            self._kept.discard(pid)
            self._children.sessions.remove(pid)
            on_end()

        self._by_pid.pop(pid, None)
        self._kept.add(pid)
        self._children.sessions.add(pid)
        self._children.watch(pid, forget)

    def start_kept(self, number: int, local_rank: int, pid: int) -> None:
        """Count a kept process as a worker of round `number`."""
        self._signalled_s = None
        self._kept.discard(pid)
        self._children.sessions.remove(pid)
        self._add_worker(number, local_rank, pid)

    @property
    def has_kept(self) -> bool:
        """Whether a process waits for its next round."""
        return bool(self._kept)

    def end_kept(self) -> None:
        """Kill what was kept, with all processes of its sessions."""
        for pid in self._kept:
            self._children.sessions.remove(pid)
        sessions, self._kept = self._kept, set()
        if sessions:
            found = processes.list_descendants(os.getpid())
            processes.send_signal([pid for pid in found if find_session(pid) in sessions], signal.SIGKILL)

    def cancel_starts(self) -> None:
        """Cancel the starts of workers that do not exist yet."""
        self._starter.cancel()

    def _add_worker(self, number: int, local_rank: int, pid: int) -> None:
        worker = LiveWorker(round_number=number, local_rank=local_rank, pid=pid, started_s=self._loop.clock.now_s())
        self._by_pid[pid] = worker
        self._children.watch(pid, lambda code: self._record_end(worker, code))
        self._on_started(worker)

    def _record_end(self, worker: LiveWorker, code: int) -> None:
        del self._by_pid[worker.pid]
        ended_s = self._loop.clock.now_s()
        self._on_ended(WorkerEnd(worker=worker, code=code, ended_s=ended_s, signalled_s=self._signalled_s))
        self._forget_killed(worker.pid)

    def send(self, signum: int, local_ranks: Container[int] | None = None) -> None:
        """Signal the workers themselves, or these of them; 0 only records that they have to end their round.

        Continue a stopped worker (SIGSTOP), which could not handle the signal.
        """
        self._record_signal()
        pids = [pid for pid, each in self._by_pid.items() if local_ranks is None or each.local_rank in local_ranks]
        processes.send_signal(pids, signum)
        processes.send_signal(pids, signal.SIGCONT)

    def _record_signal(self) -> None:
        if self._signalled_s is None:
            self._signalled_s = self._loop.clock.now_s()

    def sweep(
        self, on_swept: Callable[[], None], on_not_ended: Callable[[tuple[int, ...]], None], *, limit_s: float
    ) -> None:
        """Send SIGKILL to all descendants except the starter's own and those of `--notify`, until none is left.

        Args:
            on_swept: called once none is left.
            on_not_ended: called instead, after `limit_s`, with the processes that have been killed but have not ended.
                The kernel keeps a process in uninterruptible sleep (a hung device or network file system).
            limit_s: seconds from now.
        """
        self._record_signal()
        if self._sweep is not None and self._sweep.timer is not None:
            self._sweep.timer.cancel()
        self._sweep = _Sweep(on_swept, on_not_ended, self._loop.clock.now_s() + limit_s)
        self._look(self._sweep)

    def _look(self, sweep: _Sweep) -> None:
        """List the processes to kill, in a thread: a machine may run many thousand processes, and all are read."""
        if sweep is not self._sweep or sweep.is_looking:
            return
        if sweep.timer is not None:
            sweep.timer.cancel()
        sweep.is_looking = True
        sweep.collected.clear()
        self._list_others(frozenset(self._kept), lambda found: self._kill(sweep, found))

    def _list_others(self, spare: frozenset[int], then: Callable[[list[int]], None]) -> None:
        """List all descendants but the starter's own, and what these processes have started."""
        me, own = os.getpid(), self._starter.list_own_pids()
        self._loop.call_in_thread(
            lambda: self._children.sessions.find_others(lambda: processes.list_descendants(me, keep=own, spare=spare)),
            then,
        )

    def kill_orphans(self) -> None:
        """Kill what workers have left that have ended: it may hold their connections, and others wait for the end."""
        live = frozenset(self._by_pid)

        def kill(found: list[int]) -> None:
            processes.send_signal([pid for pid in found if find_session(pid) not in live], signal.SIGKILL)

        self._list_others(live | self._kept, kill)

    def _kill(self, sweep: _Sweep, found: list[int]) -> None:
        """Kill what a look has found, and look again until a look finds nothing."""
        sweep.is_looking = False
        if sweep is not self._sweep:
            return
        sweep.killed = set(found) - sweep.collected
        processes.send_signal(sweep.killed, signal.SIGKILL)
        left_s = sweep.end_s - self._loop.clock.now_s()
        if not found and not self._by_pid:
            self._sweep = None
            sweep.on_swept()
        elif left_s <= 0.0:
            self._sweep = None
            sweep.on_not_ended(tuple(sorted({*found, *self._by_pid})))
        elif not sweep.killed and not self._by_pid:
            self._look(sweep)
        else:
            sweep.timer = self._loop.call_later(min(sweep.pause_s, left_s), lambda: self._look(sweep))
            sweep.pause_s = min(2 * sweep.pause_s, _LONGEST_PAUSE_S)

    def _forget_killed(self, pid: int) -> None:
        """Forget a child that has ended; if it was the last that a sweep waits for, look again."""
        sweep = self._sweep
        if sweep is not None:
            sweep.collected.add(pid)
            sweep.killed.discard(pid)
            if not sweep.killed and not self._by_pid:
                self._loop.call_soon(lambda: self._look(sweep))

    def close(self) -> None:
        """End what is kept, and the starter's own processes."""
        self.end_kept()
        self._starter.close()
