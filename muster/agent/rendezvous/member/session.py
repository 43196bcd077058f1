"""A node's connection to its leader, from the first search to the end of the job: one link at a time.

A leader elsewhere and one on this node are reached through the same kind of link. When the link is lost, the node's
workers are killed at once (FENCED) and the search starts again. Over 400 lines: one class owns the link in all of its
states, and does what discovery and the initial role ask of it.
"""

from typing import Protocol

from muster._shared.codec import MalformedMessageError, clean_name
from muster.agent.config import RendezvousConfig
from muster.agent.rendezvous.consensus.members import find_silence_s
from muster.agent.rendezvous.interface import Lease, NoticeKind
from muster.agent.rendezvous.member.discovery import NEVER, Discovery, DiscoveryOptions
from muster.agent.rendezvous.member.initial_role import InitialRole
from muster.agent.rendezvous.member.lease_renewal import LeaseRenewal
from muster.agent.rendezvous.member.recovery import RecoveryTracker
from muster.agent.rendezvous.member.search import Target
from muster.agent.rendezvous.member.server import Server, build_server_options, find_endpoint
from muster.agent.rendezvous.protocol import leader_messages as down
from muster.agent.rendezvous.protocol import member_messages as up
from muster.agent.rendezvous.protocol.framing import Frame
from muster.agent.rendezvous.protocol.job_rules import build_job_rules
from muster.agent.rendezvous.protocol.messages import Message
from muster.agent.rendezvous.transport.addresses import is_loopback
from muster.agent.rendezvous.transport.links import Closing, Link, LinkEnd, LocalLink, Network
from muster.agent.runtime.loop import Loop, Timer

JOIN_ANSWER_LIMIT_S = 5.0
"""How long a leader that accepted the connection may take to answer the join."""
LINGER_S = 1.0
"""How long a member that knows the job's end stays for members whose leader ended before it sent the end."""
NO_LISTENER = "cannot open a listening socket where other nodes reach this one"
MALFORMED_PAUSE_S = 1.0
"""How soon a leader that sent a malformed message is asked again: it will most likely send another."""


class SessionOwner(Protocol):
    """What the session asks of the member: its rounds and the job's end."""

    @property
    def is_running(self) -> bool:
        """True while workers of a round may be alive."""
        ...

    @property
    def has_ended(self) -> bool:
        """True once the supervisor has received the end, or needs none."""
        ...

    @property
    def has_job_end(self) -> bool:
        """True once the leader has sent the job's end."""
        ...

    def build_join(self, listen_port: int) -> up.Join:
        """The join that this node sends."""
        ...

    def send_prepared(self) -> None:
        """The leader has accepted this node: report that it is prepared, if the join did not."""
        ...

    def handle_message(self, message: down.JobMessage) -> None:
        """Handle a message of the leader about rounds, or about the job's end."""
        ...

    def fence(self, reason: str) -> None:
        """Kill this node's workers at once: the other members may go on without it."""
        ...

    def post_job_end(self) -> None:
        """Post the job's end that the leader has sent."""
        ...

    def fail(self, reason: str, *, usage: bool = False) -> None:
        """End rendezvous without success."""
        ...

    def post_notice(self, text: str, kind: NoticeKind = NoticeKind.LINE, *, is_leader_lost: bool = False) -> None:
        """Post one line for the console."""
        ...


