"""Connections of HTTP on a loop, each with one request and one answer, within a limit of time.

It is hand-written, because `http.server` blocks, and imports more than the whole agent does.
"""

import contextlib
import socket
from collections.abc import Callable
from typing import Final

from muster.agent.runtime.loop import Loop, Timer

PEERS: Final = 8
"""How many connections may be open at one port."""
LIMIT_S: Final = 5.0
"""How long a connection may take, from its beginning to the end of the answer."""
HEAD_LIMIT_BYTES: Final = 8 << 10


class HttpPeers:
    """The connections to one port. If there are too many, the oldest is closed, because any process can connect.

    One is accepted in each turn of the loop, so a request that has come is read before it could be the oldest.
    """

    def __init__(self, loop: Loop, answer: Callable[[bytes], bytes | None]) -> None:
        """Have none yet. For the arguments see `HttpPeer`."""
        self._loop = loop
        self._answer = answer
        self._peers: list[HttpPeer] = []

    def accept(self, listener: socket.socket) -> None:
        """Accept one connection.

        Raises:
            OSError: no descriptor is left.
        """
        try:
            link, _ = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):  # already gone
            return
        if len(self._peers) >= PEERS:
            self._peers[0].close()
        self._peers.append(HttpPeer(self._loop, link, self._answer, self._peers.remove))

    def close(self) -> None:
        """Close all connections. Idempotent."""
        for peer in list(self._peers):
            peer.close()


class HttpPeer:
    """One connection, with one request and one answer."""

    def __init__(
        self,
        loop: Loop,
        link: socket.socket,
        answer: Callable[[bytes], bytes | None],
        on_closed: "Callable[[HttpPeer], None]",
    ) -> None:
        """Read, for at most `LIMIT_S` until the answer is written.

        Args:
            loop: the loop that reads and writes.
            link: a link that was just accepted.
            answer: gets all data so far, and returns the answer; None if the request is not complete yet.
            on_closed: called once.
        """
        self._loop = loop
        self._link = link
        self._answer = answer
        self._on_closed = on_closed
        self._received = b""
        self._left = b""
        """The unsent part of the answer."""
        link.setblocking(False)
        loop.watch_readable(link.fileno(), self._read)
        self._timer: Timer = loop.call_later(LIMIT_S, self.close)

    def _read(self) -> None:
        try:
            data = self._link.recv(HEAD_LIMIT_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._received += data
        answer = self._answer(self._received) if data else b""
        if answer is None:
            return
        if not answer:
            self.close()
            return
        self._loop.unwatch_readable(self._link.fileno())
        self._left = answer
        self._write()

    def _write(self) -> None:
        try:
            self._left = self._left[self._link.send(self._left) :]
        except BlockingIOError:
            pass
        except OSError:
            self._left = b""
        if self._left:
            self._loop.watch_writable(self._link.fileno(), self._write)
            return
        with contextlib.suppress(OSError):
            self._link.shutdown(socket.SHUT_WR)
        self.close()

    def close(self) -> None:
        """Close the connection. May be called again."""
        if self._link.fileno() >= 0:
            self._timer.cancel()
            self._loop.unwatch(self._link.fileno())
            self._link.close()
            self._on_closed(self)


def parse_head(head: str) -> tuple[str, dict[str, str]]:
    r"""Return the path and the fields of a request, their names in lower case.

    >>> parse_head("POST /3 HTTP/1.1\r\nContent-Length: 2")
    ('/3', {'content-length': '2'})
    """
    first, *lines = head.split("\r\n")
    parts = first.split(" ")
    fields = (line.partition(":") for line in lines)
    return parts[1] if len(parts) > 1 else "", {name.lower().strip(): value.strip() for name, _, value in fields}
