"""Searches for the leader: connects to every address where it may be, sends a query, and repeats this until closed."""

from collections.abc import Callable

from muster._shared.codec import MalformedMessageError
from muster._shared.records import assert_never, replace
from muster.agent.rendezvous.member.events import Target
from muster.agent.rendezvous.protocol.framing import Frame
from muster.agent.rendezvous.protocol.messages import QUERY_ANSWERS, LeaderQuery, Message, QueryReply, Rejected
from muster.agent.rendezvous.transport.links import Closing, Link, LinkEnd, Network
from muster.agent.runtime.loop import Loop, Timer

FIRST_INTERVAL_S = 0.05
LAST_INTERVAL_S = 0.5
GROWTH = 1.4
CONNECT_LIMIT_S = 2.0
ANSWER_LIMIT_S = 5.0
"""A connection without an answer for this long leads to a machine that is gone. Connect again, because it may be back.
"""

SILENT = "it does not answer: is another program using the port?"

RENEW_S = 5.0
"""How long a connection is used: well below the time after which the other node closes one that has not joined."""


class _Query:
    """The connection to one target. It sends queries, and connects again when the connection breaks."""

    def __init__(self, search: "Search", target: Target) -> None:
        self.target = target
        self.has_result = False
        """Whether the first try has succeeded or failed."""
        self._search = search
        self._attempt: Closing | None = None
        self.link: Link | None = None
        self._opened_s = self._asked_s = 0.0
        self._is_waiting = False

    def retry(self) -> None:
        if self.link is not None and self._is_waiting and self._search.now_s() - self._asked_s > ANSWER_LIMIT_S:
            self.link.close()
            self.link = None
            self._report_failure(LinkEnd(reason=SILENT))
        if self.link is not None and not self._is_waiting and self._search.now_s() - self._opened_s > RENEW_S:
            self.link.close()
            self.link = None
        if self.link is not None:
            if not self._is_waiting:
                self._send_query(self.link)
        elif self._attempt is None:
            target, connect = self.target, self._search.network.connect
            self._attempt = connect(target.host, target.port, self._on_open, self._on_failed, CONNECT_LIMIT_S)

    def _on_open(self, link: Link) -> None:
        self._attempt = None
        self.link = link
        self._opened_s = self._search.now_s()
        link.owner = self
        self._send_query(link)

    def _send_query(self, link: Link) -> None:
        self._is_waiting = True
        self._asked_s = self._search.now_s()
        link.send(self._search.query)

    def _on_failed(self, end: LinkEnd) -> None:
        self._attempt = None
        self._report_failure(end)

    def _report_failure(self, end: LinkEnd) -> None:
        self.has_result = True
        reason = f"{self.target.host}:{self.target.port}: {end.reason}"
        self._search.record_failure(replace(end, reason=reason), self.target)

    def on_message(self, link: Link, frame: Frame | Message) -> None:
        """See `LinkOwner`."""
        self.has_result = True
        self._is_waiting = False
        try:
            answer = QUERY_ANSWERS.read(frame)
        except MalformedMessageError as error:
            link.close()
            self.link = None
            self._report_failure(LinkEnd(reason=f"it sent a malformed answer ({error})"))
            return
        match answer:
            case Rejected():
                if self.target.group_rank is None:
                    self._search.on_reject(answer.reason)
            case QueryReply():
                if self._search.on_reply(link, answer, self.target):
                    self.link = None
                    self._search.close()
            case None:
                return
            case _:
                assert_never(answer)

    @property
    def is_unanswered(self) -> bool:
        """Whether a query is out and no answer has come."""
        return self.link is not None and self._is_waiting

    def on_closed(self, _link: Link, end: LinkEnd) -> None:
        """See `LinkOwner`."""
        self.link = None
        self._report_failure(end)

    def close(self) -> None:
        for closing in (self._attempt, self.link):
            if closing is not None:
                closing.close()
        self._attempt = self.link = None


class Search:
    """Asks all targets until closed, or until `on_reply` keeps a link by returning True."""

    def __init__(
        self,
        loop: Loop,
        network: Network,
        query: LeaderQuery,
        on_reply: Callable[[Link, QueryReply, Target], bool],
        on_progress: Callable[[], None],
        on_reject: Callable[[str], None],
    ) -> None:
        self.network = network
        self.query = query
        self.on_reply = on_reply
        self.on_reject = on_reject
        self.last_failure: LinkEnd | None = None
        """The endpoint's last failure, for the message at the join timeout."""
        self._loop = loop
        self._on_progress = on_progress
        self._queries: list[_Query] = []
        self._interval_s = FIRST_INTERVAL_S
        self._timer: Timer | None = None
        self._closed = False
        self._started_s = loop.clock.now_s()

    def start(self, targets: list[Target]) -> None:
        """Start with the targets in order of preference."""
        self._queries = [_Query(self, target) for target in targets]
        self._tick()

    def add(self, target: Target) -> None:
        """Ask one more target from now on."""
        if all((q.target.host, q.target.port) != (target.host, target.port) for q in self._queries):
            self._queries.append(_Query(self, target))

    def _tick(self) -> None:
        for query in list(self._queries):
            query.retry()
        self._timer = self._loop.call_later(self._interval_s, self._tick)
        self._interval_s = min(LAST_INTERVAL_S, self._interval_s * GROWTH)
        self._on_progress()

    def now_s(self) -> float:
        """Return the loop's time."""
        return self._loop.clock.now_s()

    def age_s(self) -> float:
        """Return how long the search has run."""
        return self.now_s() - self._started_s

    def ask_now(self) -> None:
        """Ask all targets again now, because this node's state has changed."""
        if not self._closed:
            if self._timer is not None:
                self._timer.cancel()
            self._interval_s = FIRST_INTERVAL_S
            self._tick()

    def record_failure(self, end: LinkEnd, target: Target) -> None:
        """Record that a target did not answer."""
        if target.group_rank is None or self.last_failure is None:
            self.last_failure = end
        if not self._closed:
            self._on_progress()

    def explain_missing_leader(self) -> str:
        """Return why no leader was found at the endpoint; "" if nothing is known."""
        silent = [q.target for q in self._queries if q.target.group_rank is None and q.is_unanswered]
        if silent:
            return f"{silent[0].host}:{silent[0].port}: {SILENT}"
        return "" if self.last_failure is None else self.last_failure.reason

    def list_unanswered(self) -> tuple[int, ...]:
        """Return the group ranks of the members that have neither answered nor failed to."""
        ranks = [q.target.group_rank for q in self._queries if not q.has_result]
        return tuple(rank for rank in ranks if rank is not None)

    def close(self) -> None:
        """Close all links except one that `on_reply` kept. Idempotent."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for query in self._queries:
            query.close()
        self._queries = []
