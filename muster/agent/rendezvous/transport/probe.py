"""Checks whether the process at an address has ended: an immediate redial that is refused proves it."""

import errno
import socket
from collections.abc import Callable

from muster.agent.rendezvous.transport.addresses import Address
from muster.agent.runtime.loop import Loop, Timer

LIMIT_S = 2.0
"""How long the answer may take. A later answer would prove nothing."""
RETRY_S = 0.01


class Probe:
    """Dials one address until it is refused, or until a process there sends something.

    A killed process closes its descriptors one after the other, often the listening one last. The kernel accepts a
    redial before that, and resets it when the listener closes. Such a reset proves nothing, so the probe dials again.
    On a busy machine this happened to one killed process in ten.
    """

    def __init__(self, loop: Loop, address: Address | None, port: int, on_result: Callable[[bool], None]) -> None:
        """Keep `on_result`, which is called on the loop, never at once, with True if the dial was refused."""
        self._loop = loop
        self._address = address
        self._port = port
        self._on_result = on_result
        self._socket: socket.socket | None = None
        self._closed = False
        self._limit_timer = loop.call_later(LIMIT_S, lambda: self._finish(refused=False))
        self._retry_timer: Timer | None = None
        loop.call_soon(self._dial)

    def _dial(self) -> None:
        if self._closed:
            return
        if self._address is None:
            self._finish(refused=False)
            return
        family, host = self._address
        try:
            self._socket = socket.socket(family, socket.SOCK_STREAM)
        except OSError:  # no descriptors left: no proof
            self._finish(refused=False)
            return
        self._socket.setblocking(False)  # SOCK_NONBLOCK is Linux-only
        code = self._socket.connect_ex((host, self._port))
        if code in (0, errno.EINPROGRESS):
            self._loop.watch_writable(self._socket.fileno(), self._on_dialled)
        else:
            self._finish(refused=code == errno.ECONNREFUSED)

    def _on_dialled(self) -> None:
        if self._socket is None:
            return
        self._loop.unwatch(self._socket.fileno())
        code = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code == errno.ECONNRESET:
            self._retry()
        elif code or is_self_connected(self._socket):
            self._finish(refused=code in (0, errno.ECONNREFUSED))
        else:
            self._loop.watch_readable(self._socket.fileno(), self._on_readable)

    def _on_readable(self) -> None:
        """Read: only a living process sends data; a reset or an end of stream may come from one that is ending."""
        if self._socket is None:
            return
        try:
            data = self._socket.recv(1)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            self._finish(refused=False)
        else:
            self._retry()

    def _retry(self) -> None:
        self._close_socket()
        self._retry_timer = self._loop.call_later(RETRY_S, self._dial)

    def _finish(self, *, refused: bool) -> None:
        if not self._closed:
            self.close()
            self._on_result(refused)

    def _close_socket(self) -> None:
        if self._socket is not None:
            self._loop.unwatch(self._socket.fileno())
            self._socket.close()
            self._socket = None

    def close(self) -> None:
        """Stop without a result. Idempotent."""
        self._closed = True
        self._limit_timer.cancel()
        if self._retry_timer is not None:
            self._retry_timer.cancel()
        self._close_socket()


def is_self_connected(sock: socket.socket) -> bool:
    """Return whether a socket is connected to itself, because the dialled port is an ephemeral one."""
    try:
        return bool(sock.getsockname() == sock.getpeername())
    except OSError:
        return False
