"""Where other nodes reach this one: its listeners, its leader if it leads, and the answers to first messages.

Every node listens on a port of its own, whether it leads or not. After the leader's end the members find the next
leader there, and a refused connection proves that this very process has ended. (The job's endpoint proves nothing,
because an adapter may keep that socket open across restarts.) It listens there only at the addresses by which others
reach it. One class owns all sockets that others connect to, and they are closed together.
"""

import errno
from collections.abc import Callable
from typing import TYPE_CHECKING

from muster._shared.codec import MalformedMessageError
from muster._shared.fields import Shared
from muster._shared.records import assert_never, replace
from muster.agent.config import RendezvousConfig
from muster.agent.rendezvous.consensus.members import build_rules
from muster.agent.rendezvous.interface import PostNotice
from muster.agent.rendezvous.leader.connections import LeaderOptions
from muster.agent.rendezvous.leader.leader import Leader
from muster.agent.rendezvous.leader.newcomers import PeerLines, refuse
from muster.agent.rendezvous.member.seeking import ENDPOINT_RETRY_S
from muster.agent.rendezvous.member.state import MemberState, find_endpoint
from muster.agent.rendezvous.protocol.framing import Frame
from muster.agent.rendezvous.protocol.job_rules import describe_difference
from muster.agent.rendezvous.protocol.messages import (
    ANNOUNCEMENT_ANSWERS,
    FIRST_MESSAGES,
    Announcement,
    AnnouncementAcknowledged,
    AnnouncementRefused,
    DiscoveryRole,
    Exit,
    Goodbye,
    Join,
    LeaderQuery,
    Message,
    QueryReply,
    StreamOpened,
    Welcome,
)
from muster.agent.rendezvous.transport.addresses import is_loopback, parse_numeric
from muster.agent.rendezvous.transport.links import Closing, Link, LinkEnd, Listener, LocalLink, Network, Reservation
from muster.agent.runtime.limits import ANNOUNCEMENT_DIAL_S, ANNOUNCEMENT_INTERVAL_S, ANNOUNCEMENT_REPLY_S
from muster.agent.runtime.loop import Loop, Timer

if TYPE_CHECKING:
    from muster.agent.rendezvous.interface import Stream


def choose_listen_host(config: RendezvousConfig) -> str | None:
    """Return the endpoint's address, or all if that is a name, because other nodes may resolve it differently."""
    host = find_endpoint(config)[0]
    if is_loopback(host):
        return None if config.has_stock_host and config.token else host
    return host if parse_numeric(host) is not None else None