class Session:
    """Implements `DiscoveryOwner` and `InitialRoleOwner`, and owns the link to the leader. Close it with the member."""

    def __init__(
        self,
        config: RendezvousConfig,
        own_id: str,
        recovery: RecoveryTracker,
        owner: SessionOwner,
        *,
        loop: Loop,
        network: Network | None,
        lease: Lease | None,
    ) -> None:
        self._config = config
        self._recovery = recovery
        self._owner = owner
        self._loop = loop
        self._network = network
        server_options = build_server_options(config, own_id)
        self.server = Server(loop, network, server_options, recovery, owner.post_notice, self._on_other_leader)
        options = DiscoveryOptions(
            run_id=clean_name(config.run_id),
            own_id=own_id,
            endpoint=find_endpoint(config),
            join_timeout_s=config.join_timeout_s,
            job_rules=build_job_rules(config),
        )
        self._discovery = Discovery(loop, network, options, recovery, self)
        self._lease_renewal = LeaseRenewal(
            loop,
            lease,
            interval_s=config.keep_alive_interval_s,
            silence_s=find_silence_s(config),
            on_silent=self._on_silent,
            on_quorum_lost=self._on_quorum_lost,
        )
        self._initial_role = InitialRole(config, loop, network, self.server, self)
        self._link: Link | None = None
        self._is_accepted = False
        self._join_sent_s = 0.0
        self._probe: Closing | None = None
        self._join_timer: Timer | None = None
        self._is_endpoint_elsewhere = False
        """True when this node leads although the job's endpoint is another machine's address."""
        self._has_reported_no_answer = False

    # -- start ------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Find the leader, or lead."""
        if self._network is not None:
            self._discovery.set_deadline()
        self._initial_role.start()

    # -- rounds -----------------------------------------------------------------------------------------------------

    def begin_round(self, *, alone: bool, acknowledgement: up.MemberMessage) -> None:
        """Start the lease, and stop searching: this node's workers of a new round are about to start."""
        self._lease_renewal.start_lease(alone=alone)
        self.send(acknowledgement)
        self._discovery.stop()
        if self._config.lends_endpoint:
            self.server.lend_endpoint()
        elif isinstance(self._link, LocalLink) and self._network is not None:
            self.server.claim_endpoint(self._initial_role.listen_host)

    def listen_as_successor(self, start: down.RoundStart) -> bool:
        """Listen where the leader sends other nodes after its end: loopback, where this node joined, may be elsewhere.

        The rendezvous has failed when it is False.
        """
        if self._link is None or not is_loopback(self._link.local_host):
            return True
        own = [each.host for each in start.facts.value.successors if each.group_rank == start.group_rank]
        if all(self.server.listen_at(host) for host in own):
            return True
        self._owner.fail(NO_LISTENER)
        return False

    def end_round(self) -> None:
        """Release the lease and listen at the endpoint again: no worker and no store is left."""
        self._lease_renewal.release_lease()
        self.server.reclaim_endpoint(self._initial_role.listen_host)

    def check_expiry(self) -> bool:
        """See `LeaseRenewal`."""
        return self._lease_renewal.check_expiry()

    def stop(self) -> None:
        """Stop searching and sending heartbeats. Idempotent."""
        self._discovery.stop()
        self._lease_renewal.stop()
        self._cancel_timers()

    def close(self) -> None:
        """Close the link, and release every socket. Idempotent."""
        self.stop()
        self.server.close()
        if self._link is not None:
            self._link.close()
            self._link = None
        if self._probe is not None:
            self._probe.close()
        if self._network is not None:
            self._network.close()

    def _cancel_timers(self) -> None:
        self._discovery.cancel_deadline()
        if self._join_timer is not None:
            self._join_timer.cancel()
            self._join_timer = None

    @property
    def has_ended(self) -> bool:
        """See `InitialRoleOwner`."""
        return self._owner.has_ended

    def fail(self, reason: str, *, usage: bool = False) -> None:
        """See `DiscoveryOwner` and `InitialRoleOwner`."""
        self._owner.fail(reason, usage=usage)

    def post_notice(self, text: str) -> None:
        """See `DiscoveryOwner`."""
        self._owner.post_notice(text)

    # -- the link to the leader -------------------------------------------------------------------------------------

    @property
    def has_endpoint(self) -> bool:
        """See `DiscoveryOwner`."""
        return self.server.has_endpoint

    def can_join(self) -> bool:
        """See `DiscoveryOwner`."""
        is_free = self._link is None or self._may_give_way()
        return is_free and not self._owner.has_ended and not self._owner.is_running

    def can_start_leading(self) -> bool:
        """See `DiscoveryOwner`."""
        return not self._owner.has_ended and not self._owner.is_running and self._link is None

    def start_leading(self, *, takeover: bool) -> None:
        """See `DiscoveryOwner`."""
        self._attach(self.server.start_leading(takeover=takeover))

    def seek_other_leader(self) -> None:
        """See `InitialRoleOwner`. Until the first round is formed."""
        leader = self.server.leader
        if leader is not None and not leader.state.has_formed_round:
            self._is_endpoint_elsewhere = True
            self._discovery.start()

    def _may_give_way(self) -> bool:
        """True while this node leads, and joins a leader that it finds at the job's endpoint."""
        leader = self.server.leader
        is_new = self._is_endpoint_elsewhere and leader is not None and not leader.state.has_formed_round
        return is_new or self.server.is_candidate

    def join_at(self, link: Link, target: Target) -> None:
        """See `DiscoveryOwner`."""
        if self._may_give_way():
            if self._link is not None:
                self._link.close()
            self.server.stop_leading(target.host, target.port)
        self._lease_renewal.stop()
        self._attach(link)

    def _attach(self, link: Link) -> None:
        self._link = link
        self._is_accepted = False
        link.owner = self
        if not self._owner.is_running:
            self.send_join()

    def send_join(self) -> None:
        """Send a join. Only called while no worker of this node is alive."""
        if self._link is None:
            return
        if not self.server.listen_for(self._link, joins=True):
            self._owner.fail(NO_LISTENER)
            return
        self._join_sent_s = self._loop.clock.boottime_s()
        self._link.send(self._owner.build_join(self.server.port))
        if not isinstance(self._link, LocalLink):
            self._join_timer = self._loop.call_later(JOIN_ANSWER_LIMIT_S, self._on_join_timeout)

    @property
    def is_leading(self) -> bool:
        """True while the leader is on this node."""
        return isinstance(self._link, LocalLink)

    @property
    def static_master_addr(self) -> str:
        """MASTER_ADDR as it was given, or the address that answered: torch's store would try the silent one alone."""
        link = self._link
        return self._config.master_addr if link is None or not link.silent_host else link.peer_host

    @property
    def is_accepted(self) -> bool:
        """True while this node has a leader that has accepted it."""
        return self._is_accepted

    def send(self, message: up.MemberMessage) -> None:
        """Send to the leader; nothing happens while there is none."""
        if self._link is not None and self._is_accepted:
            self._link.send(message)

    def describe_wait(self, waited_s: float) -> str | None:
        """See `waiting_lines.describe_wait`."""
        from muster.agent.rendezvous.member.waiting_lines import (  # most nodes never wait so long
            WaitFacts,
            describe_wait,
        )

        leader = self.server.leader if isinstance(self._link, LocalLink) else None
        facts = WaitFacts(
            present=None if leader is None else len(leader.state.members),
            is_accepted=self._is_accepted,
            last_error=self._discovery.last_error,
            is_on_loopback=is_loopback(self._initial_role.listen_host or ""),
        )
        return describe_wait(self._config, find_endpoint(self._config), facts, waited_s)

    def report_or_rejoin(self, message: up.MemberMessage) -> None:
        """No worker is left: report it to the leader, or join the new one, or search again."""
        if self._is_accepted:
            self.send(message)
        elif self._link is not None:
            self.send_join()
        else:
            self._discovery.ask_now()

    def _on_join_timeout(self) -> None:
        if self._link is None or self._is_accepted:
            return
        index = self._config.node_index
        if index is not None and not self._has_reported_no_answer:
            self._has_reported_no_answer = True
            line = f"the leader at {self._link.peer_host} does not answer: does another node have --node-rank {index}?"
            self._owner.post_notice(line)
        self._drop_link("it does not answer", promise_until_s=-NEVER)

    def on_message(self, link: Link, frame: Frame | Message) -> None:
        """See `LinkOwner`. A malformed message drops the leader."""
        if link is not self._link or self._owner.has_ended or not self._lease_renewal.record_receipt():
            return
        try:
            message = down.LEADER_MESSAGES.read(frame)
        except MalformedMessageError as error:
            self._owner.post_notice(f"the leader sent a malformed message ({error})")
            why = "it sent a malformed message"
            self._drop_link(why, promise_until_s=self._lease_renewal.promise_until_s, pause_s=MALFORMED_PAUSE_S)
            return
        match message:
            case down.Welcome():
                self._on_accepted(message)
            case down.HeartbeatReply():
                self._on_heartbeat_reply(message)
            case down.Redirect():
                self._on_other_leader(message.host, message.port)
            case down.Goodbye():
                self._drop_link(message.reason, promise_until_s=-NEVER)
            case None:  # a message of a newer version
                return
            case _:
                self._owner.handle_message(message)

    def _on_accepted(self, welcome: down.Welcome) -> None:
        self._is_accepted = True
        self._recovery.record_leader(welcome.leader_id)
        self._cancel_timers()
        if self._link is None:
            return
        self._link.trust()
        if not isinstance(self._link, LocalLink):
            self.server.peer_lines.compare_release(f"the leader ({self._link.peer_host})", welcome.release)
            address = self._recovery.leader_address = (self._link.peer_host, welcome.listen_port)
            self.server.leader_address = address if address[1] else None
            if self._config.lends_endpoint and self._link.silent_host:
                name, silent = self._config.master_addr, self._link.silent_host
                why = f"{silent}, an address of {name}, does not answer"
                self._owner.post_notice(f"{why}: MASTER_ADDR is {self._link.peer_host} on this node")
            self._lease_renewal.follow(self._link, since_s=self._join_sent_s)
        elif self.server.leader is not None:
            self._lease_renewal.lead(self.server.leader.lease_until_s)
        self._owner.send_prepared()

    def _on_heartbeat_reply(self, reply: down.HeartbeatReply) -> None:
        self._lease_renewal.record_reply(reply)
        if reply.ended is not None:
            self._recovery.record_ended(*reply.ended)

    # -- the leader is lost -----------------------------------------------------------------------------------------

    def on_closed(self, link: Link, end: LinkEnd) -> None:
        """See `LinkOwner`. Without a goodbye, either the leader's process has ended or the connection broke."""
        if link is not self._link or self._owner.has_ended:
            return
        promise_until_s, address = self._lease_renewal.promise_until_s, self._recovery.leader_address
        led_rounds = self._recovery.led_rounds
        may_have_ended = self._lease_renewal.is_leased_elsewhere
        self._drop_link(end.reason, promise_until_s=promise_until_s if may_have_ended or self._is_accepted else -NEVER)
        if may_have_ended and self._network is not None and address is not None and address[1]:
            self._probe = self._network.probe(*address, lambda refused: self._on_probe(refused, led_rounds))

    def _on_probe(self, refused: bool, led_rounds: set[int]) -> None:
        """A refused immediate redial of the same address proves that the leader's process has ended."""
        self._probe = None
        if not refused or self._owner.has_ended:
            return
        self._discovery.promise_until_s = -NEVER
        self._recovery.record_leader_end(led_rounds)
        self._discovery.ask_now()

    def _on_silent(self) -> None:
        self._drop_link(
            f"no message for {find_silence_s(self._config):g} s", promise_until_s=self._lease_renewal.promise_until_s
        )

    def _on_quorum_lost(self) -> None:
        self._owner.fence("most nodes of the round cannot be reached and may continue without this one")

    def _drop_link(self, reason: str, *, promise_until_s: float, pause_s: float = 0.0) -> None:
        """Close the link, fence the workers, and search for a leader."""
        link, self._link = self._link, None
        if link is not None:
            link.close()
        was_accepted, self._is_accepted = self._is_accepted, False
        self.server.leader_address = None
        self._discovery.promise_until_s = promise_until_s
        self._lease_renewal.stop()
        self._cancel_timers()
        if self._owner.has_job_end:
            self._loop.call_later(LINGER_S, self._owner.post_job_end)
            return
        line = f"the leader was lost ({reason}): searching for it or its successor"
        if self._owner.is_running:
            self._owner.fence(line)
        elif was_accepted:
            self._owner.post_notice(line, is_leader_lost=True)
        self._discovery.set_deadline()
        if pause_s:
            self._loop.call_later(pause_s, self.start_discovery)
        else:
            self.start_discovery()

    def start_discovery(self) -> None:
        """See `InitialRoleOwner`. Nothing happens when a leader has been found meanwhile."""
        if not self._owner.has_ended and self._link is None:
            self._discovery.start()

    def _on_other_leader(self, host: str, port: int) -> None:
        """Another leader knows a later round: join it, and redirect this leader's members to it."""
        self.server.stop_leading(host, port)
        self._discovery.first_target = Target(host=host, port=port)
        self._discovery.stop()
        self._drop_link("another leader has replaced it", promise_until_s=-NEVER)
