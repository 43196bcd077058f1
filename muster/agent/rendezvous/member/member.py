"""One node's part in the job: feeds events to `decisions.decide_member`, and acts on what it decides.

It adds identity and time: the link to the leader, the search's links, and when the lease ends.
"""

import os
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from muster._shared.codec import MalformedMessageError, clean_name
from muster._shared.processes import read_peak_bytes
from muster._shared.records import assert_never, replace
from muster.agent.config import RendezvousConfig
from muster.agent.rendezvous.consensus.actions import RoundStart
from muster.agent.rendezvous.interface import (
    JobMembers,
    LeaderClock,
    Lease,
    NodeMessage,
    Notice,
    NoticeKind,
    PostEvent,
    Summary,
)
from muster.agent.rendezvous.member import events as do
from muster.agent.rendezvous.member.decisions import NO_LISTENER, decide_member
from muster.agent.rendezvous.member.lease_renewal import LeaseRenewal
from muster.agent.rendezvous.member.search import Search
from muster.agent.rendezvous.member.server import Server
from muster.agent.rendezvous.member.state import build_initial_state, find_endpoint
from muster.agent.rendezvous.protocol.framing import Frame
from muster.agent.rendezvous.protocol.messages import (
    LEADER_MESSAGES,
    EndAcknowledged,
    HeartbeatReply,
    Join,
    LeaderQuery,
    MemberMessage,
    Message,
    QueryReply,
    StreamOpened,
)
from muster.agent.rendezvous.report_messages import Failed
from muster.agent.rendezvous.transport.addresses import is_loopback
from muster.agent.rendezvous.transport.links import Closing, Link, LinkEnd, LocalLink, Network, Reservation
from muster.agent.round import PartOffer
from muster.agent.runtime.loop import Loop, Timer

if TYPE_CHECKING:
    from muster.agent.rendezvous.interface import Stream


FIRST_WAIT_LINE_S = 3.0
"""After this time a node that waits for a round prints why, and again after each `NEXT_WAIT_LINE_S`."""
NEXT_WAIT_LINE_S = 60.0


