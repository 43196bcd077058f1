"""Where others find this node: its listeners, the leader when this node leads, and what strangers are told.

Every node listens on a port of its own, whether it leads or not: after the leader's end the next one is found there,
and a refused connection there proves that this very process has ended (the job's endpoint proves nothing: an adapter
may keep that socket open across restarts).
"""

from collections.abc import Callable

from muster.agent.config import RendezvousConfig
from muster.agent.rendezvous.consensus.members import FENCE_S, ConsensusRules
from muster.agent.rendezvous.consensus.timing import find_margin_s, find_silence_s
from muster.agent.rendezvous.leader.announcement import TakeoverAnnouncer
from muster.agent.rendezvous.leader.connections import LeaderOptions
from muster.agent.rendezvous.leader.leader import Leader
from muster.agent.rendezvous.member.recovery import RecoveryTracker
from muster.agent.rendezvous.protocol.discovery_messages import (
    Announcement,
    LeaderQuery,
    QueryReply,
    build_announcement_acknowledgement,
    build_announcement_refusal,
    build_query_reply,
    read_first_message,
    read_run_id,
)
from muster.agent.rendezvous.protocol.fields import MalformedMessageError, text
from muster.agent.rendezvous.protocol.framing import Message
from muster.agent.rendezvous.protocol.job_rules import JobRules, build_job_rules, describe_difference
from muster.agent.rendezvous.protocol.leader_messages import (
    JobEnd,
    build_exit,
    build_goodbye,
    build_job_end,
    build_rejection,
    build_welcome,
)
from muster.agent.rendezvous.protocol.member_messages import Join
from muster.agent.rendezvous.transport.links import Link, Listener, LocalLink, Network
from muster.agent.runtime.loop import Loop, Timer
from muster.agent.runtime.records import record

ENDPOINT_RETRY_S = 0.2
"""How soon an endpoint that something else holds is tried again, where the workers' store has its place there too."""


@record
class ServerOptions:
    """Who this node is."""

    own_id: str
    own_index: int | None
    rules: ConsensusRules
    job_rules: JobRules
    silence_s: float
    local_addr: str | None
    endpoint: tuple[str, int]
    """Where the job's members look for their leader."""


def build_rules(config: RendezvousConfig) -> ConsensusRules:
    """The job's rules from one node's configuration."""
    silence_s = find_silence_s(config)
    return ConsensusRules(
        run_id=text(config.run_id),
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        max_restarts=config.max_restarts,
        join_timeout_s=config.join_timeout_s,
        last_call_s=config.last_call_timeout_s,
        rejoin_wait_s=silence_s - find_margin_s(silence_s) + FENCE_S,
    )


def build_server_options(config: RendezvousConfig, own_id: str) -> ServerOptions:
    """Who the node of this configuration is."""
    return ServerOptions(
        own_id=own_id,
        own_index=config.node_index,
        rules=build_rules(config),
        job_rules=build_job_rules(config),
        silence_s=find_silence_s(config),
        local_addr=config.local_addr,
        endpoint=find_endpoint(config),
    )


def find_endpoint(config: RendezvousConfig) -> tuple[str, int]:
    """Where the job's members look for their leader."""
    return config.host or "localhost", config.port


