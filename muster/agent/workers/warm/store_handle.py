"""One round's store as the agent of global rank 0 holds it: the listening socket, and the process that serves it.

The socket is open before any worker of the round runs, so a client that connects before the process serves waits in the
backlog. If it were refused, torch's client would only try again a quarter to a whole second later.
"""

import os
import signal
import socket
from collections.abc import Callable
from contextlib import suppress

from muster._shared import processes
from muster._shared.contract import describe_end
from muster.agent.errors import SpawnError
from muster.agent.runtime.loop import Loop
from muster.agent.runtime.ports import bind_address
from muster.agent.runtime.signals import ChildWatch
from muster.agent.workers import program, stall_watch
from muster.agent.workers.cold import spawn
from muster.agent.workers.warm.store import DROP, HOST
from muster.agent.workers.warm.template_handle import TemplateOptions

_BACKLOG = 4096
"""All workers of the job may connect at once. The kernel has its own limit, which is usually this."""


class StoreHandle:
    """One round's store. Close it when no worker of the round is left on any node."""

    def __init__(
        self,
        loop: Loop,
        children: ChildWatch,
        *,
        addr: str,
        port: int,
        on_stalled: Callable[[], None],
        on_lost: Callable[[str], None],
    ) -> None:
        """Listen. A process follows with `hand_over` or `start_cold`.

        Args:
            loop: the agent's.
            children: reports the end of the process.
            addr: MASTER_ADDR. The socket listens only there, if it can.
            port: MASTER_PORT.
            on_stalled: called when a forked process stood still before it served, and was killed. Then `waits` is True.
            on_lost: called once with a reason when the process has ended before `close`.

        Raises:
            OSError: the port is not free.
        """
        self._loop = loop
        self._children = children
        self._on_stalled = on_stalled
        self._on_lost = on_lost
        self._watch: stall_watch.StallWatch | None = None
        self.pid = 0
        """The process id; 0 if there is none yet."""
        self._control: socket.socket | None = None
        self._serves = False
        self._closed = False
        self._listener = bind_address(addr, port)
        try:
            self._listener.listen(_BACKLOG)
        except OSError:
            self._listener.close()
            raise

    @property
    def waits(self) -> bool:
        """Whether no process serves the store yet."""
        return not self.pid and not self._closed

    def hand_over(self, control: socket.socket, pid: int) -> bool:
        """Make a parked worker the store's process; return False and close `control` if the worker has ended.

        Raises:
            OSError: the socket cannot be sent.
        """
        try:
            socket.send_fds(control, [HOST], [self._listener.fileno()])
        except OSError as error:
            control.close()
            if isinstance(error, ConnectionError):
                return False
            raise
        self.pid, self._control = pid, control
        control.setblocking(False)
        self._loop.watch_readable(control.fileno(), self._receive)
        self._children.watch(pid, lambda status: self._handle_end(pid, status))
        self._expect_answer(stall_watch.ANSWER_LIMIT_S, self._kill_stalled)
        return True

    def start_cold(self, options: TemplateOptions) -> None:
        """Start a process that imports torch by itself, because the workers of this round need the store.

        Args:
            options: those of the template that no longer exists.

        Raises:
            OSError: there are no descriptors left, or the socket cannot be sent.
            SpawnError: the process cannot be started, or has ended at once.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                pid = spawn(options.build_spec(program.STORE, str(theirs.fileno())), keep_fds=[theirs.fileno()])
            except BaseException:
                ours.close()
                raise
        if not self.hand_over(ours, pid):
            raise SpawnError("the store's process has ended at once")
        limit_s = stall_watch.IMPORT_LIMIT_S
        self._expect_answer(limit_s, lambda _pids: self.fail(f"its process stood still for {limit_s:.0f} s"))

    def _expect_answer(self, limit_s: float, on_stalled: Callable[[list[int]], None]) -> None:
        self._expect_no_answer()
        self._watch = stall_watch.StallWatch(self._loop, self.pid, limit_s, on_stalled)

    def _expect_no_answer(self) -> None:
        if self._watch is not None:
            self._watch.end()

    def _kill_stalled(self, pids: list[int]) -> None:
        """Kill a process that stands still. Connected clients wait in the backlog for the next process."""
        self._close_control()
        self.pid = 0
        processes.send_signal(pids, signal.SIGKILL)
        self._on_stalled()

    def _receive(self) -> None:
        """Receive that the process serves, or that it has ended."""
        control = self._control
        if control is None:
            return
        try:
            received = control.recv(1)
        except BlockingIOError:
            return
        except ConnectionError:
            received = b""
        if received:
            self._serves = True
            self._expect_no_answer()
        else:
            self._close_control()  # `ChildWatch` reports how it ended

    def _handle_end(self, pid: int, status: int) -> None:
        """Handle the end of a store that ended by itself because it found no torch, so that no worker can need it."""
        if not self._closed and pid == self.pid:
            self.close()
            if status:
                self._on_lost(f"lost its store: the store's process {describe_end(status)}")

    def fail(self, reason: str) -> None:
        """Fail because no process can be started for the store."""
        if not self._closed:
            self.close()
            self._on_lost(f"has no store: {reason}")

    def _close_control(self) -> None:
        if self._control is not None:
            self._loop.unwatch(self._control.fileno())
            self._control.close()
            self._control = None

    def end_round(self) -> tuple[socket.socket, int] | None:
        """Close, but keep a process that serves: another one would be a fork of all that the template has imported.

        Returns:
            what the next round's `hand_over` takes. None: there is no such process.
        """
        kept = None
        if self._control is not None and self._serves:
            with suppress(OSError):
                self._control.send(DROP)
                kept, self.pid = (self._control.dup(), self.pid), 0
        self.close()
        return kept

    def close(self) -> None:
        """Stop listening at once, and kill the process. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._expect_no_answer()
        self._close_control()
        with suppress(OSError):
            # Otherwise the process's copy would block the port.
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        if self.pid:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
