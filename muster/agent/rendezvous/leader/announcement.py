"""Announces an acting leader at the job's endpoint, for a node 0 that returns with empty state.

It does so as long as it leads, because until there is a reply, a free endpoint, a member there and a node 0 that has
just returned look the same.
"""

from collections.abc import Callable

from muster._shared.codec import MalformedMessageError
from muster.agent.rendezvous.protocol.framing import Frame
from muster.agent.rendezvous.protocol.messages import ANNOUNCEMENT_ANSWERS, Announcement, AnnouncementRefused, Message
from muster.agent.rendezvous.transport.links import Closing, Link, LinkEnd, Network
from muster.agent.runtime.limits import ANNOUNCEMENT_DIAL_S, ANNOUNCEMENT_INTERVAL_S, ANNOUNCEMENT_REPLY_S
from muster.agent.runtime.loop import Loop, Timer


class TakeoverAnnouncer:
    """Announces the leader until closed."""

    def __init__(
        self,
        loop: Loop,
        network: Network,
        endpoint: tuple[str, int],
        build: Callable[[Link], Announcement],
        on_other_leader: Callable[[str, int], None],
    ) -> None:
        self._loop = loop
        self._network = network
        self._endpoint = endpoint
        self._build = build
        self._on_other_leader = on_other_leader
        self._dial: Closing | None = None
        self._link: Link | None = None
        self._received_s = 0.0
        self._timer: Timer | None = None
        self._tick()

    def _tick(self) -> None:
        if self._link is not None and self._loop.clock.now_s() - self._received_s > ANNOUNCEMENT_REPLY_S:
            self._link.close()
            self._link = None
        if self._link is not None:
            self._link.send(self._build(self._link))
        elif self._dial is None:
            host, port = self._endpoint
            self._dial = self._network.connect(host, port, self._on_open, self._on_failed, ANNOUNCEMENT_DIAL_S)
        self._timer = self._loop.call_later(ANNOUNCEMENT_INTERVAL_S, self._tick)

    def _on_open(self, link: Link) -> None:
        self._dial = None
        self._link = link
        self._received_s = self._loop.clock.now_s()
        link.owner = self
        link.send(self._build(link))

    def _on_failed(self, _end: LinkEnd) -> None:
        self._dial = None

    def on_message(self, link: Link, frame: Frame | Message) -> None:
        """See `LinkOwner`."""
        self._received_s = self._loop.clock.now_s()
        try:
            answer = ANNOUNCEMENT_ANSWERS.read(frame)
        except MalformedMessageError:
            link.close()
            self._link = None
            return
        if isinstance(answer, AnnouncementRefused):
            self._on_other_leader(link.peer_host, answer.port)

    def on_closed(self, _link: Link, _end: LinkEnd) -> None:
        """See `LinkOwner`."""
        self._link = None

    def close(self) -> None:
        """Stop announcing. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
        for closing in (self._dial, self._link):
            if closing is not None:
                closing.close()
        self._dial = self._link = None
