"""The thread that reads the workers' pipes.

Not on the agent's own loop, because a write to a log file on a network file system can hang for any time: then workers
wait for their pipes, as they would for their files, but the agent's heartbeats and fencing lease do not.
"""

import os
import threading
from collections import deque
from collections.abc import Callable

from muster.agent.errors import InternalError
from muster.agent.runtime.loop import Loop

Command = Callable[[], None]


class PumpThread:
    """A loop in its own thread; other threads submit commands."""

    def __init__(self, agent_loop: Loop) -> None:
        self.loop = Loop(agent_loop.clock)
        """Belongs to the thread: only commands may use it."""
        self._agent_loop = agent_loop
        self._inbox: deque[Command] = deque()
        self._outbox: deque[Command] = deque()
        self._inbox_fds = _open_wakeup_pipe()
        self._outbox_fds = _open_wakeup_pipe()
        self._stopping = False
        self._pending: threading.Event | None = None
        self.loop.watch_readable(self._inbox_fds[0], lambda: _run_commands(self._inbox_fds[0], self._inbox))
        agent_loop.watch_readable(self._outbox_fds[0], lambda: _run_commands(self._outbox_fds[0], self._outbox))
        self._thread = threading.Thread(target=self._run, name="muster-logs", daemon=True)
        self._thread.start()

    def submit(self, command: Command) -> None:
        """Run it in the thread, soon, in order. Call from the agent's thread."""
        self._inbox.append(command)
        _wake(self._inbox_fds[1])

    def reply(self, command: Command) -> None:
        """Run it on the agent's loop, soon, in order. Call from the pump thread."""
        self._outbox.append(command)
        _wake(self._outbox_fds[1])

    def run(self, command: Command, limit_s: float) -> bool:
        """Run it in the thread and wait for it; False when it took longer than `limit_s` (it may still run later).

        While an earlier one has not finished, the thread hangs in a write: then returns False at once.
        """
        if self._pending is not None and not self._pending.is_set():
            return False
        done = self._pending = threading.Event()

        def run_and_set() -> None:
            command()
            done.set()

        self.submit(run_and_set)
        return done.wait(limit_s)

    def close(self, limit_s: float) -> bool:
        """Stop after the commands submitted so far. False when the thread hangs in a write; then it is abandoned."""
        self.submit(self._stop)
        self._thread.join(limit_s)
        self._agent_loop.unwatch(self._outbox_fds[0])
        if self._thread.is_alive():
            return False
        self.loop.close()
        for fd in (*self._inbox_fds, *self._outbox_fds):
            os.close(fd)
        return True

    def _stop(self) -> None:
        self._stopping = True

    def _run(self) -> None:
        try:
            while not self._stopping:
                self.loop.turn()
        finally:
            if not self._stopping:
                self.reply(_raise_broken)


def _raise_broken() -> None:
    # Nothing reads the workers' pipes any more: a failed job is better than one that hangs.
    raise InternalError("the log thread has failed, see the error above")


def _open_wakeup_pipe() -> tuple[int, int]:
    read_fd, write_fd = os.pipe()
    os.set_blocking(read_fd, False)
    os.set_blocking(write_fd, False)
    return read_fd, write_fd


def _wake(fd: int) -> None:
    try:
        os.write(fd, b"!")
    except BlockingIOError:
        return  # it has been woken already


def _run_commands(fd: int, commands: "deque[Command]") -> None:
    try:
        os.read(fd, 4096)
    except BlockingIOError:
        return
    while commands:
        commands.popleft()()