class Member:
    """Implements `Rendezvous` and `LinkOwner`. Every method is called on the loop's thread."""

    def __init__(
        self,
        config: RendezvousConfig,
        *,
        nproc: int,
        role: str,
        loop: Loop,
        post: PostEvent,
        lease: Lease | None,
        node_name: str,
        network: Network,
        reserve: Callable[[], Reservation],
        member_id: str | None = None,
    ) -> None:
        self._config = config
        self._nproc = nproc
        self._role = role
        self._post = post
        self._node_name = node_name
        self._loop = loop
        self._network = network
        self.state = build_initial_state(config, member_id or os.urandom(8).hex())
        self._events: deque[do.Event] = deque()
        """Events to be decided; the first one is being decided."""
        self._ports = MasterPorts(reserve)
        self.server = Server(loop, network, lambda: self.state, self._print, self._resign)
        self._lease_renewal = LeaseRenewal(
            loop,
            lease,
            interval_s=config.keep_alive_interval_s,
            silence_s=config.silence_s,
            get_version=lambda: self.state.recovery.version,
            on_silent=self._on_silent,
            on_quorum_lost=lambda: self._feed(do.QuorumLost()),
        )
        self._search: Search | None = None
        self._link: Link | None = None
        """The link to the leader."""
        self._found: Link | None = None
        """The link to the node that has just answered the search."""
        self._join_sent_s = 0.0
        self._probe: Closing | None = None
        self._timers: dict[do.TimerKind, Timer] = {}
        self._waits_since_s = 0.0
        self._wait_timer: Timer | None = None
        self._can_host_store: Callable[[], bool] = bool
        self._list_offers: Callable[[], tuple[PartOffer, ...]] = tuple
        self._closed = False

    # -- called by the supervisor -----------------------------------------------------------------------------------

    def join(
        self,
        *,
        is_prepared: bool = True,
        can_host_store: Callable[[], bool] = bool,
        list_offers: Callable[[], tuple[PartOffer, ...]] = tuple,
        on_stream: "Callable[[str, Stream], None] | None" = None,
    ) -> None:
        """See `Rendezvous`."""
        self._can_host_store, self._list_offers = can_host_store, list_offers
        self.server.on_stream = on_stream
        self._ports.offer()
        open_error = ""
        if self._config.max_nodes > 1:
            try:
                self.server.open()
            except OSError as error:
                open_error = str(error)
        self._feed(do.Started(is_prepared=is_prepared, open_error=open_error))

    def send(self, message: NodeMessage) -> None:
        """See `Rendezvous`. Workers that the guard has killed because the lease has ended did not fail."""
        if not self._closed and not (isinstance(message, Failed) and self._lease_renewal.check_expiry()):
            self._feed(do.NodeSent(message=message))

    def open_stream(
        self,
        feature: str,
        address: tuple[str, int],
        on_open: "Callable[[Stream], None]",
        on_failed: Callable[[str], None],
    ) -> None:
        """See `Rendezvous`. Both sides prove the token in the handshake. Without a token nothing is sent."""

        def pass_on(link: Link) -> None:
            if not link.is_proved:
                link.close()
                on_failed("the job has no token (MUSTER_TOKEN)")
                return
            link.send(StreamOpened(run_id=clean_name(self._config.run_id), feature=feature))
            stream = link.detach()
            if stream is not None:
                on_open(stream)

        self._network.connect(*address, pass_on, lambda end: on_failed(end.reason), self._config.silence_s)

    def send_summary(self, summary: Summary) -> None:
        """See `Rendezvous`. Nothing is decided on it, so it is sent to a leader elsewhere or dropped."""
        connection, link = self.state.connection, self._link
        if self.state.has_ended or connection is None or not connection.is_accepted or self.state.is_leading:
            return
        if link is not None and not link.is_busy:
            link.send(summary)

    def read_members(self) -> JobMembers | None:
        """See `Rendezvous`."""
        leader = self.server.leader
        return leader.read_members() if leader is not None and self.state.is_leading else None

    def read_clock(self) -> LeaderClock | None:
        """See `Rendezvous`."""
        own_id, leader_id = self.state.own_id, self.state.recovery.leader_id
        if self.state.is_leading:
            return LeaderClock(own_id=own_id, leader_id=own_id)
        found = self._lease_renewal.read_clock()
        if found is None or leader_id is None:
            return None
        return LeaderClock(own_id=own_id, leader_id=leader_id, ahead_s=found[0], uncertainty_s=found[1])

    def close(self) -> None:
        """See `Rendezvous`."""
        if self._closed:
            return
        self._closed = True
        self.state = replace(self.state, has_ended=True)
        self._set_wait(is_on=False)
        self._stop_search()
        self._lease_renewal.stop()
        for timer in self._timers.values():
            timer.cancel()
        self.server.close()
        for closing in (self._link, self._probe):
            if closing is not None:
                closing.close()
        self._link = None
        self._network.close()
        self._ports.close()

    # -- what becomes an event --------------------------------------------------------------------------------------

    def on_message(self, link: Link, frame: Frame | Message) -> None:
        """See `LinkOwner`.

        A message that arrives after the end of the lease does not count as the leader's any more.
        """
        if link is not self._link or self.state.has_ended or not self._lease_renewal.record_receipt():
            return
        try:
            message = LEADER_MESSAGES.read(frame)
        except MalformedMessageError as error:
            promise_until_s = self._lease_renewal.promise_until_s
            self._feed(do.LeaderMalformed(error=str(error), promise_until_s=promise_until_s))
            return
        if message is None:
            return
        if isinstance(message, HeartbeatReply):
            self._lease_renewal.record_reply(message)
        is_reachable = not isinstance(message, RoundStart) or self._listen_as_successor(link, message)
        self._feed(do.LeaderSent(message=message, is_reachable=is_reachable))

    def _listen_as_successor(self, link: Link, start: RoundStart) -> bool:
        """Listen where the leader will send other nodes: loopback, where this node joined, may be another place.

        Return False if that is impossible.
        """
        if not is_loopback(link.local_host):
            return True
        own = [each.host for each in start.facts.value.successors if each.group_rank == start.group_rank]
        return all(self.server.listen_at(host) for host in own)

    def on_closed(self, link: Link, end: LinkEnd) -> None:
        """See `LinkOwner`."""
        if link is self._link:
            lease = self._lease_renewal
            self._feed(
                do.LinkClosed(
                    reason=end.reason,
                    promise_until_s=lease.promise_until_s,
                    is_leased_elsewhere=lease.is_leased_elsewhere,
                )
            )

    def _on_silent(self) -> None:
        until_s = self._lease_renewal.promise_until_s
        self._feed(do.LeaderSilent(silence_s=self._config.silence_s, promise_until_s=until_s))

    def _on_query_reply(self, link: Link, reply: QueryReply, target: do.Target) -> bool:
        """Return whether the decision is to keep this link."""
        if self._events:
            raise RuntimeError("an answer has arrived while another event is being decided")
        self._found = link
        self._feed(
            do.Answered(
                reply=reply,
                target=target,
                peer_host=link.peer_host,
                silent_host=link.silent_host,
                has_formed_round=self.server.has_formed_round,
            )
        )
        self._found = None
        return self._link is link

    def _on_search_progress(self) -> None:
        if self._search is not None:
            self._feed(
                do.SearchTurned(
                    unanswered=self._search.list_unanswered(),
                    age_s=self._search.age_s(),
                    failure=self._search.last_failure,
                    has_endpoint=self.server.has_endpoint,
                )
            )

    def _resign(self, host: str, port: int) -> None:
        self._feed(do.OtherLeaderFound(host=host, port=port))

    def _report_wait(self) -> None:
        from muster.agent.rendezvous.member.waiting_lines import (
            WaitFacts,
            describe_wait,
        )

        leader, connection = self.server.leader, self.state.connection
        facts = WaitFacts(
            present=None if leader is None or not self.state.is_leading else len(leader.state.members),
            hosts=() if leader is None else tuple(sorted({each.host for each in leader.state.members.values()})),
            is_accepted=connection is not None and connection.is_accepted,
            last_error="" if self._search is None else self._search.explain_missing_leader(),
            is_on_loopback=self.server.is_on_loopback,
            storm_s=0.0 if leader is None or not self.state.is_leading else leader.find_storm_s(),
        )
        waited_s = self._loop.clock.now_s() - self._waits_since_s
        self._wait_timer = self._loop.call_later(NEXT_WAIT_LINE_S, self._report_wait)
        self._feed(do.WaitDue(line=describe_wait(self._config, find_endpoint(self._config), facts, waited_s)))

    # -- decisions --------------------------------------------------------------------------------------------------

    def _feed(self, event: do.Event) -> None:
        self._events.append(event)
        if len(self._events) > 1:
            return  # from an action: finish the event before first
        try:
            while self._events:
                self.state, actions = decide_member(self.state, self._events[0], self._loop.clock.boottime_s())
                for action in actions:
                    self._act(action)
                self._events.popleft()
        finally:
            self._events.clear()  # a bug surfaces; then continue

    def _act(self, action: do.Action) -> None:  # noqa: C901  # one case for each
        match action:
            case do.Post():
                self._post(action.event)
            case do.SendUp():
                self._send(action.message)
            case do.SendStopped():
                offered, can_host_store = self._ports.offered, self._can_host_store()
                stopped = replace(action.stopped, port=offered, can_host_store=can_host_store)
                self._send(replace(stopped, offers=self._list_offers()))
            case do.AcknowledgeEnd():
                self._send(EndAcknowledged(peak_bytes=read_peak_bytes()))
            case do.SendJoin():
                self._send_join()
            case do.SetTimer():
                self._set_timer(action)
            case do.Wait():
                self._set_wait(is_on=action.is_on)
            case do.BeginRound():
                self._begin_round(action)
            case do.EndRound():
                self._lease_renewal.release_lease()
                self.server.reclaim_endpoint()
                self._ports.offer()
            case do.StopRenewal():
                self._lease_renewal.stop()
            case do.Search():
                self._start_search(action.targets)
            case do.AskAgain():
                if self._search is not None:
                    self._search.ask_now()
            case do.AddTarget():
                if self._search is not None:
                    self._search.add(action.target)
            case do.StopSearch():
                self._stop_search()
            case do.TakeLink():
                self._search, found = None, self._found
                if found is not None:
                    self._attach(found)
            case do.DropLink():
                self._lease_renewal.stop()
                if self._link is not None:
                    self._link.close()
                    self._link = None
            case do.Lead():
                self._attach(self.server.start_leading(takeover=action.takeover))
            case do.StopLeading():
                self.server.stop_leading(action.host, action.port)
            case do.FollowLeader():
                self._follow()
            case do.Probe():
                self._start_probe(action)
            case do.CheckLocal():
                self._check_local(is_check=action.is_check)
            case do.OpenEndpoint():
                self._open_endpoint()
            case _:
                assert_never(action)

    # -- the search -------------------------------------------------------------------------------------------------

    def _start_search(self, targets: tuple[do.Target, ...]) -> None:
        query = LeaderQuery(run_id=clean_name(self._config.run_id))
        self._search = Search(
            self._loop,
            self._network,
            query,
            self._on_query_reply,
            self._on_search_progress,
            lambda reason: self._feed(do.Excluded(reason=reason)),
        )
        self._search.start(list(targets))

    def _stop_search(self) -> None:
        if self._search is not None:
            self._search.close()
            self._search = None

    def _start_probe(self, action: do.Probe) -> None:
        def report(refused: bool) -> None:
            self._probe = None
            if refused:
                self._feed(do.LeaderEnded(led_rounds=action.led_rounds))

        self._probe = self._network.probe(action.host, action.port, report)

    def _check_local(self, *, is_check: bool) -> None:
        def report(is_local: bool) -> None:
            has_formed_round = self.server.has_formed_round
            self._feed(do.LocalChecked(is_local=is_local, is_check=is_check, has_formed_round=has_formed_round))

        self._network.check_local(find_endpoint(self._config)[0], report)

    def _open_endpoint(self) -> None:
        try:
            self.server.open_endpoint(self._config.listen_fd)
        except OSError as error:
            where = "{}:{}".format(*find_endpoint(self._config))
            reason = (error.strerror or str(error)).partition(" (while attempting")[0]  # Python names the address again
            self._feed(do.EndpointTried(error=f"cannot listen at {where} ({reason})"))
        else:
            self._feed(do.EndpointTried())

    # -- the link to the leader -------------------------------------------------------------------------------------

    def _attach(self, link: Link) -> None:
        self._link = link
        link.owner = self

    def _send(self, message: MemberMessage) -> None:
        if self._link is not None:
            self._link.send(message)

    def _send_join(self) -> None:
        if self._link is None:
            return
        if not self.server.listen_for(self._link, joins=True):
            self._feed(do.Excluded(reason=NO_LISTENER))
            return
        self._join_sent_s = self._loop.clock.boottime_s()
        config, recovery = self._config, self.state.recovery
        self._link.send(
            Join(
                run_id=clean_name(config.run_id),
                id=self.state.own_id,
                index=config.node_index,
                nproc=self._nproc,
                role=self._role,
                host=self._node_name,
                port=self._ports.offered,
                listen_port=self.server.port,
                local_addr=config.local_addr or None,
                rules=self.state.job_rules,
                is_prepared=self.state.is_prepared,
                can_host_store=self._can_host_store(),
                stop_limit_s=min(config.stop_limit_s, 1e7),
                machine=config.machine,
                machine_name=config.machine_name,
                segment=clean_name(config.segment or ""),
                recovery=recovery.record,
                group_ranks=recovery.group_ranks,
                highest_round=recovery.highest_round,
                last_leader_id=recovery.leader_id,
                offers=self._list_offers(),
                saved=self.state.saved,
            )
        )

    def _follow(self) -> None:
        link, leader = self._link, self.server.leader
        if link is None:
            return
        link.trust()
        if not isinstance(link, LocalLink):
            self._lease_renewal.follow(link, since_s=self._join_sent_s)
        elif leader is not None:
            self._lease_renewal.lead(leader.lease_until_s)

    def _begin_round(self, begin: do.BeginRound) -> None:
        self._ports.begin_round(hosts_rank_0=begin.hosts_rank_0)
        self._lease_renewal.start_lease(alone=begin.is_alone)
        if self._config.lends_endpoint:
            self.server.lend_endpoint()
        elif self.state.is_leading:
            self.server.claim_endpoint()

    # -- time -------------------------------------------------------------------------------------------------------

    def _set_timer(self, action: do.SetTimer) -> None:
        old, kind = self._timers.pop(action.kind, None), action.kind
        if old is not None:
            old.cancel()
        if action.delay_s is not None:
            self._timers[kind] = self._loop.call_later(action.delay_s, lambda: self._feed(do.TimerFired(kind=kind)))

    def _set_wait(self, *, is_on: bool) -> None:
        """Print why this node waits, if it does so for long."""
        if is_on and self._wait_timer is None:
            self._waits_since_s = self._loop.clock.now_s()
            self._wait_timer = self._loop.call_later(FIRST_WAIT_LINE_S, self._report_wait)
        elif not is_on and self._wait_timer is not None:
            self._wait_timer.cancel()
            self._wait_timer = None

    def _print(
        self, text: str, kind: NoticeKind = NoticeKind.LINE, ranks: tuple[int, ...] = (), feature: str = ""
    ) -> None:
        self._post(Notice(text=text, kind=kind, ranks=ranks, feature=feature))


class MasterPorts:
    """A fresh port for every round, so that no round reuses the store of an older one. Close it."""

    def __init__(self, reserve: Callable[[], Reservation]) -> None:
        self._reserve = reserve
        self._offer: Reservation | None = None
        self._held: Reservation | None = None

    @property
    def offered(self) -> int:
        """The port on offer; 0 if there is none."""
        return self._offer.port if self._offer is not None else 0

    def offer(self) -> None:
        """Reserve a port for the next round, unless one is reserved already."""
        if self._offer is None:
            self._offer = self._reserve()

    def begin_round(self, *, hosts_rank_0: bool) -> None:
        """Keep the offered port for the round if this node hosts rank 0; otherwise release it."""
        if self._held is not None:
            self._held.close()
            self._held = None
        if hosts_rank_0:
            self._held = self._offer
        elif self._offer is not None:
            self._offer.close()
        self._offer = None

    def close(self) -> None:
        """Release both ports. Idempotent."""
        for reservation in (self._offer, self._held):
            if reservation is not None:
                reservation.close()