class Server:
    """Answers the door. Close it with the member."""

    def __init__(
        self,
        loop: Loop,
        network: Network | None,
        options: ServerOptions,
        memory: RecoveryTracker,
        tell: Callable[[str], None],
        on_other_leader: Callable[[str, int], None],
    ) -> None:
        self.leader: Leader | None = None
        self.verdict: JobEnd | None = None
        """The job's end, for those whose leader ended before it could tell them."""
        self.following: tuple[str, int] | None = None
        """Where this node's leader can be found, kept up by the member: for those who look for it here."""
        self._loop = loop
        self._network = network
        self._options = options
        self._memory = memory
        self._tell = tell
        self._on_other_leader = on_other_leader
        self._own: Listener | None = None
        self._endpoint: Listener | None = None
        self._guests: dict[Link, bool] = {}
        """True for those who have been told the end: nothing they say matters any more."""
        self._beacon: TakeoverAnnouncer | None = None
        self._takeover = False
        self._is_lent = False
        self._reclaim: Timer | None = None

    @property
    def port(self) -> int:
        """Where this process listens; 0 when it needs no sockets."""
        return self._own.port if self._own is not None else 0

    def open(self, host: str | None) -> None:
        """Listen on a port of this process's own.

        Raises:
            OSError: no socket can be had.
        """
        if self._network is not None:
            self._own = self._network.listen(host, 0, self._on_link)

    def open_endpoint(self, host: str | None, port: int, fd: int | None) -> None:
        """Listen where the job's members look for their leader.

        Raises:
            OSError: the port is taken, or the address is not ours.
        """
        if self._network is None:
            return
        if fd is not None:
            self._endpoint = self._network.adopt(fd, self._on_link)
        else:
            self._endpoint = self._network.listen(host, port, self._on_link)

    def lend_endpoint(self) -> None:
        """Stop listening at the endpoint: the workers' store is about to. Links that came through it stay."""
        if self._reclaim is not None:
            self._reclaim.cancel()
        if self._endpoint is not None:
            self._endpoint.close()
            self._endpoint = None
            self._is_lent = True

    def reclaim_endpoint(self, host: str | None) -> None:
        """Listen again at an endpoint that was lent, as soon as that can be: nodes that come back look there."""
        if not self._is_lent:
            return
        try:
            self.open_endpoint(host, self._options.endpoint[1], None)
        except OSError:
            self._reclaim = self._loop.call_later(ENDPOINT_RETRY_S, lambda: self.reclaim_endpoint(host))
        else:
            self._is_lent = False

    @property
    def has_endpoint(self) -> bool:
        """True when those who look for the job's leader arrive at this process."""
        return self._endpoint is not None

    # -- leading ----------------------------------------------------------------------------------------------------

    def lead(self, *, takeover: bool) -> LocalLink:
        """Begin to lead, or to stand as a candidate; the link is for this node's own member."""
        self._takeover = takeover
        options = LeaderOptions(
            rules=self._options.rules,
            job_rules=self._options.job_rules,
            silence_s=self._options.silence_s,
            takeover=takeover,
            local_addr=self._options.local_addr,
            notify=self._tell,
            own_id=self._options.own_id,
            listen_port=self.port,
        )
        self.leader = Leader(self._loop, self._network, options)
        return self.leader.attach_local()

    @property
    def is_candidate(self) -> bool:
        """True while this node stands for leadership without having formed a round."""
        return self.leader is not None and self._takeover and not self.leader.state.has_formed_round

    def resign(self, host: str, port: int) -> None:
        """Stop leading; send the members to another leader."""
        if self.leader is not None:
            leader, self.leader = self.leader, None
            leader.redirect(host, port)
        if self._beacon is not None:
            self._beacon.close()
            self._beacon = None

    def take_endpoint(self, host: str | None) -> None:
        """After a takeover: be where newcomers look, or else tell whoever comes to be there."""
        if self._network is None or self._endpoint is not None or self._beacon is not None:
            return
        self._network.check_local(self._options.endpoint[0], lambda local: self._settle_endpoint(host, local=local))

    def _settle_endpoint(self, host: str | None, *, local: bool) -> None:
        if self.leader is None or self._endpoint is not None:
            return
        if local:
            try:
                self.open_endpoint(host, self._options.endpoint[1], None)
            except OSError:
                local = False  # somebody else came first, most likely the old leader's successor process
        if not local and self._network is not None:
            options = self._options
            self._beacon = TakeoverAnnouncer(
                self._loop, self._network, options.endpoint, self._describe_call, self._on_other_leader
            )

    def _describe_call(self) -> Announcement:
        return Announcement(
            run_id=self._options.rules.run_id,
            id=self._options.own_id,
            round=0 if self.leader is None else self.leader.state.round,
            port=self.port,
            rules=self._options.job_rules,
        )

    # -- the door ---------------------------------------------------------------------------------------------------

    def _on_link(self, link: Link, message: Message) -> None:
        link.owner = self
        self._guests[link] = False
        self.on_message(link, message)

    def on_message(self, link: Link, message: Message) -> None:
        """See `LinkOwner`. Whoever brings nonsense is shown the door."""
        if self._guests.get(link):
            return
        run_id = self._options.rules.run_id
        try:
            theirs = read_run_id(message)
            visit = read_first_message(message) if theirs == run_id else None
        except MalformedMessageError as error:
            self._tell(f"dropped {link.peer_host}: a message made no sense ({error})")
            self._dismiss(link)
            return
        if theirs != run_id:
            link.send(build_rejection(f"this is run {run_id!r}, not {theirs[:80]!r}"))
            self._dismiss(link)
        elif isinstance(visit, LeaderQuery):
            link.send(build_query_reply(self._describe()))
        elif isinstance(visit, Join):
            self._admit(link, visit)
        elif isinstance(visit, Announcement):
            self._meet(link, visit)
        else:
            self._dismiss(link)

    def _describe(self) -> QueryReply:
        if self.leader is not None:
            role, number = "candidate" if self.is_candidate else "leader", self.leader.state.round
        else:
            role, number = "following" if self.following is not None else "seeking", self._memory.round
        if self.verdict is not None:
            role = "leader"  # who asks will join, and is told the end
        return QueryReply(
            role=role,
            round=number,
            rank=self._memory.rank,
            id=self._options.own_id,
            index=self._options.own_index,
            leader=self.following,
            rules=self._options.job_rules,
        )

    def _admit(self, link: Link, join: Join) -> None:
        self._guests.pop(link, None)
        if self.leader is not None:
            self.leader.admit(link, join)
        elif (difference := describe_difference(join.rules, self._options.job_rules)) is not None:
            link.send(build_rejection(f"this agent was started with {difference}", usage=True))
            link.close()
        elif self.verdict is not None:
            link.send(build_welcome(self._options.own_id, self.port))
            verdict = build_job_end(succeeded=self.verdict.succeeded, report=self.verdict.report)
            link.send(verdict.build_copy(prints_report=False))
            link.send(build_exit())
            self._guests[link] = True
        else:
            link.send(build_goodbye("it does not lead"))
            link.close()

    def _meet(self, link: Link, call: Announcement) -> None:
        """An acting leader calls at the endpoint: the one with the later round leads on.

        A job that runs here is not given up for one with other rules; a leader without a round goes there, and is
        refused.
        """
        if self.leader is None or call.id == self._options.own_id:
            link.send(build_announcement_acknowledgement())
            return
        state = self.leader.state
        if state.has_formed_round and describe_difference(call.rules, self._options.job_rules) is not None:
            link.send(build_announcement_acknowledgement())
            return
        if state.has_formed_round and state.round > call.round:
            link.send(build_announcement_refusal(self.port))
        else:
            self._on_other_leader(link.peer_host, call.port)

    def _dismiss(self, link: Link) -> None:
        self._guests.pop(link, None)
        link.close()

    def on_closed(self, link: Link, _reason: str) -> None:
        """See `LinkOwner`."""
        self._guests.pop(link, None)

    def close(self) -> None:
        """Stop listening first, then hang up: who redials at once must find the door shut. Idempotent."""
        self._is_lent = False
        if self._reclaim is not None:
            self._reclaim.cancel()
        if self._beacon is not None:
            self._beacon.close()
        for listener in (self._own, self._endpoint):
            if listener is not None:
                listener.close()
        self._own = self._endpoint = None
        if self.leader is not None:
            self.leader.close()
            self.leader = None
        for link in list(self._guests):
            self._dismiss(link)
