"""Looking for the leader: dials every place where it may be, asks who is there, and asks again until one is taken."""

from collections.abc import Callable

from muster.agent.rendezvous.protocol.discovery_messages import QueryReply, read_query_reply
from muster.agent.rendezvous.protocol.fields import MalformedMessageError
from muster.agent.rendezvous.protocol.framing import Message
from muster.agent.rendezvous.protocol.leader_messages import Rejected
from muster.agent.rendezvous.transport.links import Closing, Link, Network
from muster.agent.runtime.loop import Loop, Timer
from muster.agent.runtime.records import record

FIRST_INTERVAL_S = 0.05
LAST_INTERVAL_S = 0.5
GROWTH = 1.4
DIAL_LIMIT_S = 2.0
ANSWER_LIMIT_S = 5.0
"""A connection that gives no answer for so long leads to a machine that is gone: dial anew, it may have come back."""


@record
class Target:
    """A place to look."""

    host: str
    port: int
    rank: int | None = None
    """Group rank of the member that listens there; None: the endpoint of the job."""


class _Query:
    """One target: dialled, asked, asked again; dialled anew when it breaks."""

    def __init__(self, search: "Search", target: Target) -> None:
        self.target = target
        self.answered = False
        """True once the first try has had a result, whichever."""
        self._search = search
        self._dial: Closing | None = None
        self.link: Link | None = None
        self._asked_s = 0.0
        self._is_asking = False

    def try_again(self) -> None:
        if self.link is not None and self._is_asking and self._search.now_s() - self._asked_s > ANSWER_LIMIT_S:
            self.link.close()
            self.link = None
            self._note(f"{self.target.host}:{self.target.port}: no answer")
        if self.link is not None:
            if not self._is_asking:
                self._ask(self.link)
        elif self._dial is None:
            target = self.target
            network = self._search.network
            self._dial = network.connect(target.host, target.port, self._on_open, self._on_failed, DIAL_LIMIT_S)

    def _on_open(self, link: Link) -> None:
        self._dial = None
        self.link = link
        link.owner = self
        self._ask(link)

    def _ask(self, link: Link) -> None:
        self._is_asking = True
        self._asked_s = self._search.now_s()
        link.send(self._search.question)

    def _on_failed(self, why: str, _refused: bool) -> None:
        self._dial = None
        self._note(f"{self.target.host}:{self.target.port}: {why}")

    def _note(self, why: str) -> None:
        self.answered = True
        self._search.note(why, self.target)

    def on_message(self, link: Link, message: Message) -> None:
        """See `LinkOwner`."""
        self.answered = True
        self._is_asking = False
        try:
            reply = read_query_reply(message)
        except MalformedMessageError as error:
            link.close()
            self.link = None
            self._note(f"{self.target.host}:{self.target.port}: its answer made no sense ({error})")
            return
        if isinstance(reply, Rejected):
            if self.target.rank is None:
                self._search.on_reject(reply.reason)
        elif reply is not None and self._search.on_status(link, reply, self.target):
            self.link = None
            self._search.close()

    def on_closed(self, _link: Link, reason: str) -> None:
        """See `LinkOwner`."""
        self.link = None
        self._note(f"{self.target.host}:{self.target.port}: {reason}")

    def close(self) -> None:
        for closing in (self._dial, self.link):
            if closing is not None:
                closing.close()
        self._dial = self.link = None


class Search:
    """Asks all targets until closed, or until `on_status` takes a link by returning True."""

    def __init__(
        self,
        loop: Loop,
        network: Network,
        question: Message,
        on_status: Callable[[Link, QueryReply, Target], bool],
        on_round: Callable[[], None],
        on_reject: Callable[[str], None],
    ) -> None:
        self.network = network
        self.question = question
        self.on_status = on_status
        self.on_reject = on_reject
        self.why = ""
        """What the endpoint's last failure was, for the message at the join timeout."""
        self._loop = loop
        self._on_round = on_round
        self._inquiries: list[_Query] = []
        self._interval_s = FIRST_INTERVAL_S
        self._timer: Timer | None = None
        self._closed = False
        self._begun_s = loop.clock.now_s()

    def start(self, targets: list[Target]) -> None:
        """Begin; targets in order of preference."""
        self._inquiries = [_Query(self, target) for target in targets]
        self._tick()

    def add(self, target: Target) -> None:
        """Ask one more place from now on."""
        if all((i.target.host, i.target.port) != (target.host, target.port) for i in self._inquiries):
            self._inquiries.append(_Query(self, target))

    def _tick(self) -> None:
        for inquiry in list(self._inquiries):
            inquiry.try_again()
        self._timer = self._loop.call_later(self._interval_s, self._tick)
        self._interval_s = min(LAST_INTERVAL_S, self._interval_s * GROWTH)
        self._on_round()

    def now_s(self) -> float:
        """The loop's time."""
        return self._loop.clock.now_s()

    def age_s(self) -> float:
        """For how long it has been looking."""
        return self.now_s() - self._begun_s

    def hurry(self) -> None:
        """Ask again now: something has changed on this side."""
        if not self._closed:
            if self._timer is not None:
                self._timer.cancel()
            self._interval_s = FIRST_INTERVAL_S
            self._tick()

    def note(self, why: str, target: Target) -> None:
        """A target did not answer."""
        if target.rank is None or not self.why:
            self.why = why
        if not self._closed:
            self._on_round()

    def is_answered(self, below_rank: int) -> bool:
        """True when every member of a lower rank has answered or failed to."""
        return all(i.answered for i in self._inquiries if i.target.rank is not None and i.target.rank < below_rank)

    def close(self) -> None:
        """Forget all targets but a link that was taken. Idempotent."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for inquiry in self._inquiries:
            inquiry.close()
        self._inquiries = []
