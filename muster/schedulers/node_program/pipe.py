"""What an adapter opens for `muster exec`: the standard input and output of a Python on a node."""

import contextlib
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from muster._shared.control import CommandExit, ControlError
from muster._shared.processes import LINUX, READ, WRITE, wait_events, wait_readable

_END_LIMIT_S: Final = 10.0
"""The node ends what is left of a command before it lets go."""
_CHUNK_BYTES: Final = 1 << 16
_LIMIT_BYTES: Final = 1 << 20
_ERRORS_BYTES: Final = 4000


@dataclass(frozen=True, kw_only=True)
class NodePipe:
    """A Python that runs on a node. `end` must be called."""

    stdin: int
    """Descriptor: what is written there the Python reads."""
    stdout: int
    """Descriptor: what it writes."""
    end: Callable[[], str]
    """Close both, and end what runs here for them. Returns why the Python has ended, in one line. "": not known."""
    root: int = 0
    """The node's agent is this process there, or below it. 0: it is known by its variables and flags alone."""


def start_pipe(
    command: Sequence[str],
    env: Mapping[str, str],
    *,
    explain: Callable[[bytes, int | None], str] | None = None,
    limit_s: float = _END_LIMIT_S,
    root: int = 0,
) -> NodePipe:
    """Start a program of this machine that is the node's Python, or that runs it there (`ssh`, `srun`).

    Args:
        command: the program and its arguments. Ctrl-C of the terminal is not for it.
        env: its variables.
        explain: says why it has ended, from its standard error and its exit code (None: it was killed). None: the last
            line of its standard error is the reason.
        limit_s: how long it may take to end.
        root: see `NodePipe`.

    Raises:
        ControlError: it cannot be started.
    """
    try:
        process = PipedProcess.start(command, env=env, cwd="/")
    except OSError as error:
        raise ControlError(f"cannot run {command[0]}: {error.strerror}", CommandExit.LOST) from error
    return process.open_pipe(explain or (lambda errors, _: find_last_line(errors)), limit_s=limit_s, root=root)


