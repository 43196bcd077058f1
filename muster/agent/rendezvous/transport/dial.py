"""One attempt to reach a host. Its addresses race, so that one that drops packets does not delay the others.

As in RFC 8305 (Happy Eyeballs), the next address is tried when the one before has failed, or has not opened within a
short time. The first link that opens wins, and the others are closed.
"""

import errno
import os
import socket
from collections import deque
from collections.abc import Callable

from muster.agent.rendezvous.protocol.framing import Frame
from muster.agent.rendezvous.protocol.messages import Message
from muster.agent.rendezvous.transport.addresses import Address, Resolved
from muster.agent.rendezvous.transport.links import Cause, Closing, Link, LinkEnd
from muster.agent.rendezvous.transport.tcp_link import TcpLink
from muster.agent.runtime.loop import Loop, Timer

STAGGER_S = 0.25
"""How long an address may delay the next one."""
RESOLVE_LIMIT_S = 30.0
"""How long resolving the name may take. It does not count against the addresses: a name server that does not answer
costs 5 s each time, and the one after it answers."""
NO_ANSWER = "no answer"
_NAMED = 4
"""How many addresses are named when all have failed."""

OnOpen = Callable[[Link], None]
OnFailed = Callable[[LinkEnd], None]
TryAddress = Callable[[Address, OnOpen, OnFailed], Closing]
"""Opens a link to one address. It never calls back before it returns."""


class Dial:
    """Reaches a host, or reports once why it cannot. Close it to cancel without a callback."""

    def __init__(
        self, loop: Loop, try_address: TryAddress, on_open: OnOpen, on_failed: OnFailed, timeout_s: float
    ) -> None:
        """Wait for `try_addresses`; `timeout_s` is for all addresses together."""
        self._loop = loop
        self._try_address = try_address
        self._on_open = on_open
        self._on_failed = on_failed
        self._timeout_s = timeout_s
        self._stagger_s = STAGGER_S
        self._first: Address = (0, "")
        self._untried: deque[Address] = deque()
        self._attempts: dict[Address, Closing] = {}
        self._ends: dict[Address, LinkEnd] = {}
        self._closed = False
        self._next_timer: Timer | None = None
        slow = LinkEnd(reason=f"the host name was not resolved within {RESOLVE_LIMIT_S:g} s")
        self._timer = loop.call_later(RESOLVE_LIMIT_S, lambda: self._fail(slow))

    def try_addresses(self, resolved: Resolved) -> None:
        """Begin, because the name has been resolved."""
        if self._closed:
            return
        if not resolved.addresses:
            self._fail(resolved.failure or LinkEnd(reason="the host name has no address"))
            return
        self._first = resolved.addresses[0]
        self._untried.extend(resolved.addresses)
        self._stagger_s = min(STAGGER_S, self._timeout_s / 2 / len(self._untried))  # half of it for the last one
        self._timer.cancel()
        self._timer = self._loop.call_later(self._timeout_s, self._on_timeout)
        self._try_next()

    def _try_next(self) -> None:
        if self._next_timer is not None:
            self._next_timer.cancel()
        if self._untried:
            address = self._untried.popleft()
            self._attempts[address] = self._try_address(
                address, lambda link: self._on_opened(address, link), lambda end: self._on_ended(address, end)
            )
            self._next_timer = self._loop.call_later(self._stagger_s, self._try_next)
        elif not self._attempts:
            self._fail(self._describe_end())

    def _on_opened(self, address: Address, link: Link) -> None:
        del self._attempts[address]
        if self._first in self._attempts:
            link.silent_host = self._first[1]
        self.close()
        self._on_open(link)

    def _on_ended(self, address: Address, end: LinkEnd) -> None:
        del self._attempts[address]
        self._ends[address] = end
        if end.cause is Cause.BROKEN:
            self._try_next()
        else:
            self._fail(end)

    def _on_timeout(self) -> None:
        self._ends.update(dict.fromkeys(self._attempts, LinkEnd(reason=NO_ANSWER)))
        self._fail(self._describe_end())

    def _describe_end(self) -> LinkEnd:
        """Return why no address could be reached."""
        first, *others = self._ends.values()
        if all(end == first for end in others):
            return first
        each = [f"{host}: {end.reason}" for (_, host), end in list(self._ends.items())[:_NAMED]]
        return LinkEnd(reason="; ".join(each))

    def _fail(self, end: LinkEnd) -> None:
        self.close()
        self._on_failed(end)

    def close(self) -> None:
        """See `Closing`."""
        self._closed = True
        self._timer.cancel()
        if self._next_timer is not None:
            self._next_timer.cancel()
        for attempt in self._attempts.values():
            attempt.close()
        self._attempts.clear()


class Attempt:
    """One address: a socket, then the handshake. See `TryAddress`."""

    def __init__(
        self, loop: Loop, address: Address, port: int, token: str | None, on_open: OnOpen, on_failed: OnFailed
    ) -> None:
        self._loop = loop
        self._token = token
        self._on_open = on_open
        self._on_failed = on_failed
        self._socket: socket.socket | None = None
        self._link: TcpLink | None = None
        self._closed = False
        family, host = address
        try:
            self._socket = socket.socket(family, socket.SOCK_STREAM)
            self._socket.setblocking(False)  # SOCK_NONBLOCK is Linux-only
            code = self._socket.connect_ex((host, port))
        except OSError as error:
            code = error.errno or errno.EIO
        if self._socket is not None and code in (0, errno.EINPROGRESS):
            loop.watch_writable(self._socket.fileno(), self._on_connected)
        else:
            loop.call_soon(lambda: self._fail(LinkEnd(reason=os.strerror(code))))

    def _on_connected(self) -> None:
        sock = self._socket
        if sock is None:
            return
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        # A socket may dial itself on an ephemeral port.
        if code == 0 and is_self_connected(sock):
            code = errno.ECONNREFUSED
        if code:
            self._fail(LinkEnd(reason=os.strerror(code)))
            return
        self._loop.unwatch(sock.fileno())
        try:
            link = TcpLink(self._loop, sock, self._token, is_server=False)
        except OSError as error:
            self._fail(LinkEnd(reason=error.strerror or str(error)))
            return
        self._socket, self._link = None, link
        link.owner = self
        if link.is_open:
            self._report_open()
        else:
            link.on_open = self._report_open

    def _report_open(self) -> None:
        link, self._link = self._link, None
        if link is not None and not self._closed:
            self._closed = True
            link.owner = None
            self._on_open(link)

    def on_message(self, link: Link, _frame: Frame | Message) -> None:
        """Do nothing: no message arrives before the link is open."""
        link.close()

    def on_closed(self, _link: Link, end: LinkEnd) -> None:
        """Handle an end during the handshake."""
        self._fail(end)

    def _fail(self, end: LinkEnd) -> None:
        if not self._closed:
            self.close()
            self._on_failed(end)

    def close(self) -> None:
        """See `Closing`."""
        self._closed = True
        if self._socket is not None:
            self._loop.unwatch(self._socket.fileno())
            self._socket.close()
            self._socket = None
        if self._link is not None:
            self._link.close()
            self._link = None


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
