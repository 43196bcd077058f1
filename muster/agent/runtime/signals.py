"""Signals and children's ends, as calls on the loop.

Handlers do nothing; the wake-up descriptor wakes the loop, which does all the work, in one thread, between two
decisions. One reaper serves workers, the warm template and adopted orphans: the agent is a child subreaper.
"""

import os
import signal
from collections.abc import Callable, Sequence

from muster.agent.runtime.loop import Loop


class SignalWatch:
    """Owns the process's handlers while open; one per process, in the main thread."""

    def __init__(
        self,
        loop: Loop,
        *,
        handled: Sequence[str],
        on_signal: Callable[[int], None],
        on_child: Callable[[int, int], None],
        on_stacks: Callable[[], None],
    ) -> None:
        """Install handlers.

        Args:
            loop: where callbacks run.
            handled: names of the signals that end this node (--signals-to-handle). One that was ignored when the agent
                started (nohup) stays ignored.
            on_signal: called with the number of each that arrived.
            on_child: called with (pid, status as of os.waitstatus_to_exitcode) for every child that ended.
            on_stacks: called for SIGUSR2.
        """
        self._loop = loop
        self._on_signal = on_signal
        self._on_child = on_child
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
        loop.call_soon(self.reap)  # a child may have ended before the handler was set

    def _handle_wakeup(self) -> None:
        received = set(os.read(self._read, 4096))
        # Children first: a worker's own end, seen together with a signal, happened before it.
        if signal.SIGCHLD in received:
            self.reap()
        if signal.SIGUSR2 in received:
            self._on_stacks()
        for number in sorted(received & self._numbers):
            self._on_signal(number)

    def reap(self) -> None:
        """Collect every child that has ended and report it."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self._on_child(pid, os.waitstatus_to_exitcode(status))

    def close(self) -> None:
        """Stop watching. Handlers stay as no-ops: the process is about to end, and a late signal must not kill it."""
        signal.set_wakeup_fd(-1)
        self._loop.unwatch(self._read)
        os.close(self._read)
        os.close(self._write)


def _do_nothing(_signum: int, _frame: object) -> None:
    """The wake-up descriptor carries the number."""
