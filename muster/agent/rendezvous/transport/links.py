"""What members and the leader need of a network, and a link inside one process.

The real network is `tcp_network.TcpNetwork`; the simulation of the tests has its own. Nothing here knows sockets.
"""

from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING, Protocol

from muster._shared.records import record
from muster.agent.rendezvous.protocol.framing import Frame
from muster.agent.rendezvous.protocol.messages import Message
from muster.agent.runtime.loop import Loop

if TYPE_CHECKING:
    from muster.agent.rendezvous.interface import Stream


class Cause(Enum):
    """What kind of reason ended a link, or kept it from being opened."""

    BROKEN = "broken"
    """Closed, reset, or no answer: trying again may help."""
    REFUSED = "refused"
    """The handshake was refused because of another job token or version. Only a person can repair this."""
    FAULT = "fault"
    """This process could not even try."""


@record
class LinkEnd:
    """Why a link has ended, or could not be opened."""

    reason: str
    """One line."""
    cause: Cause = Cause.BROKEN


class LinkOwner(Protocol):
    """Receives a link's messages."""

    def on_message(self, link: "Link", frame: Frame | Message) -> None:
        """Handle a message: an unread frame, or a record if it comes from this same process."""
        ...

    def on_closed(self, link: "Link", end: LinkEnd) -> None:
        """Handle that the other side closed the link, that it broke, or has not joined in time.

        This is called once, and not after `close`.
        """
        ...


class Link(Protocol):
    """A two-way stream of messages. The code that receives the link sets `owner`, and may change it."""

    owner: LinkOwner | None
    local_host: str
    """This side's address, as the other side sees it."""
    peer_host: str
    """The other side's address, as this side sees it."""
    silent_host: str
    """The first address of the dialled name, if it had not answered before another one did; otherwise ""."""

    @property
    def is_proved(self) -> bool:
        """Whether the other side has proved the job's token, so that a refusal may give the reason."""
        ...

    @property
    def is_busy(self) -> bool:
        """Whether the other side has not taken all that was sent."""
        ...

    def send(self, message: Message) -> None:
        """Queue a message. Sending on a closed link does nothing."""
        ...

    def trust(self) -> None:
        """Lift the limits for unauthenticated peers, because the other side is a member or the leader."""
        ...

    def detach(self) -> "Stream | None":
        """Take the connection from the loop for a thread; nothing may be queued.

        Return None if the link has no connection.
        """
        ...

    def close(self) -> None:
        """Send what is queued, as far as possible without waiting, and close. Idempotent."""
        ...


class Closing(Protocol):
    """Something that can be closed; `close` is idempotent."""

    def close(self) -> None:
        """Release it."""
        ...


class Reservation(Closing, Protocol):
    """A port that no other process gets while it is reserved, but on which a TCPStore can still listen."""

    port: int


class Listener(Closing, Protocol):
    """Accepts links."""

    port: int


OnLink = Callable[[Link, Frame | Message], None]
OnRefused = Callable[[str, LinkEnd], None]
"""Gets the address of a peer whose handshake was refused, and why."""


class Network(Protocol):
    """Makes links. No call blocks. Callbacks come on the loop, and never before the call returns."""

    def connect(
        self,
        host: str,
        port: int,
        on_open: Callable[[Link], None],
        on_failed: Callable[[LinkEnd], None],
        timeout_s: float,
    ) -> Closing:
        """Open a link. Closing the returned object cancels this without a callback."""
        ...

    def listen(self, host: str | None, port: int, on_link: OnLink, on_refused: OnRefused | None = None) -> Listener:
        """Accept links on a numeric address or localhost (None: all). `on_link` gets a link with its first message.

        Raises:
            OSError: the address cannot be bound.
        """
        ...

    def reserve(self) -> Reservation:
        """Return a free port, kept on all addresses: `listen` takes it at those where others reach this process.

        Raises:
            OSError: no socket is available.
        """
        ...

    def adopt(self, fd: int, on_link: OnLink, on_refused: OnRefused | None = None) -> Listener:
        """Accept links on an inherited listening socket."""
        ...

    def probe(self, host: str, port: int, on_result: Callable[[bool], None]) -> Closing:
        """Connect to an address at once; the result is True if it is refused: no process listens there any more."""
        ...

    def check_local(self, host: str, on_result: Callable[[bool], None]) -> None:
        """Check whether one of the host's addresses can be bound here. This tries instead of comparing names."""
        ...

    def close(self) -> None:
        """Release what remains."""
        ...


class LocalLink:
    """One end of a link inside one process, because the leader's own node is a member like the others."""

    def __init__(self, loop: Loop) -> None:
        self.owner: LinkOwner | None = None
        self.local_host = self.peer_host = self.silent_host = ""
        self.is_proved = True
        self.is_busy = False
        self._loop = loop
        self._other: LocalLink | None = None

    @staticmethod
    def pair(loop: Loop) -> "tuple[LocalLink, LocalLink]":
        """Return two connected ends."""
        one, other = LocalLink(loop), LocalLink(loop)
        one._other, other._other = other, one
        return one, other

    def send(self, message: Message) -> None:
        """See `Link`."""
        other = self._other
        if other is not None:
            self._loop.call_soon(lambda: other.deliver(message))

    def detach(self) -> None:
        """See `Link`. This process already has what it would send itself."""

    def trust(self) -> None:
        """See `Link`. This process trusts itself."""

    def deliver(self, message: Message) -> None:
        """Hand a message of the other end to the owner."""
        if self._other is not None and self.owner is not None:
            self.owner.on_message(self, message)

    def close(self) -> None:
        """See `Link`. What was sent before still arrives."""
        other, self._other = self._other, None
        if other is not None:
            self._loop.call_soon(other.close_from_other_end)

    def close_from_other_end(self) -> None:
        """Close this end because the other one was closed."""
        if self._other is not None:
            self._other = None
            if self.owner is not None:
                self.owner.on_closed(self, LinkEnd(reason="closed"))