class Server:
    """Owns the listeners and answers first messages. Close it with the member."""

    def __init__(
        self,
        loop: Loop,
        network: Network,
        get_state: Callable[[], MemberState],
        post_notice: PostNotice,
        on_other_leader: Callable[[str, int], None],
    ) -> None:
        self.leader: Leader | None = None
        self.on_stream: Callable[[str, Stream], None] | None = None
        self._loop = loop
        self._network = network
        self._get_state = get_state
        state = get_state()
        self._config = state.config
        self._own_id = state.own_id
        self._rules = build_rules(state.config)
        self._job_rules = state.job_rules
        """The rules that every member must have been started with."""
        self._shared_rules = Shared(self._job_rules)
        self._endpoint = find_endpoint(state.config)
        self._listen_host = choose_listen_host(state.config)
        """Where this node listens for the job's nodes; None means at every address."""
        self._post_notice = post_notice
        self.peer_lines = PeerLines(post_notice)
        self._on_other_leader = on_other_leader
        self._own_port: Reservation | None = None
        self._listeners: dict[str | None, Listener] = {}
        """Listeners on this process's own port, by address; None stands for all."""
        self._endpoint_listener: Listener | None = None
        self._connections: dict[Link, bool] = {}
        """True for connections that were sent the job's end, whose messages are ignored."""
        self._announcer: TakeoverAnnouncer | None = None
        self._is_takeover = False
        self._is_lent = False
        self._reclaim_timer: Timer | None = None

    @property
    def port(self) -> int:
        """Where this process listens; 0 if it needs no sockets."""
        return self._own_port.port if self._own_port is not None else 0

    def open(self) -> None:
        """Reserve this process's own port.

        Raises:
            OSError: no socket is available.
        """
        self._own_port = self._network.reserve()

    def listen_for(self, link: Link, *, joins: bool = False) -> bool:
        """Listen on this process's own port where the other end of a link reaches it; return False if impossible.

        With `joins`, also listen where the leader at the other end sends other nodes: at --local-addr, or at the same
        address.
        """
        host = link.local_host
        if not self.port or not host:
            return True
        if not joins:
            return self._listen_own(host)
        told: str | None = self._config.local_addr or host
        if parse_numeric(told or "") is None or (is_loopback(told or "") and not is_loopback(self._endpoint[0])):
            told = None  # a name, or a leader on this machine with another address outside
        return self._listen_own(told) and self._listen_own(host)

    def _listen_own(self, host: str | None) -> bool:
        if host in self._listeners or None in self._listeners:
            return True
        if host is None:  # excluded by listening on all addresses
            while self._listeners:
                self._listeners.popitem()[1].close()
        try:
            self._listeners[host] = self._network.listen(host, self.port, self._on_link, self._on_refused)
        except OSError as error:  # NAT, or link-local
            return host is not None and error.errno != errno.EADDRINUSE and self._listen_own(None)
        return True

    def listen_at(self, host: str) -> bool:
        """Listen on this process's own port where the leader sends other nodes; return False if that is impossible."""
        return not self.port or self._listen_own(None if parse_numeric(host) is None else host)

    def open_endpoint(self, fd: int | None = None) -> None:
        """Listen where the job's nodes search for their leader.

        Raises:
            OSError: the port is in use, or the address is not this machine's.
        """
        host, port, listen = self._listen_host, self._endpoint[1], self._network.listen
        if fd is not None:
            self._endpoint_listener = self._network.adopt(fd, self._on_link, self._on_refused)
            return
        try:
            self._endpoint_listener = listen(host, port, self._on_link, self._on_refused)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL or host is None:
                raise
            # Other nodes reach this one through NAT.
            self._endpoint_listener = listen(None, port, self._on_link, self._on_refused)

    def lend_endpoint(self) -> None:
        """Stop listening at the endpoint, because the workers' store will. Links accepted through it stay open."""
        if self._reclaim_timer is not None:
            self._reclaim_timer.cancel()
        if self._endpoint_listener is not None:
            self._endpoint_listener.close()
            self._endpoint_listener = None
            self._is_lent = True

    def reclaim_endpoint(self) -> None:
        """Listen again at a lent endpoint as soon as it is free, because returning nodes search there."""
        if not self._is_lent:
            return
        try:
            self.open_endpoint()
        except OSError:
            self._reclaim_timer = self._loop.call_later(ENDPOINT_RETRY_S, self.reclaim_endpoint)
        else:
            self._is_lent = False

    @property
    def has_endpoint(self) -> bool:
        """Whether this process listens at the job's endpoint."""
        return self._endpoint_listener is not None

    # -- leading ----------------------------------------------------------------------------------------------------

    def start_leading(self, *, takeover: bool) -> LocalLink:
        """Start to lead, or to be a candidate. The link is for this node's own member."""
        self._is_takeover = takeover
        options = LeaderOptions(
            rules=self._rules,
            job_rules=self._job_rules,
            silence_s=self._config.silence_s,
            takeover=takeover,
            must_find_last_round=self._config.incarnation > 0 and not takeover,
            notify=self._post_notice,
            own_id=self._own_id,
            listen_port=self.port,
        )
        self.leader = Leader(self._loop, self._network, options)
        return self.leader.attach_local()

    @property
    def has_formed_round(self) -> bool:
        """Whether this node leads and has formed a round."""
        return self.leader is not None and self.leader.state.has_formed_round

    @property
    def is_on_loopback(self) -> bool:
        """Whether only nodes on this machine reach the endpoint, if this process listens there."""
        return is_loopback(self._listen_host or "")

    @property
    def is_candidate(self) -> bool:
        """Whether this node attempts a takeover and has formed no round."""
        return self.leader is not None and self._is_takeover and not self.leader.state.has_formed_round

    def stop_leading(self, host: str, port: int) -> None:
        """Stop leading, and send the members to another leader."""
        if self.leader is not None:
            leader, self.leader = self.leader, None
            leader.redirect(host, port)
        if self._announcer is not None:
            self._announcer.close()
            self._announcer = None

    def claim_endpoint(self) -> None:
        """Listen at the endpoint after a takeover, or else announce this leader to the process that does."""
        if self._endpoint_listener is None and self._announcer is None:
            self._network.check_local(self._endpoint[0], self._open_or_announce)

    def _open_or_announce(self, local: bool) -> None:
        if self.leader is None or self._endpoint_listener is not None:
            return
        if local:
            try:
                self.open_endpoint()
            except OSError:
                local = False  # the old leader's successor was probably faster
        if not local:
            self._announcer = TakeoverAnnouncer(
                self._loop, self._network, self._endpoint, self._build_announcement, self._on_other_leader
            )

    def _build_announcement(self, link: Link) -> Announcement:
        self.listen_for(link)
        return Announcement(
            run_id=self._rules.run_id,
            id=self._own_id,
            round_number=0 if self.leader is None else self.leader.state.round_number,
            port=self.port,
            rules=self._job_rules,
        )

    # -- answers ----------------------------------------------------------------------------------------------------

    def _on_link(self, link: Link, frame: Frame | Message) -> None:
        link.owner = self
        self._connections[link] = False
        self.on_message(link, frame)

    def _on_refused(self, host: str, end: LinkEnd) -> None:
        self.peer_lines.print_once(f"refused a node at {host}: {end.reason}")

    def on_message(self, link: Link, frame: Frame | Message) -> None:
        """See `LinkOwner`. A connection that sends a malformed message is closed."""
        if self._connections.get(link):
            return
        run_id = self._rules.run_id
        try:
            request = FIRST_MESSAGES.read(frame)
        except MalformedMessageError as error:
            self._post_notice(f"closed the connection from {link.peer_host}: malformed message ({error})")
            self._close_link(link)
            return
        if request is not None and request.run_id != run_id:
            asked = f"it asks for run {request.run_id[:80]!r}, and this is run {run_id!r} (--rdzv-id)"
            self._refuse(link, asked, f"its --rdzv-id is {run_id!r}, not {request.run_id[:80]!r}")
            return
        if not self.listen_for(link):
            why = f"cannot listen on port {self.port} at {link.local_host}"
            self._refuse(link, f"this node {why}", f"the node that you asked {why}")
            return
        match request:
            case LeaderQuery():
                link.send(self._build_reply())
            case Join():
                self._answer_join(link, request)
            case Announcement():
                self._answer_announcement(link, request)
            case StreamOpened():
                self._pass_stream(link, request.feature)
            case None:
                self._close_link(link)
            case _:
                assert_never(request)

    def _build_reply(self) -> QueryReply:
        state = self._get_state()
        if self.leader is not None:
            role, round_number = (
                DiscoveryRole.CANDIDATE if self.is_candidate else DiscoveryRole.LEADER,
                self.leader.state.round_number,
            )
        else:
            role, round_number = (
                DiscoveryRole.FOLLOWING if state.leader_address is not None else DiscoveryRole.SEEKING,
                state.recovery.round_number,
            )
        if state.job_end is not None:
            role = DiscoveryRole.LEADER  # after joining, that node receives the end
        return QueryReply(
            role=role,
            round_number=round_number,
            group_rank=state.recovery.group_rank,
            id=self._own_id,
            index=self._config.node_index,
            leader=state.leader_address,
            rules=self._shared_rules,
        )

    def _answer_join(self, link: Link, join: Join) -> None:
        self._connections.pop(link, None)
        job_end = self._get_state().job_end
        if self.leader is not None:
            self.leader.admit(link, join)
        elif (difference := describe_difference(join.rules, self._job_rules)) is not None:
            ours = f"this agent was started with {difference}"
            self._refuse(link, f"it was started with {difference}", ours, usage=True)
        elif job_end is not None:
            link.trust()
            link.send(Welcome(leader_id=self._own_id, listen_port=self.port))
            link.send(replace(job_end, printer_id=None))
            link.send(Exit())
            self._connections[link] = True
        else:
            link.send(Goodbye(reason="it is not the leader"))
            link.close()

    def _pass_stream(self, link: Link, feature: str) -> None:
        """Pass a stream on. Only a node with the job's token may open one."""
        if not link.is_proved or self.on_stream is None:
            self._refuse(link, "it has no job token (MUSTER_TOKEN)", "streams of features need a job token")
            return
        self._connections.pop(link, None)
        stream = link.detach()
        if stream is not None:
            self.on_stream(feature, stream)

    def _answer_announcement(self, link: Link, announcement: Announcement) -> None:
        """Answer another leader that announces itself at the endpoint. The one with the later round continues to lead.

        A leader in a round does not join one with other rules. A leader without a round does, and is refused.
        """
        if self.leader is None or announcement.id == self._own_id:
            link.send(AnnouncementAcknowledged())
            return
        state = self.leader.state
        if state.has_formed_round and describe_difference(announcement.rules, self._job_rules) is not None:
            link.send(AnnouncementAcknowledged())
            return
        if state.has_formed_round and state.round_number > announcement.round_number:
            link.send(AnnouncementRefused(port=self.port))
        else:
            self._on_other_leader(link.peer_host, announcement.port)

    def _refuse(self, link: Link, line: str, reason: str, *, usage: bool = False) -> None:
        self._connections.pop(link, None)
        self.peer_lines.print_once(f"refused a node at {link.peer_host}: {line}")
        refuse(link, reason, usage=usage)

    def _close_link(self, link: Link) -> None:
        self._connections.pop(link, None)
        link.close()

    def on_closed(self, link: Link, _end: LinkEnd) -> None:
        """See `LinkOwner`."""
        self._connections.pop(link, None)

    def close(self) -> None:
        """Stop listening first, then close links, because an immediate redial must be refused. Idempotent."""
        self._is_lent = False
        if self._reclaim_timer is not None:
            self._reclaim_timer.cancel()
        if self._announcer is not None:
            self._announcer.close()
        for closing in (*self._listeners.values(), self._endpoint_listener, self._own_port):
            if closing is not None:
                closing.close()
        self._endpoint_listener = self._own_port = None
        if self.leader is not None:
            self.leader.close()
            self.leader = None
        for link in list(self._connections):
            self._close_link(link)


class TakeoverAnnouncer:
    """Announces an acting leader at the job's endpoint, for a node 0 that returns with empty state, until closed.

    It does so as long as it leads, because until there is a reply, a free endpoint, a member there and a node 0 that
    has just returned look the same.
    """

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
