"""One agent under its guard, as the process that started it sees it.

`muster.agent.driven` is the other side.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import spawn
from pathlib import Path
from typing import Any, Protocol

import muster
from muster._shared import processes
from muster._shared.contract import AGENT_ENTRY_NAME, DRIVEN_FLAG, Env
from muster._shared.folders import remove_folder
from muster.agent.errors import EnvironmentFault

FOLDER_MARK = "{{muster.folder}}"
"""Stands for the job's folder, as a word of the command line or a part of a variable's value."""

_CHUNK_BYTES = 65536
_MAX_SOCKET_PATH_BYTES = 90
"""A Unix socket's path has at most 107 bytes. The names below the folder take a few more."""

_STRIPPED = (Env.RDZV_FD, Env.RDZV_PORT, Env.WORKSPACE, Env.WORKSPACE_DIR)
"""What an adapter said to the node that this program runs on. A job started here is another one."""


@dataclass(frozen=True, kw_only=True)
class AgentStart:
    """What guard and agent are started with."""

    python: Sequence[str]
    """The interpreter, its flags, and the agent's entry."""
    flags: Sequence[str]
    """The agent's command line."""
    environ: Mapping[str, str]
    folder: str
    control: socket.socket
    """Guard's and agent's end."""
    caller_fd: int
    """A pidfd of this process."""
    stdout_fd: int | None
    stderr_fd: int | None
    agent_fd: int
    """This process's end of `control`."""


ForkTree = Callable[[AgentStart, Sequence[int]], None]
"""Forks guard, agent and image (see `elastic.fork.tree`). It gets descriptors that no worker may keep. Raises OSError.
"""


class WaitingAgent(Protocol):
    """Guard and agent that wait for a job, see `held.HeldNode`."""

    def start(self, start: AgentStart, has_answered: Callable[[], bool]) -> bool:
        """Give them the job. False: it must start cold."""

    def close(self) -> None:
        """Kill what still runs of the job there. Idempotent."""


