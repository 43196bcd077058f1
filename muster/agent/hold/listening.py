"""The loop of a holder: its socket in a folder, connections of this user's processes, signals, and its state.

Each connection sends messages of JSON, with descriptors beside them; an empty one is its end. Here is what they say.
"""

import contextlib
import json
import os
import selectors
import socket
from collections.abc import Callable, Collection, Mapping
from typing import Final, TypedDict

from muster._shared import holder_socket, processes
from muster._shared.contract import HOLD_STATE_NAME

MESSAGE_BYTES: Final = 65536
_MOST_FDS: Final = 8


class Order(TypedDict, total=False):
    """A run."""

    command: list[str]
    """What starts an agent, without flags."""
    args: list[str]
    """Its flags and the program."""
    env: dict[str, str]
    cwd: str
    umask: int
    limits: dict[str, tuple[int, int]]
    nice: int
    cpus: list[int]
    facts: dict[str, str]
    """See `facts.read_facts`; not of another machine's run."""
    python_flags: list[str]
    """Of a job of `muster.elastic` only, as `driven`: the job's folder."""
    driven: str


class Message(TypedDict, total=False):
    """One of these. `claim` names a run whose order follows, `member` is another node's holder."""

    run: str
    claim: str
    signal: int
    member: bool


class Listener:
    """Calls back with what happens, one thing at a time. For one use."""

    def __init__(self, folder: str, on_message: Callable[[socket.socket, Message, list[int]], None]) -> None:
        """Listen.

        Args:
            folder: of this user alone.
            on_message: gets a connection, its message, and descriptors, which it closes.

        Raises:
            OSError: the socket cannot be made.
        """
        self._folder = folder
        self._on_message = on_message
        self._selector = selectors.DefaultSelector()
        self._socket = holder_socket.listen(folder)
        self.watch(self._socket, self._accept)

    def watch(self, one: int | socket.socket, call: Callable[[], object]) -> None:
        """Call back when it is readable."""
        self._selector.register(one, selectors.EVENT_READ, call)

    def unwatch(self, one: int | socket.socket) -> None:
        """Call back for it no more. Idempotent; it may be closed already."""
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(one)

    def watch_signals(self, signums: Collection[int], call: Callable[[bytes], object]) -> None:
        """Call back with the numbers of the signals that have come."""
        wake = processes.open_wake_pipe(signums)
        self.watch(wake, lambda: call(processes.read_wake_pipe(wake)))

    def wait(self, limit_s: float | None) -> None:
        """Wait until something happens, and call back."""
        for key, _ in self._selector.select(limit_s):
            if self._selector.get_map().get(key.fd) is key:  # perhaps closed by an earlier one
                key.data()

    def _accept(self) -> None:
        try:
            made, _ = self._socket.accept()
        except OSError:  # gone, or no descriptors left
            return
        if holder_socket.read_peer(made) != os.geteuid():
            made.close()
            return
        self.watch(made, lambda: self._hear(made))

    def _hear(self, connection: socket.socket) -> None:
        message: Message = {}
        fds: list[int] = []
        with contextlib.suppress(OSError, ValueError):
            data, fds, _flags, _address = socket.recv_fds(connection, MESSAGE_BYTES, _MOST_FDS)
            message = json.loads(data) if data else {}
        self._on_message(connection, message, fds)

    def write_state(self, content: Mapping[str, object]) -> None:
        """Write the state for people and schedulers; a full disk loses it."""
        path = os.path.join(self._folder, HOLD_STATE_NAME)
        with contextlib.suppress(OSError):
            with open(f"{path}.new", "w", encoding="utf-8") as file:
                json.dump(content, file)
            os.replace(f"{path}.new", path)


def send(connection: socket.socket | None, message: Mapping[str, object]) -> None:
    """Send to a client; it may have ended."""
    if connection is not None:
        with contextlib.suppress(OSError):
            connection.send(json.dumps(message).encode())


def close_all(fds: Collection[int]) -> None:
    """Close descriptors."""
    for fd in fds:
        os.close(fd)
