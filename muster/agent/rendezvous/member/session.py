"""A node's way to its leader, from the first search to the last goodbye: one link at a time, welcome or not.

A leader elsewhere and the one of this very node are reached through the same kind of link. When it is gone, the node's
workers are stopped at once (FENCED) and the search begins anew.
"""

from typing import Protocol

from muster.agent.config import RendezvousConfig
from muster.agent.rendezvous.consensus.timing import find_silence_s
from muster.agent.rendezvous.interface import Lease
from muster.agent.rendezvous.member.discovery import NEVER, Discovery, DiscoveryOptions
from muster.agent.rendezvous.member.heartbeat import Heartbeats
from muster.agent.rendezvous.member.recovery import RecoveryTracker
from muster.agent.rendezvous.member.search import Target
from muster.agent.rendezvous.member.server import ENDPOINT_RETRY_S, Server, build_server_options, find_endpoint
from muster.agent.rendezvous.protocol import leader_messages as down
from muster.agent.rendezvous.protocol import member_messages as up
from muster.agent.rendezvous.protocol.fields import MalformedMessageError, host, text
from muster.agent.rendezvous.protocol.framing import Message
from muster.agent.rendezvous.protocol.job_rules import build_job_rules
from muster.agent.rendezvous.transport.addresses import is_loopback
from muster.agent.rendezvous.transport.links import Closing, Link, LocalLink, Network
from muster.agent.runtime.loop import Loop, Timer

WELCOME_LIMIT_S = 5.0
"""How long a leader that accepted the connection may take to answer `join`."""
LINGER_S = 1.0
"""How long a member that has the job's end stays for those whose leader ended before telling them."""
MALFORMED_PAUSE_S = 1.0
"""A leader that wrote nonsense will most likely do it again: not sooner than that."""


class SessionOwner(Protocol):
    """What the node takes part with: its rounds and its end."""

    @property
    def is_running(self) -> bool:
        """Workers of a round may be alive."""
        ...

    @property
    def is_over(self) -> bool:
        """The supervisor has been told the end, or needs none."""
        ...

    @property
    def knows_end(self) -> bool:
        """The leader has told the end; the word to go has not come."""
        ...

    def describe_join(self, listen_port: int) -> up.Join:
        """What the node asks to take part with."""
        ...

    def greet(self) -> None:
        """The leader has taken this node in: tell what has changed since it was asked."""
        ...

    def take(self, order: down.LeaderMessage) -> None:
        """The leader wrote of rounds, or of the end."""
        ...

    def fence(self, reason: str) -> None:
        """The others may go on without this node: its workers must die at once."""
        ...

    def finish(self) -> None:
        """Go, with the end that is known."""
        ...

    def lose_all(self, reason: str, *, usage: bool = False) -> None:
        """There is no hope."""
        ...

    def tell(self, text: str) -> None:
        """One line for the console."""
        ...


