"""The store's process: serves one round's TCPStore on a listening socket that the agent has opened.

It is a parked worker of the template, or a separate process if there is no template any more. It runs no code of the
user and writes nothing. It stays in the template's session, which no stop of the workers touches. It ends when the
agent closes its socket, kills it, or dies.

The protocol runs over the socket on which the worker was parked. The agent sends the number of workers, four bytes in
network order, with the listening socket attached. The process sends `SERVES` when it serves, and `AGAIN` when more
clients have connected than there are workers. It checks this each second, and at once when the agent sends a byte.
"""

import ctypes
import os
import select
import socket
import struct
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from torch.distributed import TCPStore

SERVES = b"s"
AGAIN = b"!"

_POLL_S = 1.0
"""How soon the process sees that workers have connected again. Each check is one request to its own store."""
_ASK_LIMIT_S = 5.0
_VALIDATE = struct.pack("=BI", 0, 0x3C85F7CE)
_COUNT = struct.pack("=BQ5sq", 4, 5, b"init/", 0)
"""The store's first message on a connection, and a request to add 0 to a key, whose answer is the key's value.

Every client that is made with the number of workers adds 1 to this key. Python's TCPStore cannot name the key, because
it puts a slash before each name.

Source: QueryType in torch's TCPStoreBackend.hpp, and TCPStore::waitForWorkers in TCPStore.cpp, torch 2.4 to 2.13.
"""


def serve_cold(control_fd: int) -> NoReturn:
    """Be the store's process without a template: wait for the socket, then import torch."""
    control = socket.socket(fileno=control_fd)
    message, fds, _flags, _address = socket.recv_fds(control, 4, 1)
    if len(fds) != 1:
        os._exit(0)
    serve(control, int.from_bytes(message, "big"), fds[0])


def serve(control: socket.socket, world_size: int, listen_fd: int) -> NoReturn:
    """Serve until the agent closes its end of `control`, and return the exit code.

    It is 0 even without torch, because then no worker needs a store.

    Args:
        control: the socket to the agent.
        world_size: how many workers the round has.
        listen_fd: the listening socket.
    """
    code = 1
    try:
        _silence()
        _ask_no_name_server()
        store = _open_store(listen_fd)
        if store is not None:
            with suppress(OSError):
                control.send(SERVES)
                _watch(control, _find_address(listen_fd), world_size)
            while control.recv(1):
                pass  # closed by the agent
        code = 0
    finally:
        os._exit(code)  # exit handlers are the workers'


def _silence() -> None:
    """Print nothing: what the template's streams contain, its workers would print first."""
    null_fd = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null_fd, fd)


def _ask_no_name_server() -> None:
    """Look up hosts only in /etc/hosts from now on, in this process.

    torch's store looks up the names of connecting clients one after the other, and answers none until then. A name
    server that does not answer costs 5 s or more each time. Workers of a crashed job once waited for 60 s.
    """
    configure = getattr(ctypes.CDLL(None), "__nss_configure_lookup", None)  # glibc's
    if configure is not None:
        configure(b"hosts", b"files")


def _open_store(listen_fd: int) -> "TCPStore | None":
    """Return the TCPStore on this socket; None if no program on this machine can import torch's stores."""
    try:
        import torch
        from torch.distributed import TCPStore
    except ImportError:
        return None
    return TCPStore(
        *_find_address(listen_fd),  # for its own client
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listen_fd,
        # Before 2.8, torch's libuv store cannot take over a listening socket.
        use_libuv=_parse_version(torch.__version__) >= (2, 8),
    )


def _find_address(listen_fd: int) -> "tuple[str, int]":
    """Return host and port at which this process reaches the socket. It may listen at one address only."""
    with socket.socket(fileno=os.dup(listen_fd)) as listener:
        host, port = listener.getsockname()[:2]
    return "127.0.0.1" if host in ("0.0.0.0", "::") else host, port  # noqa: S104  # compared only


def _parse_version(text: str) -> tuple[int, ...]:
    """Return the first two numbers: "2.13.0+cpu" -> (2, 13)."""
    return tuple(int(part) for part in text.split(".")[:2])


def _watch(control: socket.socket, address: "tuple[str, int]", world_size: int) -> None:
    """Tell the agent once that more clients than workers have connected.

    Return then, or when the agent closes the socket.

    Raises:
        OSError: the store of this torch does not answer as expected.
    """
    with socket.create_connection(address, _ASK_LIMIT_S) as connection:
        connection.sendall(_VALIDATE)
        while not select.select([control], (), (), _POLL_S)[0] or control.recv(1):
            connection.sendall(_COUNT)
            (count,) = struct.unpack("=q", connection.recv(8, socket.MSG_WAITALL).ljust(8, b"\0"))
            if count > world_size:
                control.send(AGAIN)
                return
