"""The store's process: serves one round's TCPStore on a listening socket that the agent has opened.

A parked worker of the template becomes it, or a process of its own where there is no template any more. It runs no line
of the user's, writes nothing, and stays in the template's session, which no stop of the workers touches. It ends when
the agent closes its socket or kills it, or dies.

Protocol, over the socket that the worker was parked on: the agent sends the number of workers, four bytes in network
order, with the listening socket attached; the process sends `SERVES` when it serves, and `AGAIN` when more clients have
come than there are workers. It looks each second, and at once when the agent sends a byte.
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
"""How soon it is noticed that workers have connected again; one request to its own store each time."""
_ASK_LIMIT_S = 5.0
_VALIDATE = struct.pack("=BI", 0, 0x3C85F7CE)
_COUNT = struct.pack("=BQ5sq", 4, 5, b"init/", 0)
"""The store's first message on a connection, and the request to add 0 to a key, which answers with its value. Every
client that is made with the number of workers adds 1 to this key, which Python's TCPStore cannot name (it puts a slash
before each).

Source: QueryType in torch's TCPStoreBackend.hpp, and TCPStore::waitForWorkers in TCPStore.cpp, torch 2.4 to 2.13.
"""


def serve_cold(control_fd: int) -> NoReturn:
    """Be the store's process from scratch: wait for the socket, then import torch."""
    control = socket.socket(fileno=control_fd)
    message, fds, _flags, _address = socket.recv_fds(control, 4, 1)
    if len(fds) != 1:
        os._exit(0)  # not needed any more
    serve(control, int.from_bytes(message, "big"), fds[0])


def serve(control: socket.socket, world_size: int, listen_fd: int) -> NoReturn:
    """Serve until the agent closes its end of `control`. Exit code 0 also where there is no torch: none needs a store.

    Args:
        control: to the agent.
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
                _watch(control, store.port, world_size)
            while control.recv(1):
                pass  # until the agent closes it
        code = 0
    finally:
        os._exit(code)  # only workers run the template's exit handlers


def _silence() -> None:
    """Print nothing: the template's streams are what its workers print first."""
    null_fd = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null_fd, fd)


def _ask_no_name_server() -> None:
    """Find names of hosts in /etc/hosts only from now on, in this process.

    torch's store looks up the names of clients that connect one after the other, and answers none of them until then.
    A name server that does not answer costs 5 s and more each time. Workers of a crashed job once waited for 60 s.
    """
    configure = getattr(ctypes.CDLL(None), "__nss_configure_lookup", None)  # glibc has it
    if configure is not None:
        configure(b"hosts", b"files")


def _open_store(listen_fd: int) -> "TCPStore | None":
    """Return the TCPStore on this socket; None: no program on this machine can import torch's stores."""
    try:
        import torch
        from torch.distributed import TCPStore
    except ImportError:
        return None
    return TCPStore(
        "127.0.0.1",  # its own client connects there
        _find_port(listen_fd),
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listen_fd,
        # Before 2.8, torch's libuv store cannot take over a listening socket.
        use_libuv=_parse_version(torch.__version__) >= (2, 8),
    )


def _find_port(listen_fd: int) -> int:
    with socket.socket(fileno=os.dup(listen_fd)) as listener:
        port: int = listener.getsockname()[1]
    return port


def _parse_version(text: str) -> tuple[int, ...]:
    """Return the first two numbers: "2.13.0+cpu" -> (2, 13)."""
    return tuple(int(part) for part in text.split(".")[:2])


def _watch(control: socket.socket, port: int, world_size: int) -> None:
    """Tell the agent once when more clients than workers have connected, and return then, or when it closes the socket.

    Raises:
        OSError: this torch's store does not answer as expected.
    """
    with socket.create_connection(("127.0.0.1", port), _ASK_LIMIT_S) as connection:
        connection.sendall(_VALIDATE)
        while not select.select([control], (), (), _POLL_S)[0] or control.recv(1):
            connection.sendall(_COUNT)
            (count,) = struct.unpack("=q", connection.recv(8, socket.MSG_WAITALL).ljust(8, b"\0"))
            if count > world_size:
                control.send(AGAIN)
                return
