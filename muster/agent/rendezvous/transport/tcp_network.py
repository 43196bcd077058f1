"""Links over TCP on the agent's loop: nothing blocks, and unauthenticated peers cost little.

A peer is unauthenticated until its owner trusts it, which is when its node joins. Unauthenticated peers have a
deadline, whatever they ask, and may send only small frames (with a token, only until the handshake). Their number is
limited, and the oldest is closed first, so that a flood of connections cannot keep members out. Nodes that search for a
leader connect again in time.
"""

import errno
import socket
from collections.abc import Callable

from muster.agent.rendezvous.protocol.framing import Frame
from muster.agent.rendezvous.transport.addresses import LOOPBACK, Address, Resolver, is_bindable, parse_numeric
from muster.agent.rendezvous.transport.dial import Attempt, Dial, Probe
from muster.agent.rendezvous.transport.links import (
    Cause,
    Closing,
    Link,
    LinkEnd,
    Listener,
    OnLink,
    OnRefused,
    Reservation,
)
from muster.agent.rendezvous.transport.tcp_link import TcpLink
from muster.agent.runtime.loop import Loop, Timer
from muster.agent.runtime.ports import PortReservation

UNAUTHENTICATED_LIMIT_S = 10.0
"""How long a connection may go without a join."""
UNAUTHENTICATED_LIMIT = 4096
"""Limit on connections without a proven token and without a join. All nodes of a large job may join at once."""
BACKLOG = 4096
ACCEPTS_PER_TURN = 32
"""Few, so that joins of those accepted before are read in between, before there are too many connections."""
ACCEPT_PAUSE_S = 0.25
"""How soon to accept again after the process or the machine ran out of descriptors."""
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class TcpListener:
    """Accepts connections, and passes each on with its first message. Close it."""

    def __init__(
        self,
        loop: Loop,
        sock: socket.socket,
        token: str | None,
        on_link: OnLink,
        on_refused: OnRefused | None = None,
    ) -> None:
        self._loop = loop
        self._socket = sock
        self._token = token
        self._on_link = on_link
        self._on_refused = on_refused
        self._pending: set[TcpLink] = set()
        """Connections that have sent no message yet."""
        self._unauthenticated: dict[TcpLink, None] = {}
        """Connections that count against the limit, the oldest first."""
        self._pause_timer: Timer | None = None
        self.port: int = sock.getsockname()[1]
        sock.setblocking(False)
        loop.watch_readable(sock.fileno(), self._on_readable)

    def _on_readable(self) -> None:
        for place in range(ACCEPTS_PER_TURN):
            try:
                sock, _address = self._socket.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno in _EXHAUSTED:
                    if place == 0:  # later none may wait: Linux checks descriptors first
                        self._make_room()
                    return
                continue  # closed before the accept
            sock.setblocking(False)
            self._add_unauthenticated(sock)

    def _make_room(self) -> None:
        """Close an unauthenticated peer if no descriptor is left, or pause: the kernel reports waiters each turn."""
        if self._unauthenticated:
            self._close_oldest()
            return
        self._loop.unwatch_readable(self._socket.fileno())
        self._pause_timer = self._loop.call_later(ACCEPT_PAUSE_S, self._resume)

    def _resume(self) -> None:
        self._pause_timer = None
        self._loop.watch_readable(self._socket.fileno(), self._on_readable)

    def _add_unauthenticated(self, sock: socket.socket) -> None:
        try:
            link = TcpLink(self._loop, sock, self._token, is_server=True)
        except OSError:
            sock.close()  # closed before the accept
            return
        if len(self._unauthenticated) >= UNAUTHENTICATED_LIMIT:
            self._close_oldest()
        timer = self._loop.call_later(
            UNAUTHENTICATED_LIMIT_S, lambda: link.fail(LinkEnd(reason="it has not joined in time"))
        )

        def settle() -> None:
            timer.cancel()
            self._pending.discard(link)
            self._unauthenticated.pop(link, None)

        link.owner = self
        link.on_settled = settle
        link.on_first_message = lambda message: self._pass_on(link, message)
        if self._token is not None:
            link.on_open = lambda: self._unauthenticated.pop(link, None)  # token proved
        self._pending.add(link)
        self._unauthenticated[link] = None

    def _close_oldest(self) -> None:
        next(iter(self._unauthenticated)).fail(LinkEnd(reason="too many connections that have not joined"))

    def _pass_on(self, link: TcpLink, message: Frame) -> None:
        self._pending.discard(link)
        link.owner = None
        self._on_link(link, message)

    def on_message(self, link: Link, _frame: object) -> None:
        """Do nothing, because the first message goes to `on_first_message`, and the link gets another owner."""
        link.close()

    def on_closed(self, link: Link, end: LinkEnd) -> None:
        """Handle a connection that was closed or refused before its first message, or sent another protocol."""
        if end.cause is Cause.REFUSED and self._on_refused is not None:
            self._on_refused(link.peer_host, end)

    def close(self) -> None:
        """Stop accepting, and close connections that have sent nothing yet. Idempotent."""
        if self._socket.fileno() < 0:
            return
        if self._pause_timer is not None:
            self._pause_timer.cancel()
        self._loop.unwatch(self._socket.fileno())
        self._socket.close()
        for link in list(self._pending):
            link.close()