class AgentProcess:
    """A running agent. Close it: that kills what still runs.

    The guard is no child of this process. Where this process adopts orphans (it is process 1 of a container, or a
    subreaper), the guard still becomes its child, and `close` reaps it.
    """

    def __init__(
        self,
        flags: Sequence[str],
        *,
        environ: Mapping[str, str],
        stdout_fd: int | None = None,
        stderr_fd: int | None = None,
        fork_tree: ForkTree | None = None,
        own_fds: Sequence[int] = (),
        held: "WaitingAgent | None" = None,
    ) -> None:
        """Start it, and return as soon as it is on its way.

        Args:
            flags: the agent's command line.
            environ: its environment, and that of its workers.
            stdout_fd: its standard output. None: this process's.
            stderr_fd: its standard error. None: this process's.
            fork_tree: forks it from this process, and later its workers. None: it is started afresh.
            own_fds: descriptors that such workers must not keep.
            held: where it waits already. `close` closes it. None: it is started.

        Raises:
            EnvironmentFault: it cannot be started.
        """
        if not hasattr(os, "pidfd_open"):
            raise EnvironmentFault(f"muster.elastic needs Linux, this is {sys.platform}")
        self.folder = _make_folder()
        """Private to this user. The guard removes it when this process is killed."""
        self._guard_fd = self._agent_fd = -1
        self._held = held
        self._lock = threading.Lock()
        """Any thread may signal. While one does, no descriptor may be closed, because its number could be used again.
        """
        self._rest = b""
        self._control, theirs = socket.socketpair()
        try:
            with theirs:
                self._start(flags, environ, theirs, (stdout_fd, stderr_fd), fork_tree, own_fds)
        except BaseException:  # KeyboardInterrupt too: leave nothing behind
            self.close()
            raise

    def _start(
        self,
        flags: Sequence[str],
        environ: Mapping[str, str],
        theirs: socket.socket,
        streams: tuple[int | None, int | None],
        fork_tree: ForkTree | None,
        own_fds: Sequence[int],
    ) -> None:
        try:
            caller_fd = os.pidfd_open(os.getpid())
        except OSError as error:
            raise EnvironmentFault(f"muster.elastic needs Linux 5.3 or newer: pidfd_open: {error.strerror}") from error
        entry = Path(muster.__file__).parent / AGENT_ENTRY_NAME
        interpreter = [os.fsdecode(spawn.get_executable()), *subprocess._args_from_interpreter_flags()]  # type: ignore[attr-defined]  # noqa: SLF001  # as multiprocessing does
        interpreter.append(str(entry))
        flags = [self.folder if flag == FOLDER_MARK else flag for flag in flags]
        environ = {k: v.replace(FOLDER_MARK, self.folder) for k, v in environ.items() if k not in _STRIPPED}
        start = AgentStart(
            python=interpreter,
            flags=flags,
            environ=environ,
            folder=self.folder,
            control=theirs,
            caller_fd=caller_fd,
            stdout_fd=streams[0],
            stderr_fd=streams[1],
            agent_fd=self._control.fileno(),
        )
        try:
            if self._held is not None and self._held.start(start, self._has_guard):
                return
            if fork_tree is None:
                _spawn(start)
            else:
                fork_tree(start, (self._control.fileno(), *own_fds))
        except OSError as error:
            raise EnvironmentFault(f"cannot start the agent: {interpreter[0]}: {error.strerror}") from error
        finally:
            os.close(caller_fd)
        theirs.close()
        self._wait_for_guard()

    def _wait_for_guard(self) -> None:
        """Wait for the guard's first message, which it sends before anything else."""
        while self._guard_fd < 0:
            processes.wait_readable(self._control.fileno(), None)
            if self.receive() is None:
                raise EnvironmentFault("the agent could not be started: its process ended at once")

    def _has_guard(self) -> bool:
        return self.receive() is not None and self._guard_fd >= 0

    @property
    def control_fd(self) -> int:
        """Readable when `receive` has something, or the other side is gone."""
        return self._control.fileno()

    @property
    def agent_fd(self) -> int:
        """A pidfd of the agent. It is -1 before it has come."""
        return self._agent_fd

    def receive(self) -> list[dict[str, Any]] | None:
        """Return the messages that have come, without waiting.

        None: the other side is gone and every message was returned.
        """
        try:
            data, fds, _flags, _address = socket.recv_fds(self._control, _CHUNK_BYTES, 4, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []
        except ConnectionError:
            return None
        if not data:
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        messages = [message for line in lines if (message := _decode(line)) is not None]
        self._keep_identities(messages, fds)
        return messages

    def _keep_identities(self, messages: list[dict[str, Any]], fds: list[int]) -> None:
        for message in messages:
            if "guard" in message and fds:
                self._guard_fd = fds.pop(0)
            elif "agent" in message and fds:
                self._agent_fd = fds.pop(0)

    def send(self, data: bytes) -> None:
        """Send to the agent. Do nothing if it is gone. Any thread may call it."""
        with contextlib.suppress(OSError):
            self._control.sendall(data)

    def send_signal(self, signum: int) -> None:
        """Signal the guard, which passes it on to the agent. Nothing happens once it has ended."""
        with self._lock:
            _send(self._guard_fd, signum)

    def kill(self) -> None:
        """Kill the agent. The guard then kills every process of the job, and ends."""
        with self._lock:
            _send(self._agent_fd if self._agent_fd >= 0 else self._guard_fd, signal.SIGKILL)

    def close(self) -> None:
        """Kill what still runs and release everything. Idempotent."""
        self.kill()
        self._control.close()
        if self._held is not None:
            self._held.close()
        with self._lock:
            if self._guard_fd >= 0:
                with contextlib.suppress(ChildProcessError):  # our child only where we adopt orphans
                    os.waitid(os.P_PIDFD, self._guard_fd, os.WEXITED | os.WNOHANG)
            for fd in (self._guard_fd, self._agent_fd):
                if fd >= 0:
                    os.close(fd)
            self._guard_fd = self._agent_fd = -1
        remove_folder(self.folder, ignores_errors=True)


def _spawn(start: AgentStart) -> None:
    fds = (start.control.fileno(), start.caller_fd)
    # debugpy finds new Pythons by their first word.
    disguise = ["env"] if "pydevd" in sys.modules else []
    starter = subprocess.Popen(
        [*disguise, *start.python, DRIVEN_FLAG, *map(str, fds), start.folder, *start.flags],
        env=start.environ,
        stdin=subprocess.DEVNULL,
        stdout=start.stdout_fd,
        stderr=start.stderr_fd,
        pass_fds=fds,
    )
    starter.wait()  # or another thread takes its status


def _send(pidfd: int, signum: int) -> None:
    if pidfd >= 0:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signum)


def _make_folder() -> str:
    folder = tempfile.mkdtemp(prefix="muster_job_")
    if len(os.fsencode(folder)) <= _MAX_SOCKET_PATH_BYTES:
        return folder
    os.rmdir(folder)
    return tempfile.mkdtemp(prefix="muster_job_", dir="/tmp")  # mkdtemp makes it private


def _decode(line: bytes) -> dict[str, Any] | None:
    """Decode a record. Return None for an empty line, and for a record that was cut off."""
    try:
        message = json.loads(line)
    except ValueError:
        return None
    return message if isinstance(message, dict) else None
