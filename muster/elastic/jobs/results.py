"""Serves a job's function workers on this node: it sends them the call, and keeps what they return.

The other side is `muster.elastic.jobs.function`. Every worker connects once. What it returns comes as a descriptor of
an unnamed file, so a large result passes neither through JSON nor through the agent, and leaves nothing behind. A
worker that has returned waits until all of this node have. So what one of them hosts lasts that long, as with torch.
"""

import contextlib
import json
import os
import pickle
import selectors
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from muster.elastic.jobs.errors import PickleFault, RemoteTraceback
from muster.elastic.jobs.process import ForkTree

SOCKET_NAME = "workers"
"""In the job's folder."""

_MESSAGE_BYTES = 4096
_MAX_FDS = 200
"""A message carries at most 253 descriptors."""


@dataclass(frozen=True, kw_only=True)
class Payload:
    """What every worker of a job gets. The server closes the descriptors, except the tracker's."""

    call_fd: int
    """A file: the pickled preparation of the interpreter, then the pickled call."""
    tracker_fd: int
    """The resource tracker's descriptor.

    With a tracker of its own, a worker would remove what it shares with this process.
    """
    fds: tuple[int, ...] = ()
    """Descriptors that the call refers to by index."""


@dataclass(frozen=True, kw_only=True)
class RoundPosition:
    """This node's place in a round, as its workers were told."""

    number: int
    node: int
    """Its group rank."""
    nodes: int
    world_size: int
    master_addr: str
    master_port: int


@dataclass(kw_only=True)
class _Slot:
    """One worker of the current round."""

    connection: socket.socket
    global_rank: int
    position: RoundPosition
    result_fd: int = -1
    error_fd: int = -1
    has_returned: bool = False
    """It has sent its result, or ended without one (`sys.exit`)."""


