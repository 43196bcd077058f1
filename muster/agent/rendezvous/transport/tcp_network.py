"""Links over TCP on the agent's loop: nothing blocks, strangers cost little.

A connection counts as a stranger's until its first valid message (with a token: after the handshake). Strangers have
a few seconds, small frames, and a limited number of places; the oldest goes first when they are taken, so that a
flood of half-open connections cannot keep members out.
"""

import errno
import socket
from collections import deque
from collections.abc import Callable

from muster.agent.rendezvous.protocol.framing import Message
from muster.agent.rendezvous.transport.addresses import (
    Address,
    Resolver,
    is_bindable,
    parse_numeric,
    resolve,
)
from muster.agent.rendezvous.transport.links import Closing, Link, Listener
from muster.agent.rendezvous.transport.probe import Probe, is_self_connected
from muster.agent.rendezvous.transport.tcp_link import TcpLink
from muster.agent.runtime.loop import Loop, Timer

STRANGER_LIMIT_S = 5.0
STRANGER_PLACES = 512
BACKLOG = 4096
ACCEPTS_PER_TURN = 256


class TcpListener:
    """Accepts connections and hands over those whose first message is valid. Close it."""

    def __init__(
        self, loop: Loop, sock: socket.socket, token: str | None, on_link: Callable[[Link, Message], None]
    ) -> None:
        self._loop = loop
        self._socket = sock
        self._token = token
        self._on_link = on_link
        self._strangers: dict[TcpLink, Timer] = {}
        self.port: int = sock.getsockname()[1]
        sock.setblocking(False)
        loop.watch_readable(sock.fileno(), self._on_readable)

    def _on_readable(self) -> None:
        for _ in range(ACCEPTS_PER_TURN):
            try:
                sock, _address = self._socket.accept()
            except OSError:
                # Nothing more to accept, or no descriptor left: the kernel keeps the connection in its queue.
                return
            sock.setblocking(False)
            self._greet(sock)

    def _greet(self, sock: socket.socket) -> None:
        try:
            link = TcpLink(self._loop, sock, self._token, is_server=True)
        except OSError:
            sock.close()  # gone before it was greeted
            return
        if len(self._strangers) >= STRANGER_PLACES:
            self._drop(next(iter(self._strangers)))
        link.owner = self
        link.on_first = lambda message: self._admit(link, message)
        self._strangers[link] = self._loop.call_later(STRANGER_LIMIT_S, lambda: self._drop(link))

    def _admit(self, link: TcpLink, message: Message) -> None:
        self._forget(link)
        link.owner = None
        self._on_link(link, message)

    def _drop(self, link: TcpLink) -> None:
        self._forget(link)
        link.close()

    def _forget(self, link: TcpLink) -> None:
        timer = self._strangers.pop(link, None)
        if timer is not None:
            timer.cancel()

    def on_message(self, link: Link, _message: Message) -> None:
        """Never called: a first message makes a stranger somebody else's."""
        link.close()

    def on_closed(self, link: Link, _reason: str) -> None:
        """A stranger went away, or spoke another language."""
        if isinstance(link, TcpLink):
            self._forget(link)

    def close(self) -> None:
        """Stop accepting and drop the strangers. Idempotent."""
        if self._socket.fileno() < 0:
            return
        self._loop.unwatch(self._socket.fileno())
        self._socket.close()
        for link in list(self._strangers):
            self._drop(link)


