"""What an adapter opens for `muster exec`: the standard input and output of a Python on a node."""

import contextlib
import os
import socket
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from muster._shared.control import ControlError, ExitCode
from muster._shared.processes import READ, WRITE, wait_events

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
    root: int = 0,
) -> NodePipe:
    """Start a program of this machine that is the node's Python, or that runs it there (`ssh`, `srun`).

    Args:
        command: the program and its arguments. Ctrl-C of the terminal is not for it.
        env: its variables.
        explain: says why it has ended, from its standard error and its exit code (None: it was killed). None: the last
            line of its standard error is the reason.
        root: see `NodePipe`.

    Raises:
        ControlError: it cannot be started.
    """
    try:
        process = subprocess.Popen(
            command,
            env=dict(env),
            cwd="/",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
    except OSError as error:
        raise ControlError(f"cannot run {command[0]}: {error.strerror}", ExitCode.LOST) from error
    assert process.stdin is not None  # noqa: S101  # all three are pipes
    assert process.stdout is not None  # noqa: S101
    assert process.stderr is not None  # noqa: S101
    errors = bytearray()
    reader = threading.Thread(target=_keep_end, args=(process.stderr, errors), name="muster-errors", daemon=True)
    reader.start()

    def end() -> str:
        with contextlib.suppress(OSError):
            process.stdin.close()  # type: ignore[union-attr]  # see above
        try:
            code: int | None = process.wait(_END_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            code = None
        process.stdout.close()  # type: ignore[union-attr]  # see above
        reader.join(1.0)
        return explain(bytes(errors), code) if explain is not None else find_last_line(bytes(errors))

    return NodePipe(stdin=process.stdin.fileno(), stdout=process.stdout.fileno(), end=end, root=root)


def _keep_end(stream: Any, errors: bytearray) -> None:
    with stream:
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
    root: int = 0,
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
        root: see `NodePipe`.
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

    return NodePipe(stdin=stdin, stdout=stdout, end=end, root=root)
