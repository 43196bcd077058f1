"""Has the process behind an address ended? An immediate redial that is refused says so."""

import errno
import socket
from collections.abc import Callable

from muster.agent.rendezvous.transport.addresses import Address
from muster.agent.runtime.loop import Loop, Timer

LIMIT_S = 2.0
"""How long the answer may take; later than that it would prove nothing."""
AGAIN_S = 0.01


class Probe:
    """Dials one address until it is refused, or until somebody is seen to be alive there.

    A process that is killed closes its descriptors one after the other, the listening one often last: a redial that
    comes between the two is accepted by the kernel and reset when the listener goes. Such a reset is no answer, and is
    met by another dial. On a busy machine that was one death in ten.
    """

    def __init__(self, loop: Loop, address: Address | None, port: int, on_result: Callable[[bool], None]) -> None:
        """`on_result` comes on the loop, never at once: True when the dial was refused."""
        self._loop = loop
        self._address = address
        self._port = port
        self._on_result = on_result
        self._socket: socket.socket | None = None
        self._over = False
        self._limit = loop.call_later(LIMIT_S, lambda: self._end(refused=False))
        self._again: Timer | None = None
        loop.call_soon(self._dial)

    def _dial(self) -> None:
        if self._over:
            return
        if self._address is None:
            self._end(refused=False)
            return
        family, host = self._address
        try:
            self._socket = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        except OSError:  # no descriptor left: nothing can be proven
            self._end(refused=False)
            return
        code = self._socket.connect_ex((host, self._port))
        if code in (0, errno.EINPROGRESS):
            self._loop.watch_writable(self._socket.fileno(), self._on_dialled)
        else:
            self._end(refused=code == errno.ECONNREFUSED)

    def _on_dialled(self) -> None:
        if self._socket is None:
            return
        self._loop.unwatch(self._socket.fileno())
        code = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code == errno.ECONNRESET:
            self._dial_again()
        elif code or is_self_connected(self._socket):
            self._end(refused=code in (0, errno.ECONNREFUSED))
        else:
            self._loop.watch_readable(self._socket.fileno(), self._on_readable)

    def _on_readable(self) -> None:
        """Words come from a living process only; a reset or an end may be its last sign."""
        if self._socket is None:
            return
        try:
            said = self._socket.recv(1)
        except BlockingIOError:
            return
        except OSError:
            said = b""
        if said:
            self._end(refused=False)
        else:
            self._dial_again()

    def _dial_again(self) -> None:
        self._hang_up()
        self._again = self._loop.call_later(AGAIN_S, self._dial)

    def _end(self, *, refused: bool) -> None:
        if not self._over:
            self.close()
            self._on_result(refused)

    def _hang_up(self) -> None:
        if self._socket is not None:
            self._loop.unwatch(self._socket.fileno())
            self._socket.close()
            self._socket = None

    def close(self) -> None:
        """Give up without a result. Idempotent."""
        self._over = True
        self._limit.cancel()
        if self._again is not None:
            self._again.cancel()
        self._hang_up()


def is_self_connected(sock: socket.socket) -> bool:
    """True when a socket met itself: the port it dialled is in the range that its own port came from."""
    try:
        return bool(sock.getsockname() == sock.getpeername())
    except OSError:
        return False