class TcpNetwork:
    """The real `Network`. Close it when the agent ends."""

    def __init__(self, loop: Loop, token: str | None) -> None:
        self.loop = loop
        self.token = token or None
        self._resolver = Resolver(loop)

    def connect(
        self,
        host: str,
        port: int,
        on_open: Callable[[Link], None],
        on_failed: Callable[[LinkEnd], None],
        timeout_s: float,
    ) -> Closing:
        """See `Network`."""
        dial = Dial(
            self.loop,
            lambda address, opened, failed: Attempt(self.loop, address, port, self.token, opened, failed),
            on_open,
            on_failed,
            timeout_s,
        )
        self._resolver.resolve(host, dial.try_addresses)
        return dial

    def probe(self, host: str, port: int, on_result: Callable[[bool], None]) -> Closing:
        """See `Network`. The address must be numeric, because a name may resolve to another address by now."""
        return Probe(self.loop, parse_numeric(host), port, on_result)

    def listen(self, host: str | None, port: int, on_link: OnLink, on_refused: OnRefused | None = None) -> Listener:
        """See `Network`."""
        for address in LOOPBACK if host == "localhost" else (None if host is None else parse_numeric(host),):
            try:
                sock = _listen(address, port)
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    raise  # localhost's next address may be free, for a second leader
                last = error
                continue
            return TcpListener(self.loop, sock, self.token, on_link, on_refused)
        raise last

    def reserve(self) -> Reservation:
        """See `Network`."""
        return PortReservation()

    def adopt(self, fd: int, on_link: OnLink, on_refused: OnRefused | None = None) -> Listener:
        """See `Network`."""
        return TcpListener(self.loop, socket.socket(fileno=fd), self.token, on_link, on_refused)

    def check_local(self, host: str, on_result: Callable[[bool], None]) -> None:
        """See `Network`."""
        self._resolver.resolve(host, lambda found: on_result(any(map(is_bindable, found.addresses))))

    def close(self) -> None:
        """See `Network`."""
        self._resolver.close()


def _listen(address: Address | None, port: int) -> socket.socket:
    """Return a listening socket on one address, or on all of them, IPv4 and IPv6."""
    if address is not None and address[1] in ("0.0.0.0", "::"):  # noqa: S104 (a person has asked for it)
        address = None
    if address is None and socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=BACKLOG)
    family, host = address or (socket.AF_INET, "")
    return socket.create_server((host, port), family=socket.AddressFamily(family), backlog=BACKLOG)
