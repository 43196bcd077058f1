"""Ports that no other program can take while they are reserved."""

import errno
import socket


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
        found = socket.getaddrinfo(encode_host(numeric), port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
        return _bind_family(found[0][0], *found[0][4][:2])
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise
        return bind_wildcard(port)


def encode_host(host: str) -> str | bytes:
    """Return a host as `socket` takes it without the tables of IDNA, which take 1 MB: in bytes if it is ASCII."""
    return host.encode() if host.isascii() else host


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