class _Dial:
    """One attempt to reach a host: resolve, then its addresses one after the other until one opens."""

    def __init__(self, network: "TcpNetwork", port: int, timeout_s: float) -> None:
        self._network = network
        self._loop = network.loop
        self._port = port
        self._addresses: deque[Address] = deque()
        self._socket: socket.socket | None = None
        self._link: TcpLink | None = None
        self._over = False
        self._refused = False
        self._why = ""
        self.on_open: Callable[[Link], None] | None = None
        self.on_failed: Callable[[str, bool], None] | None = None
        self._timer = self._loop.call_later(timeout_s, self._on_timeout)

    def take_addresses(self, found: list[Address]) -> None:
        if self._over:
            return
        self._addresses.extend(found)
        self._why = "its name does not resolve"
        self._next()

    def _next(self) -> None:
        while self._addresses and not self._over:
            family, host = self._addresses.popleft()
            try:
                sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            except OSError as error:
                self._why = error.strerror or str(error)
                continue
            code = sock.connect_ex((host, self._port))
            if code in (0, errno.EINPROGRESS):
                self._socket = sock
                self._loop.watch_writable(sock.fileno(), self._on_writable)
                return
            sock.close()
            self._note(code)
        if not self._over:
            self._fail()

    def _note(self, code: int) -> None:
        import os

        self._refused = code == errno.ECONNREFUSED
        self._why = os.strerror(code)

    def _on_writable(self) -> None:
        sock = self._socket
        if sock is None:
            return
        self._loop.unwatch(sock.fileno())
        self._socket = None
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        # A socket may meet itself when the port it dials is in the range its own port comes from.
        if code == 0 and is_self_connected(sock):
            code = errno.ECONNREFUSED
        if code:
            sock.close()
            self._note(code)
            self._next()
        else:
            self._shake(sock)

    def _shake(self, sock: socket.socket) -> None:
        try:
            link = TcpLink(self._loop, sock, self._network.token, is_server=False)
        except OSError as error:
            sock.close()
            self._why = error.strerror or str(error)
            self._next()
            return
        self._link = link
        link.owner = self
        if link.is_open:
            self._open()
        else:
            link.on_open = self._open

    def _open(self) -> None:
        link, self._link = self._link, None
        self._end()
        if link is not None and self.on_open is not None:
            link.owner = None
            self.on_open(link)

    def on_message(self, link: Link, _message: Message) -> None:
        """Nothing comes before the link is open."""
        link.close()

    def on_closed(self, _link: Link, reason: str) -> None:
        """Closed during the handshake."""
        if not self._over:
            self._why = reason
            self._fail()

    def _on_timeout(self) -> None:
        self._refused = False
        self._why = "no answer"
        self._fail()

    def _fail(self) -> None:
        self.close()
        if self.on_failed is not None:
            self.on_failed(self._why, self._refused)

    def _end(self) -> None:
        self._over = True
        self._timer.cancel()

    def close(self) -> None:
        self._end()
        if self._socket is not None:
            self._loop.unwatch(self._socket.fileno())
            self._socket.close()
            self._socket = None
        if self._link is not None:
            self._link.close()
            self._link = None


class TcpNetwork:
    """The real `Network`. Close it when the agent ends."""

    def __init__(self, loop: Loop, token: str | None) -> None:
        self.loop = loop
        self.token = token
        self._resolver = Resolver(loop)

    def connect(
        self,
        host: str,
        port: int,
        on_open: Callable[[Link], None],
        on_failed: Callable[[str, bool], None],
        timeout_s: float,
    ) -> Closing:
        """See `Network`."""
        dial = _Dial(self, port, timeout_s)
        dial.on_open, dial.on_failed = on_open, on_failed
        self._resolver.resolve(host, dial.take_addresses)
        return dial

    def probe(self, host: str, port: int, on_result: Callable[[bool], None]) -> Closing:
        """See `Network`. Numeric addresses only: the same address must be dialled, not what a name means by now."""
        return Probe(self.loop, parse_numeric(host), port, on_result)

    def listen(self, host: str | None, port: int, on_link: Callable[[Link, Message], None]) -> Listener:
        """See `Network`."""
        addresses = [None] if host is None else [parse_numeric(host)] if parse_numeric(host) else resolve(host)
        for address in addresses:
            try:
                sock = _listen(address, port)
            except OSError as error:
                last = error
                continue
            return TcpListener(self.loop, sock, self.token, on_link)
        raise last

    def adopt(self, fd: int, on_link: Callable[[Link, Message], None]) -> Listener:
        """See `Network`."""
        return TcpListener(self.loop, socket.socket(fileno=fd), self.token, on_link)

    def check_local(self, host: str, on_result: Callable[[bool], None]) -> None:
        """See `Network`."""
        self._resolver.resolve(host, lambda found: on_result(any(is_bindable(address) for address in found)))

    def close(self) -> None:
        """See `Network`."""
        self._resolver.close()


def _listen(address: Address | None, port: int) -> socket.socket:
    """A listening socket on one address, or on all of them, IPv4 and IPv6."""
    if address is None and socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=BACKLOG)
    family, host = address or (socket.AF_INET, "")
    return socket.create_server((host, port), family=socket.AddressFamily(family), backlog=BACKLOG)
