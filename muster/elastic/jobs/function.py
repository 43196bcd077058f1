"""The program of a worker that runs a Python function; `muster.elastic` starts it.

Its arguments are the job's folder and the local rank. It connects to the program that started the job and gets the
pickled call. It imports that program's `__main__` as multiprocessing's spawn does, calls the function, and sends back a
descriptor of an unnamed file with the result. An exception of the function is the worker's failure and is sent as well.

The worker ends when all workers of the node have returned.
"""

import sys

if __name__ == "__main__":
    del sys.path[0]  # this folder

import contextlib
import io
import json
import os
import pickle
import socket
import tempfile
from collections.abc import Callable
from multiprocessing import forkserver, process, resource_tracker, spawn
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

SOCKET_NAME = "workers"
muster_frames = True  # see `program`
_MAX_FDS = 253
_ROUND = "MUSTER_ROUND"


class _PositionedFile(io.RawIOBase):
    """Reads a file from its own position, although other processes read the file through the same description."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._at = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "WriteableBuffer") -> int:
        count = os.preadv(self._fd, [buffer], self._at)
        self._at += count
        return count


def main(folder: str, local_rank: str) -> None:
    """Run the worker."""
    connection = connect(folder, local_rank)
    call_fd, tracker_fd, *fds = _receive_descriptors(connection)
    resource_tracker._resource_tracker._fd = tracker_fd  # type: ignore[attr-defined]  # noqa: SLF001  # as spawn_main
    forkserver._forkserver._inherited_fds = fds  # type: ignore[attr-defined]  # noqa: SLF001  # where _DupFd looks
    with io.BufferedReader(_PositionedFile(call_fd), 1 << 20) as file:
        preparation = pickle.load(file)  # noqa: S301  # the program that started the job wrote it
        this = process.current_process()
        this.authkey = preparation.pop("authkey")
        substitutes_macros = preparation.pop("substitutes_macros")
        this._inheriting = True  # type: ignore[attr-defined]  # noqa: SLF001  # as spawn._main: no processes meanwhile
        spawn.prepare(preparation)
        function, args, kwargs = pickle.load(file)  # noqa: S301  # its modules can be imported only now
        del this._inheriting  # type: ignore[attr-defined]  # noqa: SLF001
    os.close(call_fd)
    call(connection, function, substitute_macros(args, local_rank) if substitutes_macros else args, kwargs)


def substitute_macros(args: tuple[object, ...], local_rank: str) -> tuple[object, ...]:
    """Replace `${local_rank}` in strings by the rules of `string.Template`, as torch does."""
    if not any(isinstance(arg, str) and "$" in arg for arg in args):
        return args
    from string import Template

    return tuple(Template(arg).safe_substitute(local_rank=local_rank) if isinstance(arg, str) else arg for arg in args)


def connect(folder: str, local_rank: str) -> socket.socket:
    """Connect to the program that started the job, and send this worker's local rank."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(os.path.join(folder, SOCKET_NAME))
    hello = {
        "round": int(os.environ.pop(_ROUND)),
        "local_rank": int(local_rank),
        "global_rank": int(os.environ["RANK"]),
        "place": {
            "node": int(os.environ["GROUP_RANK"]),
            "nodes": int(os.environ["GROUP_WORLD_SIZE"]),
            "world_size": int(os.environ["WORLD_SIZE"]),
            "master_addr": os.environ["MASTER_ADDR"],
            "master_port": int(os.environ["MASTER_PORT"]),
        },
    }
    connection.send(json.dumps(hello).encode())
    return connection


def call(
    connection: socket.socket, function: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
) -> None:
    """Call the function and send what it returns or raises. Return when all workers of the node have returned."""
    global_rank = int(os.environ["RANK"])
    try:
        result = function(*args, **kwargs)
    except BaseException as error:  # even sys.exit: the program gets it unchanged
        _send_exception(connection, error)
        raise
    _send(connection, {"returned": True}, _write(result, f"the result of {_name(function)} on rank {global_rank}"))
    with contextlib.suppress(OSError):  # perhaps closed by the function
        connection.recv(1)  # all have returned, or the program is gone


def _receive_descriptors(connection: socket.socket) -> list[int]:
    announced = connection.recv(4096)
    if not announced:
        sys.exit("muster: the program that started this worker is gone")
    wanted = json.loads(announced)["fds"]
    found: list[int] = []
    while len(found) < wanted:
        data, fds, _flags, _address = socket.recv_fds(connection, 1, _MAX_FDS)
        if not data or not fds:
            sys.exit("muster: no descriptors left for the arguments of this worker's function")
        found += fds
    return found


def _send(connection: socket.socket, message: dict[str, object], fd: int) -> None:
    try:
        with contextlib.suppress(ConnectionError):
            socket.send_fds(connection, [json.dumps(message).encode()], [fd])
    finally:
        os.close(fd)


def _send_exception(connection: socket.socket, error: BaseException) -> None:
    with contextlib.suppress(Exception):  # unpicklable; the report has its text
        import traceback

        shown = error.__traceback__
        while shown is not None and "muster_frames" in shown.tb_frame.f_globals:
            shown = shown.tb_next
        text = "".join(traceback.format_exception(type(error), error, shown))
        _send(connection, {"failed": True}, _write((error, text), "the exception"))


def _write(value: object, what: str) -> int:
    """Pickle an object into an unnamed file, and return its descriptor.

    Raises:
        PicklingError: names what cannot be pickled.
    """
    with tempfile.TemporaryFile(prefix="muster_result_") as file:
        try:
            pickle.dump(value, file, protocol=pickle.HIGHEST_PROTOCOL)
        except (pickle.PicklingError, AttributeError, TypeError, RecursionError) as error:
            file.seek(0)
            file.truncate()
            if not _dump_by_value(value, file):
                kind = type(value).__qualname__
                raise pickle.PicklingError(f"{what}, of type {kind}, cannot be sent back: {error}") from error
        file.flush()
        return os.dup(file.fileno())


def _dump_by_value(value: object, file: IO[bytes]) -> bool:
    """Pickle by value with cloudpickle; return False if it is not installed or does not help."""
    try:
        import cloudpickle

        cloudpickle.dump(value, file)
    except (ImportError, pickle.PicklingError, AttributeError, TypeError, RecursionError):
        return False
    return True


def _name(function: Callable[..., object]) -> str:
    return str(getattr(function, "__qualname__", type(function).__qualname__))


if __name__ == "__main__":
    main(*sys.argv[1:])