class PipedProcess:
    """A process with its standard input, output and error here. It can be lent to another process.

    Args:
        fds: its standard input, output and error. The user of them closes them.
        process: None: it is no child of this process.
        pidfd: None: the system has none.
    """

    def __init__(
        self, fds: Sequence[int], process: "subprocess.Popen[bytes] | None" = None, pidfd: int | None = None
    ) -> None:
        self.fds = tuple(fds)
        self.stdin, self.stdout, self.stderr = fds
        self._process, self._pidfd = process, pidfd

    @staticmethod
    def start(
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        prepare: Callable[[], None] | None = None,
    ) -> "PipedProcess":
        """Start one in a session of its own, or in what `prepare` makes between fork and exec.

        Ctrl-C is then not for it, but for the command that ends it.

        Raises:
            OSError: no process or descriptor is left, or there is no such program. Nothing was started.
        """
        with contextlib.ExitStack() as inside, contextlib.ExitStack() as outside:
            pipes = []
            for ends in ((inside, outside), (outside, inside), (outside, inside)):
                pipes.append(os.pipe())
                for fd, end in zip(pipes[-1], ends, strict=True):
                    end.callback(os.close, fd)
            process = subprocess.Popen(
                command,
                stdin=pipes[0][0],
                stdout=pipes[1][1],
                stderr=pipes[2][1],
                env=env,
                cwd=cwd,
                preexec_fn=prepare,  # noqa: PLW1509  # it only makes system calls
                start_new_session=prepare is None,
            )
            outside.callback(process.kill)
            pidfd = os.pidfd_open(process.pid) if LINUX else None
            outside.pop_all()
        return PipedProcess((pipes[0][1], pipes[1][0], pipes[2][0]), process, pidfd)

    def lend(self) -> tuple[int, ...]:
        """Return the descriptors for `adopt` of another process. Then `forget` or `end` it."""
        return self.fds if self._pidfd is None else (*self.fds, self._pidfd)

    @staticmethod
    def adopt(fds: Sequence[int]) -> "PipedProcess":
        """Take one that was lent."""
        return PipedProcess(fds[:3], pidfd=fds[3] if len(fds) > 3 else None)

    def forget(self) -> None:
        """Close the pipes and forget the process: another one has it now."""
        for fd in self.lend():
            os.close(fd)
        if self._process is not None:  # whose child it stays
            threading.Thread(target=self._process.wait, daemon=True).start()

    def end(self, limit_s: float) -> int | None:
        """Wait for its end, and kill it after `limit_s`. Return its exit code. None: it was killed, or is no child."""
        code = None
        if self._process is not None:
            try:
                code = self._process.wait(limit_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        elif self._pidfd is not None and not wait_readable(self._pidfd, limit_s):
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        if self._pidfd is not None:
            os.close(self._pidfd)
        return code

    def open_pipe(
        self, explain: Callable[[bytes, int | None], str], *, limit_s: float = _END_LIMIT_S, root: int = 0
    ) -> NodePipe:
        """Let a thread read its standard error, and return its other pipes.

        Args:
            explain: see `start_pipe`.
            limit_s: how long it may take to end.
            root: see `NodePipe`.

        Raises:
            OSError: no thread is left. Nothing runs any more.
        """
        errors = bytearray()
        reader = threading.Thread(target=_keep_end, args=(self.stderr, errors), name="muster-errors", daemon=True)
        try:
            reader.start()
        except RuntimeError as error:
            self.end(0.0)
            for fd in self.fds:
                os.close(fd)
            raise OSError(str(error)) from error

        def end() -> str:
            os.close(self.stdin)
            code = self.end(limit_s)
            os.close(self.stdout)
            reader.join(1.0)
            return explain(bytes(errors), code)

        return NodePipe(stdin=self.stdin, stdout=self.stdout, end=end, root=root)


def _keep_end(fd: int, errors: bytearray) -> None:
    with open(fd, "rb", buffering=0) as stream:
        while data := stream.read(_CHUNK_BYTES):
            errors += data
            del errors[:-_ERRORS_BYTES]


def find_last_line(text: bytes) -> str:
    """Return the last line that is not blank."""
    lines = [line.strip() for line in text.decode(errors="replace").splitlines()]
    return ([line for line in lines if line] or [""])[-1]


def pump_pipe(
    connection: Any,
    *,
    receive: Callable[[], bytes | None],
    send: Callable[[bytes], None],
    close: Callable[[], None],
    explain: Callable[[], str],
    first: bytes = b"",
) -> NodePipe:
    """Make a pipe of a connection with messages of its own: a thread passes bytes between the two.

    One thread, because a TLS connection must not be read and written at the same time.

    Args:
        connection: a socket.
        receive: reads the next message. None: there is no more. An error ends the connection, too.
        send: writes one.
        close: closes the connection.
        explain: says why it has ended, in one line.
        first: what the Python has written already, and `receive` does not read.
    """
    failures: list[str] = []
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    stdin = ours.detach()
    stdout = os.dup(stdin)

    def move() -> None:
        waiting = bytearray(first)
        while True:
            has_more = getattr(connection, "pending", int)() > 0 and len(waiting) < _LIMIT_BYTES
            wanted = {theirs.fileno(): READ | WRITE if waiting else READ}
            if len(waiting) < _LIMIT_BYTES:
                wanted[connection.fileno()] = READ
            ready = wait_events(wanted, 0 if has_more else None)
            if has_more or connection.fileno() in ready:
                data = receive()
                if data is None:
                    theirs.setblocking(True)
                    theirs.sendall(waiting)
                    return
                waiting += data
            events = ready.get(theirs.fileno(), 0)
            if waiting and events & ~READ:
                del waiting[: theirs.send(waiting)]
            if events & ~WRITE:
                data = theirs.recv(_CHUNK_BYTES)
                if not data:
                    return
                send(data)

    def run() -> None:
        try:
            move()
        except Exception as error:  # noqa: BLE001  # the client libraries' own; the connection has ended
            failures.append(f"{type(error).__name__}: {error}")
        finally:
            with contextlib.suppress(Exception):
                close()
            theirs.close()

    thread = threading.Thread(target=run, name="muster-pipe", daemon=True)
    thread.start()

    def end() -> str:
        with socket.socket(fileno=stdin) as left, contextlib.suppress(OSError):
            left.shutdown(socket.SHUT_RDWR)
        os.close(stdout)
        thread.join(_END_LIMIT_S)
        return explain() or ", ".join(failures)

    return NodePipe(stdin=stdin, stdout=stdout, end=end)