class WorkerServer:
    """Accepts this node's workers. `watch` and `close` are called by `Job`."""

    def __init__(self, payload: Payload, nproc: int, fork_tree: ForkTree | None = None) -> None:
        """Prepare the server. `watch` makes it listen.

        Args:
            payload: what each worker gets.
            nproc: workers of this node.
            fork_tree: forks the job from this process. Its workers need no payload.
        """
        self.fork_tree = fork_tree
        self._payload = payload
        self._nproc = nproc
        self._listener: socket.socket | None = None
        self._selector: selectors.BaseSelector | None = None
        self._connections: set[socket.socket] = set()
        self._round = 0
        self._slots: dict[int, _Slot] = {}
        self._result_fds: dict[int, int] = {}
        self.position: RoundPosition | None = None
        """The node's place in the last round whose workers have all returned. None: there was none."""

    def watch(self, selector: selectors.BaseSelector, folder: str) -> None:
        """Listen in the job's folder."""
        self._selector = selector
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(os.path.join(folder, SOCKET_NAME))
        self._listener.listen(128)
        selector.register(self._listener, selectors.EVENT_READ, self._accept)

    # -- one worker -------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        assert self._listener is not None  # noqa: S101  # it is watched
        assert self._selector is not None  # noqa: S101
        connection, _address = self._listener.accept()
        self._connections.add(connection)
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._receive(connection))

    def _receive(self, connection: socket.socket) -> None:
        try:
            data, fds, _flags, _address = socket.recv_fds(connection, _MESSAGE_BYTES, 1)
        except OSError:
            data, fds = b"", []
        if not data:
            self._drop(connection)
            return
        message = json.loads(data)
        if "round" in message:
            self._add(connection, message)
            return
        slot = self._find(connection)
        if slot is None:  # of a past round
            close_fds(fds)
        elif "failed" in message:
            slot.error_fd = fds[0]
        else:
            slot.result_fd, slot.has_returned = fds[0], True
            self._finish_round_if_complete()

    def _add(self, connection: socket.socket, hello: dict[str, Any]) -> None:
        if hello["round"] < self._round:
            self._drop(connection)
            return
        if hello["round"] > self._round:
            self._clear_slots()
            self._round = hello["round"]
        self._slots[hello["local_rank"]] = _Slot(
            connection=connection,
            global_rank=hello["global_rank"],
            position=RoundPosition(number=hello["round"], **hello["place"]),
        )
        fds = [] if self.fork_tree else [self._payload.call_fd, self._payload.tracker_fd, *self._payload.fds]
        with contextlib.suppress(OSError):  # it has ended
            connection.send(json.dumps({"fds": len(fds)}).encode())
            for at in range(0, len(fds), _MAX_FDS):
                socket.send_fds(connection, [b"!"], fds[at : at + _MAX_FDS])

    def _find(self, connection: socket.socket) -> _Slot | None:
        return next((slot for slot in self._slots.values() if slot.connection is connection), None)

    def _drop(self, connection: socket.socket) -> None:
        if self._selector is not None:
            self._selector.unregister(connection)
        self._connections.discard(connection)
        connection.close()
        slot = self._find(connection)
        if slot is not None and not slot.has_returned:
            slot.has_returned = True
            self._finish_round_if_complete()

    # -- a round ----------------------------------------------------------------------------------------------------

    def _finish_round_if_complete(self) -> None:
        if len(self._slots) < self._nproc or not all(slot.has_returned for slot in self._slots.values()):
            return
        close_fds(self._result_fds.values())
        self._result_fds = {
            slot.global_rank: os.dup(slot.result_fd) if slot.result_fd >= 0 else -1 for slot in self._slots.values()
        }
        self.position = next(iter(self._slots.values())).position
        for slot in self._slots.values():
            with contextlib.suppress(OSError):  # it ended without a result
                slot.connection.send(b"!")

    def _clear_slots(self) -> None:
        for slot in self._slots.values():
            close_fds((slot.result_fd, slot.error_fd))
        self._slots.clear()

    # -- after the end ----------------------------------------------------------------------------------------------

    @property
    def result_fds(self) -> Mapping[int, int]:
        """The files of the last complete round's results, by global rank. -1: it ended well without one."""
        return self._result_fds

    def load_results(self) -> dict[int, Any]:
        """Return what the workers of the last complete round returned, by global rank.

        The value is None for a worker that returned nothing.
        """
        return load_results(self._result_fds)

    def load_exception(self, global_rank: int) -> BaseException | None:
        """Return the exception that ended a worker of the last round, caused by its traceback as text.

        None: there was none, or it cannot be loaded here.
        """
        for slot in self._slots.values():
            if slot.global_rank == global_rank and slot.error_fd >= 0:
                with contextlib.suppress(PickleFault):
                    error, text = _load(slot.error_fd, "")
                    error.__cause__ = RemoteTraceback(text)
                    return error if isinstance(error, BaseException) else None
        return None

    def stop_listening(self) -> None:
        """Close the sockets after the end of the job. The results stay."""
        for connection in self._connections:
            connection.close()
        self._connections.clear()
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def close(self) -> None:
        """Release everything. Idempotent."""
        self.stop_listening()
        self._clear_slots()
        close_fds(self._result_fds.values())
        self._result_fds = {}
        payload, self._payload = self._payload, Payload(call_fd=-1, tracker_fd=-1)
        close_fds((payload.call_fd, *payload.fds))


def load_results(result_fds: Mapping[int, int]) -> dict[int, Any]:
    """Return the values in these files, by global rank. The value is None where there is no file (-1).

    Raises:
        PickleFault: a result cannot be loaded in this process.
    """
    return {
        rank: None if fd < 0 else _load(fd, f"the result of rank {rank}") for rank, fd in sorted(result_fds.items())
    }


def _load(fd: int, what: str) -> Any:
    with open(os.dup(fd), "rb") as file:
        file.seek(0)
        try:
            return pickle.load(file)  # noqa: S301  # our own worker wrote it
        except Exception as error:  # unpickling runs user code
            raise PickleFault(f"cannot load {what}: {type(error).__name__}: {error}") from error


def close_fds(fds: Iterable[int]) -> None:
    """Close descriptors. -1 is none."""
    for fd in fds:
        if fd >= 0:
            os.close(fd)
