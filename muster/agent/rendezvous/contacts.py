"""What the leader keeps of every member's connection, and what it is made of itself."""

from collections.abc import Callable

from muster.agent.records import record
from muster.agent.rendezvous.links import Link
from muster.agent.rendezvous.terms import Peer, Rules
from muster.agent.rendezvous.wire import Message


class Contact:
    """One member's connection. Made when it joins; the leader keeps the two times up."""

    __slots__ = ("heard_s", "host", "id", "index", "link", "listen_port", "local_addr", "promise_s")

    def __init__(self, peer: Peer, link: Link, message: Message, now_s: float) -> None:
        self.id = peer.id
        self.index = peer.index
        self.host = peer.host
        self.link = link
        self.local_addr: str | None = message["local_addr"]
        self.listen_port = int(message["listen"])
        """Where it accepts links after a takeover; 0: nowhere."""
        self.heard_s = now_s
        """When anything was last heard, CLOCK_BOOTTIME."""
        self.promise_s = now_s
        """The leader's own time stamp that the member last sent back: it stays with this leader for the silence limit
        from then on. CLOCK_BOOTTIME."""


@record
class Contender:
    """A member that came with the index of one that is still here."""

    link: Link
    message: Message
    since_s: float


@record
class LeaderOptions:
    """What a leader is made of besides the loop."""

    rules: Rules
    silence_s: float
    takeover: bool
    local_addr: str | None
    tell: Callable[[str], None]
    own_id: str
    """Of the member on the leader's node, which is the leader's id too."""
    listen_port: int
    """Where this process, and nothing but this process, listens: what is dialled to see whether it has ended."""
