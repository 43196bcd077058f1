"""Ports that no other program can take while they are reserved."""

import errno
import socket
from contextlib import ExitStack


class PortReservation:
    """A MASTER_PORT reserved for a round: bound but not listening, with SO_REUSEADDR.

    While it is reserved, the kernel assigns the port to no other program. It still lets TCPStore, which also sets
    SO_REUSEADDR, bind and listen on it.
    """

    def __init__(self) -> None:
        self._socket = bind_wildcard()
        self.port: int = self._socket.getsockname()[1]

    def close(self) -> None:
        """Release the port. Idempotent."""
        self._socket.close()


def bind_wildcard(port: int = 0) -> socket.socket:
    """Return a dual-stack socket if there is IPv6 (TCPStore listens on both), otherwise an IPv4 socket.

    Args:
        port: 0 for any that is free.

    Raises:
        OSError: the port is not free.
    """
    try:
        return _bind_family(socket.AF_INET6, "::", port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise
        return _bind_family(socket.AF_INET, "", port)


def bind_address(host: str, port: int) -> socket.socket:
    """Return a socket at MASTER_ADDR only, or at all addresses if that is a name or not this machine's (NAT).

    Raises:
        OSError: the port is not free.
    """
    numeric = "127.0.0.1" if host == "localhost" else host
    try:
        found = socket.getaddrinfo(numeric, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
        return _bind_family(found[0][0], *found[0][4][:2])
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise
        return bind_wildcard(port)


def reserve_monitor_address(stack: ExitStack) -> str | None:
    """Reserve the address on which NCCL's own monitor (RAS) of this node's workers answers, until `stack` is closed.

    NCCL's default is one port of the machine for all jobs. The kernel would then pass the agent's question to any of
    them, and if another user's job had the port, this job would have no monitor. All processes of one node listen on
    the same port, which NCCL opens with SO_REUSEPORT. A socket that is bound but does not listen keeps the port from
    other users, and gets no connection.

    Source: NCCL 2.27.7, src/ras/client_support.cc (`rasClientInitSocket`); socket(7) for who may share a port.

    Returns:
        The value of NCCL_RAS_ADDR; None if there is no port, or no IPv4.
    """
    try:
        reserved = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{reserved.getsockname()[1]}"
    except OSError:
        return None


def _bind_family(family: socket.AddressFamily, host: str, port: int) -> socket.socket:
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        bound.bind((host, port))
    except OSError:
        bound.close()
        raise
    return bound
