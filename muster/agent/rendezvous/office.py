"""Where others find this node: its listeners, the leader when this node leads, and what strangers are told.

Every node listens on a port of its own, whether it leads or not: after the leader's end the next one is found there,
and a refused connection there proves that this very process has ended (the job's endpoint proves nothing: an adapter
may keep that socket open across restarts).
"""

from collections.abc import Callable

from muster.agent.loop import Loop
from muster.agent.records import record
from muster.agent.rendezvous.beacon import Beacon
from muster.agent.rendezvous.contacts import LeaderOptions
from muster.agent.rendezvous.leader import Leader
from muster.agent.rendezvous.links import Link, Listener, LocalLink, Network
from muster.agent.rendezvous.terms import Rules
from muster.agent.rendezvous.wire import Message


@record
class OfficeOptions:
    """Who this node is."""

    run_id: str
    own_id: str
    own_index: int | None
    rules: Rules
    silence_s: float
    local_addr: str | None
    endpoint_host: str | None
    endpoint_port: int


class Office:
    """Answers the door. Close it with the member."""

    def __init__(
        self,
        loop: Loop,
        network: Network | None,
        options: OfficeOptions,
        tell: Callable[[str], None],
        on_other_leader: Callable[[str, int], None],
    ) -> None:
        self.leader: Leader | None = None
        self.rank: int | None = None
        """This node's group rank in the last round it knows, kept up by the member."""
        self.round = 0
        self.verdict: Message | None = None
        """The job's end, for those whose leader ended before it could tell them."""
        self.following: tuple[str, int] | None = None
        """Where this node's leader can be found, kept up by the member: for those who look for it here."""
        self._loop = loop
        self._network = network
        self._options = options
        self._tell = tell
        self._on_other_leader = on_other_leader
        self._own: Listener | None = None
        self._endpoint: Listener | None = None
        self._guests: dict[Link, None] = {}
        self._beacon: Beacon | None = None
        self._takeover = False

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
            silence_s=self._options.silence_s,
            takeover=takeover,
            local_addr=self._options.local_addr,
            tell=self._tell,
            own_id=self._options.own_id,
            listen_port=self.port,
        )
        self.leader = Leader(self._loop, self._network, options)
        return self.leader.attach_local()

    @property
    def is_candidate(self) -> bool:
        """True while this node stands for leadership without having formed a round."""
        return self.leader is not None and self._takeover and not self.leader.state.in_office

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
        endpoint_host = self._options.endpoint_host or "localhost"
        self._network.check_local(endpoint_host, lambda local: self._settle_endpoint(host, local=local))

    def _settle_endpoint(self, host: str | None, *, local: bool) -> None:
        if self.leader is None or self._endpoint is not None:
            return
        if local:
            try:
                self.open_endpoint(host, self._options.endpoint_port, None)
            except OSError:
                local = False  # somebody else came first, most likely the old leader's successor process
        if not local and self._network is not None:
            endpoint = (self._options.endpoint_host or "localhost", self._options.endpoint_port)
            self._beacon = Beacon(self._loop, self._network, endpoint, self._build_call, self._on_other_leader)

    def _build_call(self) -> Message:
        return {
            "t": "acting",
            "run_id": self._options.run_id,
            "id": self._options.own_id,
            "round": 0 if self.leader is None else self.leader.state.round,
            "port": self.port,
        }

    # -- the door ---------------------------------------------------------------------------------------------------

    def _on_link(self, link: Link, message: Message) -> None:
        link.owner = self
        self._guests[link] = None
        self.on_message(link, message)

    def on_message(self, link: Link, message: Message) -> None:
        """See `LinkOwner`."""
        try:
            self._answer(link, message)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            self._tell(f"dropped {link.peer_host}: a message made no sense ({type(error).__name__}: {error})")
            self._guests.pop(link, None)
            link.close()

    def _answer(self, link: Link, message: Message) -> None:
        kind = message.get("t")
        run_id = self._options.run_id
        if message.get("run_id") != run_id:
            link.send({"t": "reject", "reason": f"this is run {run_id!r}, not {str(message.get('run_id'))[:80]!r}"})
            self._dismiss(link)
        elif kind == "ask":
            link.send(self._describe())
        elif kind == "join":
            self._admit(link, message)
        elif kind == "acting":
            self._meet(link, message)
        else:
            self._dismiss(link)

    def _describe(self) -> Message:
        if self.leader is not None:
            role, number = "candidate" if self.is_candidate else "leader", self.leader.state.round
        else:
            role, number = "following" if self.following is not None else "seeking", self.round
        if self.verdict is not None:
            role = "leader"  # who asks will join, and is told the end
        return {
            "t": "status",
            "role": role,
            "round": number,
            "rank": self.rank,
            "id": self._options.own_id,
            "index": self._options.own_index,
            "leader": self.following,
        }

    def _admit(self, link: Link, message: Message) -> None:
        self._guests.pop(link, None)
        if self.leader is not None:
            self.leader.admit(link, message)
        elif self.verdict is not None:
            link.send({"t": "welcome", "id": self._options.own_id, "listen": self.port})
            link.send({**self.verdict, "prints": False})
            link.send({"t": "exit"})
            self._guests[link] = None
        else:
            link.send({"t": "bye", "reason": "it does not lead"})
            link.close()

    def _meet(self, link: Link, message: Message) -> None:
        """An acting leader calls at the endpoint: the one with the later round leads on."""
        if self.leader is None or message["id"] == self._options.own_id:
            link.send({"t": "heard"})
            return
        state = self.leader.state
        if state.in_office and state.round > int(message["round"]):
            link.send({"t": "yield", "port": self.port})
        else:
            self._on_other_leader(link.peer_host, int(message["port"]))

    def _dismiss(self, link: Link) -> None:
        self._guests.pop(link, None)
        link.close()

    def on_closed(self, link: Link, _reason: str) -> None:
        """See `LinkOwner`."""
        self._guests.pop(link, None)

    def close(self) -> None:
        """Stop listening first, then hang up: who redials at once must find the door shut. Idempotent."""
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
