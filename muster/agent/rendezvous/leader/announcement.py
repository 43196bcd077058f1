"""An acting leader's call at the job's endpoint, for a node 0 that comes back with empty memory.

It keeps calling as long as it leads: nobody there, somebody there who is a member already, and somebody there who has
just come back look the same until they answer.
"""

from collections.abc import Callable

from muster.agent.rendezvous.protocol.discovery_messages import (
    Announcement,
    AnnouncementRefused,
    build_announcement,
    read_announcement_reply,
)
from muster.agent.rendezvous.protocol.fields import MalformedMessageError
from muster.agent.rendezvous.protocol.framing import Message
from muster.agent.rendezvous.transport.links import Closing, Link, Network
from muster.agent.runtime.loop import Loop, Timer

INTERVAL_S = 0.5
ANSWER_LIMIT_S = 2.0
DIAL_LIMIT_S = 1.0
"""Shorter than the time a node 0 with empty memory holds back: it may come up right after a dial went unanswered."""


class TakeoverAnnouncer:
    """Calls until closed."""

    def __init__(
        self,
        loop: Loop,
        network: Network,
        endpoint: tuple[str, int],
        describe: Callable[[], Announcement],
        on_other_leader: Callable[[str, int], None],
    ) -> None:
        self._loop = loop
        self._network = network
        self._endpoint = endpoint
        self._describe = describe
        self._on_other_leader = on_other_leader
        self._dial: Closing | None = None
        self._link: Link | None = None
        self._heard_s = 0.0
        self._timer: Timer | None = None
        self._tick()

    def _tick(self) -> None:
        if self._link is not None and self._loop.clock.now_s() - self._heard_s > ANSWER_LIMIT_S:
            self._link.close()
            self._link = None
        if self._link is not None:
            self._link.send(build_announcement(self._describe()))
        elif self._dial is None:
            host, port = self._endpoint
            self._dial = self._network.connect(host, port, self._on_open, self._on_failed, DIAL_LIMIT_S)
        self._timer = self._loop.call_later(INTERVAL_S, self._tick)

    def _on_open(self, link: Link) -> None:
        self._dial = None
        self._link = link
        self._heard_s = self._loop.clock.now_s()
        link.owner = self
        link.send(build_announcement(self._describe()))

    def _on_failed(self, _why: str, _refused: bool) -> None:
        self._dial = None

    def on_message(self, link: Link, message: Message) -> None:
        """See `LinkOwner`."""
        self._heard_s = self._loop.clock.now_s()
        try:
            reply = read_announcement_reply(message)
        except MalformedMessageError:
            link.close()
            self._link = None
            return
        if isinstance(reply, AnnouncementRefused):
            self._on_other_leader(link.peer_host, reply.port)

    def on_closed(self, _link: Link, _reason: str) -> None:
        """See `LinkOwner`."""
        self._link = None

    def close(self) -> None:
        """Stop calling. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
        for closing in (self._dial, self._link):
            if closing is not None:
                closing.close()
        self._dial = self._link = None
