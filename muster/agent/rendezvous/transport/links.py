"""What members and leader need of a network, and the two ends of one inside a process.

The real network is `network.TcpNetwork`; the simulation of the tests has its own. Nothing here knows of sockets.
"""

from collections.abc import Callable
from typing import Protocol

from muster.agent.rendezvous.protocol.framing import Message
from muster.agent.runtime.loop import Loop


class LinkOwner(Protocol):
    """Who listens to a link."""

    def on_message(self, link: "Link", message: Message) -> None:
        """A message came."""
        ...

    def on_closed(self, link: "Link", reason: str) -> None:
        """The other side closed it, or it broke. Comes once, and not after `close`."""
        ...


class Link(Protocol):
    """A two-way stream of messages. `owner` is set by who gets it and may be changed."""

    owner: LinkOwner | None
    local_host: str
    """This side's address, as the other side sees it."""
    peer_host: str
    """The other side's address, as this side sees it."""

    def send(self, message: Message) -> None:
        """Queue a message. Sending on a closed link does nothing."""
        ...

    def close(self) -> None:
        """Say what is queued, as far as it goes without waiting, and be gone. Idempotent."""
        ...


class Closing(Protocol):
    """Something to be closed; idempotent."""

    def close(self) -> None:
        """Release it."""
        ...


class Reservation(Closing, Protocol):
    """A port that nobody else can get while it is held, and that a TCPStore can still listen on."""

    port: int


class Listener(Closing, Protocol):
    """Accepts links."""

    port: int


class Network(Protocol):
    """Makes links. No call blocks; callbacks come on the loop, never before the call returns."""

    def connect(
        self,
        host: str,
        port: int,
        on_open: Callable[[Link], None],
        on_failed: Callable[[str, bool], None],
        timeout_s: float,
    ) -> Closing:
        """Open a link. `on_failed(why, refused)`; closing what is returned gives up without a callback."""
        ...

    def listen(self, host: str | None, port: int, on_link: Callable[[Link, Message], None]) -> Listener:
        """Accept links on an address (None: all). `on_link` gets a link with its first message.

        Raises:
            OSError: it cannot be bound.
        """
        ...

    def adopt(self, fd: int, on_link: Callable[[Link, Message], None]) -> Listener:
        """Accept links on an inherited listening socket."""
        ...

    def probe(self, host: str, port: int, on_result: Callable[[bool], None]) -> Closing:
        """Dial an address at once; True when it is refused: nobody listens there any more."""
        ...

    def check_local(self, host: str, on_result: Callable[[bool], None]) -> None:
        """True when one of the host's addresses can be bound here: found out by trying, not by comparing names."""
        ...

    def close(self) -> None:
        """Release everything that is left."""
        ...


class LocalLink:
    """One of two ends inside one process: how the leader's own node is a member like the others."""

    def __init__(self, loop: Loop) -> None:
        self.owner: LinkOwner | None = None
        self.local_host = self.peer_host = ""
        self._loop = loop
        self._other: LocalLink | None = None

    @staticmethod
    def pair(loop: Loop) -> "tuple[LocalLink, LocalLink]":
        """Two connected ends."""
        one, other = LocalLink(loop), LocalLink(loop)
        one._other, other._other = other, one
        return one, other

    def send(self, message: Message) -> None:
        """See `Link`."""
        other = self._other
        if other is not None:
            self._loop.call_soon(lambda: other.deliver(message))

    def deliver(self, message: Message) -> None:
        """A message of the other end arrives."""
        if self._other is not None and self.owner is not None:
            self.owner.on_message(self, message)

    def close(self) -> None:
        """See `Link`. What was sent before still arrives."""
        other, self._other = self._other, None
        if other is not None:
            self._loop.call_soon(other.hang_up)

    def hang_up(self) -> None:
        """The other end was closed."""
        if self._other is not None:
            self._other = None
            if self.owner is not None:
                self.owner.on_closed(self, "closed")
