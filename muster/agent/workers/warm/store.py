"""The store's process: serves a round's TCPStore on a listening socket that the agent has opened.

It is a parked worker of the template, or a separate process if there is no template any more. It runs no code of the
user and writes nothing. It stays in the template's session, which no stop of the workers touches. It ends when the
agent closes its socket, kills it, or dies.

The protocol runs over the socket on which the worker was parked. The agent sends `HOST` with the listening socket
attached. The process sends `SERVES` when it serves. After `DROP` it ends this store and waits for the next socket.
"""

import ctypes
import os
import socket
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from torch.distributed import TCPStore

HOST = b"host"
"""Several bytes, unlike the release of a worker."""
DROP = b"drop"
SERVES = b"s"


def serve_cold(control_fd: int) -> NoReturn:
    """Be the store's process without a template: wait for the socket, then import torch."""
    control = socket.socket(fileno=control_fd)
    _message, fds, _flags, _address = socket.recv_fds(control, len(HOST), 1)
    if len(fds) != 1:
        os._exit(0)
    serve(control, fds[0])


def serve(control: socket.socket, listen_fd: int) -> NoReturn:
    """Serve until the agent closes its end of `control`, and return the exit code.

    It is 0 even without torch, because then no worker needs a store.

    Args:
        control: the socket to the agent.
        listen_fd: the listening socket.
    """
    code = 1
    try:
        _silence()
        _ask_no_name_server()
        while (store := _open_store(listen_fd)) is not None:
            control.send(SERVES)
            is_dropped = control.recv(len(DROP)) == DROP
            del store  # no other name has it: it closes its connections
            message, fds, *_ = socket.recv_fds(control, len(HOST), 1) if is_dropped else (b"", [])
            if not message:  # closed by the agent
                break
            (listen_fd,) = fds
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
