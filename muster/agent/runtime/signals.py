"""Signals and children's ends, as calls on the loop.

Handlers do nothing. The wake-up descriptor wakes the loop, which does all the work, in one thread, between two
decisions. A watched child's end shows on its own descriptor (a pidfd). Without a pidfd (a kernel before 5.3, a Python
built for one, no descriptor left), SIGCHLD makes the agent ask for each child. The agent is a child subreaper: every
other child that ends is an orphan of the workers, and only needs to be collected.
"""

import os
import signal
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from muster.agent.runtime.loop import Loop

if TYPE_CHECKING:
    import subprocess

_START_LIMIT_S = 1.0
"""How long a sweep waits for the start of a command, whose disk may hang."""
_LOST_STATUS = 1
"""The exit code of a child whose status another thread took (`os.wait` in a plug-in): never a success."""


class OwnSessions:
    """Sessions that a sweep of workers spares: of the agent's own commands, and of workers that wait for a round.

    Any thread may use it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ids: set[int] = set()

    def start(self, start: "Callable[[], subprocess.Popen[bytes]]") -> "subprocess.Popen[bytes]":
        """Start a command that leads a session.

        Raises:
            OSError: the command cannot be started.
        """
        with self._lock:  # unlisted until its session is known
            process = start()
            self._ids.add(process.pid)
        return process

    def add(self, pid: int) -> None:
        """Spare the session of a worker that waits for the next round."""
        with self._lock:
            self._ids.add(pid)

    def remove(self, pid: int) -> None:
        """Forget the session of a command that has ended, or of a worker that waits no more."""
        self._ids.discard(pid)

    def find_others(self, find: Callable[[], list[int]]) -> list[int]:
        """Return those processes that `find` lists and that belong to none of these sessions."""
        has_lock = self._lock.acquire(timeout=_START_LIMIT_S)
        try:
            found, ids = find(), tuple(self._ids)
        finally:
            if has_lock:
                self._lock.release()
        return [pid for pid in found if find_session(pid) not in ids] if ids else found


def find_session(pid: int) -> int | None:
    """Return the session of a process; None if it is gone."""
    try:
        return os.getsid(pid)
    except OSError:
        return None


class ChildWatch:
    """Collects the ends of this process's children. Close it.

    Only `watch` and `reap` collect, both on the loop. Until the callback is called, a watched child's pid is its own
    and may be signalled.
    """

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._callbacks: dict[int, Callable[[int], None]] = {}
        self._pidfds: dict[int, int] = {}
        self._holders: set[object] = set()
        self.sessions = OwnSessions()
        self.on_orphan_end: Callable[[int], None] | None = None
        """Called with the pid of each unwatched child that ended."""

    def watch(self, pid: int, on_end: Callable[[int], None]) -> None:
        """Call back once on the loop when this child ends. A second call replaces the callback.

        Args:
            pid: a child of this process that has not been collected.
            on_end: gets the status as of os.waitstatus_to_exitcode.
        """
        is_new = pid not in self._callbacks
        self._callbacks[pid] = on_end
        if not is_new:
            return
        try:
            self._pidfds[pid] = fd = os.pidfd_open(pid)
        except (AttributeError, OSError):
            self._loop.call_soon(self.reap)  # SIGCHLD may be past
        else:
            self._loop.watch_readable(fd, lambda: self._handle_pidfd(pid))

    def hold_orphans(self, holds: bool, holder: object = None) -> None:
        """Collect no orphan while this is on: a child that is not watched yet may be an unreported worker.

        Such a child stays a zombie, so that its pid belongs to no other process and its status is still available.

        Args:
            holds: on or off.
            holder: for whom; None means the workers' starter. It is on while it is on for any holder.
        """
        was_holding = bool(self._holders)
        (self._holders.add if holds else self._holders.discard)(holder)
        if was_holding and not self._holders:
            self._loop.call_soon(self.reap)

    def reap(self) -> None:
        """Collect every child that has ended."""
        for pid in list(self._callbacks):
            self._collect(pid)
        if not self._holders:
            self._reap_orphans()

    def _reap_orphans(self) -> None:
        while True:
            try:
                # WNOWAIT, because a watched child may have just ended.
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if found is None:
                return
            if found.si_pid in self._callbacks:
                self._collect(found.si_pid)
                continue
            try:
                os.waitpid(found.si_pid, os.WNOHANG)
            except ChildProcessError:
                continue  # just collected by its thread
            if self.on_orphan_end is not None:
                self.on_orphan_end(found.si_pid)

    def _handle_pidfd(self, pid: int) -> None:
        if not self._collect(pid):
            # A debugger collects it first, then SIGCHLD comes.
            self._close_pidfd(pid)

    def _collect(self, pid: int) -> bool:
        """Collect this child if it has ended; return False if it has not."""
        if pid not in self._callbacks:
            return True
        try:
            ended, status = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            code = _LOST_STATUS
        else:
            if not ended:
                return False
            code = os.waitstatus_to_exitcode(status)
        self._close_pidfd(pid)
        self._callbacks.pop(pid)(code)
        return True

    def _close_pidfd(self, pid: int) -> None:
        fd = self._pidfds.pop(pid, None)
        if fd is not None:
            self._loop.unwatch(fd)
            os.close(fd)

    def close(self) -> None:
        """Stop watching; no callback follows. Idempotent."""
        self._callbacks.clear()
        for pid in list(self._pidfds):
            self._close_pidfd(pid)


class SignalWatch:
    """Owns the process's signal handlers while open. There is one per process, in the main thread."""

    def __init__(
        self,
        loop: Loop,
        children: ChildWatch,
        *,
        handled: Sequence[str],
        on_signal: Callable[[int], None],
        on_stacks: Callable[[], None],
    ) -> None:
        """Install handlers.

        Args:
            loop: where callbacks run.
            children: reaps at SIGCHLD.
            handled: names of the signals that end this node (--signals-to-handle). One that was ignored when the agent
                started (nohup) stays ignored.
            on_signal: called with the number of each signal that arrived.
            on_stacks: called for SIGUSR2.
        """
        self._loop = loop
        self._children = children
        self._on_signal = on_signal
        self._on_stacks = on_stacks
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        numbers = [signal.Signals[name] for name in handled]
        self._numbers = frozenset(n for n in numbers if signal.getsignal(n) is not signal.SIG_IGN)
        for number in (*self._numbers, signal.SIGCHLD, signal.SIGUSR2):
            signal.signal(number, _do_nothing)
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        loop.watch_readable(self._read, self._handle_wakeup)
        loop.call_soon(children.reap)  # ended before the handler was set

    def _handle_wakeup(self) -> None:
        received = set(os.read(self._read, 4096))
        # Children first: a worker that ended with a signal ended before it.
        if signal.SIGCHLD in received:
            self._children.reap()
        if signal.SIGUSR2 in received:
            self._on_stacks()
        for number in sorted(received & self._numbers):
            self._on_signal(number)

    def close(self) -> None:
        """Stop watching. Handlers stay as no-ops: the process is about to end, and a late signal must not kill it."""
        signal.set_wakeup_fd(-1)
        self._loop.unwatch(self._read)
        os.close(self._read)
        os.close(self._write)


def _do_nothing(_signum: int, _frame: object) -> None:
    """Do nothing, because the wake-up descriptor carries the number."""