class Session:
    """Implements `Seeker`, and owns the link to the leader. Close it with the member."""

    def __init__(
        self,
        config: RendezvousConfig,
        own_id: str,
        memory: RecoveryTracker,
        part: SessionOwner,
        *,
        loop: Loop,
        network: Network | None,
        lease: Lease | None,
    ) -> None:
        self._config = config
        self._memory = memory
        self._part = part
        self._loop = loop
        self._network = network
        self.office = Server(loop, network, build_server_options(config, own_id), memory, part.tell, self._follow)
        options = DiscoveryOptions(
            run_id=text(config.run_id),
            own_id=own_id,
            endpoint=find_endpoint(config),
            join_timeout_s=config.join_timeout_s,
            job_rules=build_job_rules(config),
        )
        self._lookout = Discovery(loop, network, options, memory, self)
        self._pulse = Heartbeats(
            loop,
            lease,
            interval_s=config.keep_alive_interval_s,
            silence_s=find_silence_s(config),
            on_silent=self._on_silent,
            on_outvoted=self._on_outvoted,
        )
        self._link: Link | None = None
        self._is_welcome = False
        self._asked_s = 0.0
        self._probe: Closing | None = None
        self._welcome_timer: Timer | None = None
        self._has_told_taken = False

    # -- beginning --------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Find the leader, or be it."""
        if self._config.local_addr:
            try:
                host(self._config.local_addr)
            except MalformedMessageError as error:
                self._part.lose_all(f"--local-addr {self._config.local_addr!r}: {error}", usage=True)
                return
        if self._network is None:
            self.stand(takeover=False)
            return
        self._lookout.set_deadline()
        if self._config.max_nodes > 1:
            try:
                self.office.open(self._listen_host())
            except OSError as error:
                self._part.lose_all(f"no socket to listen on: {error}")
                return
        if self._config.is_host is not None:
            self._on_locality(self._config.is_host)  # --rdzv-conf is_host: the caller knows better than names do
        elif self._config.node_index is None:
            self._network.check_local(find_endpoint(self._config)[0], self._on_locality)
        else:
            self._on_locality(self._config.node_index == 0 or self._config.listen_fd is not None)

    def _listen_host(self) -> str | None:
        """Loopback for jobs of one machine without a token, so that nobody else can talk to them."""
        loopback = is_loopback(find_endpoint(self._config)[0])
        return "localhost" if loopback and not self._config.token else None

    def _on_locality(self, local: bool) -> None:
        """This node leads when the endpoint is its own, and still free."""
        if self._part.is_over:
            return
        if not local:
            self._lookout.start()
            return
        place = "{}:{}".format(*find_endpoint(self._config))
        try:
            self.office.open_endpoint(self._listen_host(), self._config.port, self._config.listen_fd)
        except OSError as error:
            if self._config.lends_endpoint:
                self._wait_for_endpoint(place, error)
                return
            if self._config.node_index is not None:
                self._part.tell(f"cannot listen at {place} ({error.strerror or error}): joining whoever leads there")
            self._lookout.start()
            return
        if self._listen_host() is None and not self._config.token:
            self._part.tell(
                f"rendezvous at {place} is open to the network and there is no MUSTER_TOKEN: anybody can join this job"
            )
        self.stand(takeover=False)

    def _wait_for_endpoint(self, place: str, error: OSError) -> None:
        """Nobody else can lead there: a store that a former agent of this node left is ended by its guard."""
        if not self._has_told_taken:
            self._has_told_taken = True
            self._part.tell(f"cannot listen at {place} ({error.strerror or error}): trying until the join timeout")
        self._loop.call_later(ENDPOINT_RETRY_S, lambda: self._on_locality(local=True))

    # -- around rounds ----------------------------------------------------------------------------------------------

    def begin_round(self, *, alone: bool, confirmation: Message) -> None:
        """A round was formed with this node: its workers are about to start."""
        self._pulse.hold_lease(alone=alone)
        self.send(confirmation)
        self._lookout.stop()
        if self._config.lends_endpoint:
            self.office.lend_endpoint()
        elif isinstance(self._link, LocalLink) and self._network is not None:
            self.office.take_endpoint(self._listen_host())

    def end_round(self) -> None:
        """No worker is left to fence, and no store listens any more."""
        self._pulse.drop_lease()
        self.office.reclaim_endpoint(self._listen_host())

    def notice_expiry(self) -> bool:
        """See `Heartbeats`."""
        return self._pulse.notice_expiry()

    def be_still(self) -> None:
        """Nothing is looked for, and nobody is beaten for. Idempotent."""
        self._lookout.stop()
        self._pulse.stop()
        self._cancel_timers()

    def close(self) -> None:
        """Hang up, and release every socket. Idempotent."""
        self.be_still()
        self.office.close()
        if self._link is not None:
            self._link.close()
            self._link = None
        if self._probe is not None:
            self._probe.close()
        if self._network is not None:
            self._network.close()

    def _cancel_timers(self) -> None:
        self._lookout.cancel_deadline()
        if self._welcome_timer is not None:
            self._welcome_timer.cancel()
            self._welcome_timer = None

    def lose_all(self, reason: str) -> None:
        """See `Seeker`."""
        self._part.lose_all(reason)

    def tell(self, text: str) -> None:
        """See `Seeker`."""
        self._part.tell(text)

    # -- a link to the leader ---------------------------------------------------------------------------------------

    @property
    def has_endpoint(self) -> bool:
        """See `Seeker`."""
        return self.office.has_endpoint

    def can_join(self) -> bool:
        """See `Seeker`."""
        return not self._part.is_over and not self._part.is_running and (self._link is None or self.office.is_candidate)

    def can_stand(self) -> bool:
        """See `Seeker`."""
        return not self._part.is_over and not self._part.is_running and self._link is None

    def stand(self, *, takeover: bool) -> None:
        """See `Seeker`. The named leader stands at once."""
        self._attach(self.office.lead(takeover=takeover))

    def join_at(self, link: Link, target: Target) -> None:
        """See `Seeker`."""
        if self.office.is_candidate:
            if self._link is not None:
                self._link.close()
            self.office.resign(target.host, target.port)
        self._pulse.stop()
        self._attach(link)

    def _attach(self, link: Link) -> None:
        self._link = link
        self._is_welcome = False
        link.owner = self
        if not self._part.is_running:
            self.ask()

    def ask(self) -> None:
        """Ask to take part. Only ever called while no worker of ours is alive."""
        if self._link is None:
            return
        self._asked_s = self._loop.clock.boottime_s()
        self._link.send(up.build_join(self._part.describe_join(self.office.port)))
        if not isinstance(self._link, LocalLink):
            self._welcome_timer = self._loop.call_later(WELCOME_LIMIT_S, self._on_no_welcome)

    @property
    def is_welcome(self) -> bool:
        """There is a leader, and it has taken this node in."""
        return self._is_welcome

    def send(self, message: Message) -> None:
        """Write to the leader; nothing happens while there is none."""
        if self._link is not None and self._is_welcome:
            self._link.send(message)

    def resume(self, message: Message) -> None:
        """Workers are gone: tell the leader, or ask the new one, or look for one."""
        if self._is_welcome:
            self.send(message)
        elif self._link is not None:
            self.ask()
        else:
            self._lookout.hurry()

    def _on_no_welcome(self) -> None:
        if self._link is not None and not self._is_welcome:
            self._lose_link("it does not answer", free_s=-NEVER)

    def on_message(self, link: Link, message: Message) -> None:
        """See `LinkOwner`. A leader that writes nonsense is left; what our own leader writes is a bug of ours."""
        if link is not self._link or self._part.is_over or not self._pulse.note_heard():
            return
        try:
            order = down.read_leader_message(message)
        except MalformedMessageError as error:
            if isinstance(link, LocalLink):
                raise
            self._part.tell(f"the leader sent a message that makes no sense ({error})")
            why = "it sent a message that makes no sense"
            self._lose_link(why, free_s=self._pulse.promise_s, pause_s=MALFORMED_PAUSE_S)
            return
        if isinstance(order, down.Welcome):
            self._on_welcome(order)
        elif isinstance(order, down.HeartbeatReply):
            self._on_answer(order)
        elif isinstance(order, down.Redirect):
            self._follow(order.host, order.port)
        elif isinstance(order, down.Goodbye):
            self._lose_link(order.reason, free_s=-NEVER)
        elif order is not None:
            self._part.take(order)

    def _on_welcome(self, welcome: down.Welcome) -> None:
        self._is_welcome = True
        self._memory.meet_leader(welcome.leader_id)
        self._cancel_timers()
        if self._link is None:
            return
        if not isinstance(self._link, LocalLink):
            place = self._memory.leader_place = (self._link.peer_host, welcome.listen_port)
            self.office.following = place if place[1] else None
            self._pulse.follow(self._link, since_s=self._asked_s)
        elif self.office.leader is not None:
            self._pulse.lead(self.office.leader.lease_until_s)
        self._part.greet()

    def _on_answer(self, answer: down.HeartbeatReply) -> None:
        self._pulse.take_answer(answer)
        if answer.ended is not None:
            self._memory.note_ended(*answer.ended)

    # -- the leader is lost -----------------------------------------------------------------------------------------

    def on_closed(self, link: Link, reason: str) -> None:
        """See `LinkOwner`. Closed without a word: either the leader's process has ended, or the connection broke."""
        if link is not self._link or self._part.is_over:
            return
        promise_s, rounds, place = self._pulse.promise_s, self._memory.session_rounds, self._memory.leader_place
        may_have_ended = self._pulse.is_alive_elsewhere
        self._lose_link(reason, free_s=promise_s if may_have_ended or self._is_welcome else -NEVER)
        if may_have_ended and self._network is not None and place is not None and place[1]:
            self._probe = self._network.probe(*place, lambda refused: self._on_probe(refused, rounds))

    def _on_probe(self, refused: bool, rounds: set[int]) -> None:
        """An immediate redial of the same address was refused: nobody else can have been the leader and still be."""
        self._probe = None
        if not refused or self._part.is_over:
            return
        self._lookout.free_s = -NEVER
        self._memory.note_leader_ended(rounds)
        self._lookout.hurry()

    def _on_silent(self) -> None:
        self._lose_link(f"nothing heard of it for {find_silence_s(self._config):g} s", free_s=self._pulse.promise_s)

    def _on_outvoted(self) -> None:
        self._part.fence("most nodes of the round cannot be heard and may go on without this one")

    def _lose_link(self, reason: str, *, free_s: float, pause_s: float = 0.0) -> None:
        """The link is gone or given up: kill, and look for a leader."""
        link, self._link = self._link, None
        if link is not None:
            link.close()
        was_welcome, self._is_welcome = self._is_welcome, False
        self.office.following = None
        self._lookout.free_s = free_s
        self._pulse.stop()
        self._cancel_timers()
        if self._part.knows_end:
            self._loop.call_later(LINGER_S, self._part.finish)
            return
        self._part.fence(f"the leader was lost: {reason}")
        if was_welcome:
            self._part.tell(f"lost the leader ({reason}): looking for it or its successor")
        self._lookout.set_deadline()
        if pause_s:
            self._loop.call_later(pause_s, self._look_around)
        else:
            self._look_around()

    def _look_around(self) -> None:
        if not self._part.is_over and self._link is None:
            self._lookout.start()

    def _follow(self, host: str, port: int) -> None:
        """Another leader knows a later round: go there, and take along who is here."""
        self.office.resign(host, port)
        self._lookout.hint = Target(host=host, port=port)
        self._lookout.stop()
        self._lose_link("it gave way to another leader", free_s=-NEVER)
