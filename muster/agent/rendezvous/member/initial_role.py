"""What a node does first: it leads when the job's endpoint is its own and free, else it searches for the leader."""

from typing import Protocol

from muster._shared.codec import MalformedMessageError, read_host
from muster.agent.config import RendezvousConfig
from muster.agent.rendezvous.member.server import ENDPOINT_RETRY_S, Server, find_endpoint
from muster.agent.rendezvous.transport.addresses import is_loopback, parse_numeric
from muster.agent.rendezvous.transport.links import Network
from muster.agent.runtime.loop import Loop


class InitialRoleOwner(Protocol):
    """What the first role asks of the session."""

    @property
    def has_ended(self) -> bool:
        """True once the member needs no role any more."""
        ...

    def start_discovery(self) -> None:
        """Search for the leader."""
        ...

    def start_leading(self, *, takeover: bool) -> None:
        """Lead."""
        ...

    def seek_other_leader(self) -> None:
        """This node leads, and the endpoint is another machine's address: join the leader there, if there is one."""
        ...

    def fail(self, reason: str, *, usage: bool = False) -> None:
        """End rendezvous without success."""
        ...

    def post_notice(self, text: str) -> None:
        """Post one line for the console."""
        ...


class InitialRole:
    """Opens this node's sockets, and chooses its first role."""

    def __init__(
        self, config: RendezvousConfig, loop: Loop, network: Network | None, server: Server, owner: InitialRoleOwner
    ) -> None:
        self._config = config
        self._loop = loop
        self._network = network
        self._server = server
        self._owner = owner
        self._endpoint = "{}:{}".format(*find_endpoint(config))
        self._has_reported_taken_port = False
        self.listen_host = _choose_listen_host(config)
        """Where this node listens for nodes that search for their leader; None: at every address."""

    def start(self) -> None:
        """Lead, or search for the leader."""
        if not self._check_local_addr():
            return
        if self._network is None:
            self._owner.start_leading(takeover=False)
            return
        if self._config.max_nodes > 1:
            try:
                self._server.open()
            except OSError as error:
                self._owner.fail(f"cannot open a listening socket: {error}")
                return
        if self._config.is_host is not None:
            self._choose(self._config.is_host)  # --rdzv-conf is_host overrides what the name resolves to
        elif self._config.node_index is None:
            self._network.check_local(find_endpoint(self._config)[0], self._choose)
        else:
            self._choose(self._config.node_index == 0 or self._config.listen_fd is not None)

    def _check_local_addr(self) -> bool:
        try:
            read_host(self._config.local_addr or "localhost")
        except MalformedMessageError as error:
            self._owner.fail(f"--local-addr {self._config.local_addr!r}: {error}", usage=True)
            return False
        return True

    def _choose(self, is_local: bool) -> None:
        """Lead when the endpoint is on this machine and still free, else search for the leader."""
        if self._owner.has_ended:
            return
        if not is_local:
            self._owner.start_discovery()
            return
        try:
            self._server.open_endpoint(self.listen_host, self._config.port, self._config.listen_fd)
        except OSError as error:
            self._handle_taken_endpoint(f"cannot listen at {self._endpoint} ({error.strerror or error})")
            return
        if self._config.max_nodes > 1 and not self._config.token and self._network is not None:
            self._owner.post_notice(
                f"rendezvous at {self._endpoint} has no MUSTER_TOKEN: any process that reaches it can join this job "
                "and run code in it; set one on all nodes, made with `openssl rand -hex 32`"
            )
        self._owner.start_leading(takeover=False)
        if self._network is not None and self._may_be_another_node_0():
            self._network.check_local(find_endpoint(self._config)[0], self._seek_other_leader)

    def _may_be_another_node_0(self) -> bool:
        """True when this node leads for its --node-rank alone, for the first time: a mistake on the command line."""
        config = self._config
        return config.node_index == 0 and config.listen_fd is None and config.is_host is None and not config.incarnation

    def _seek_other_leader(self, is_local: bool) -> None:
        if not is_local:
            self._owner.seek_other_leader()

    def _handle_taken_endpoint(self, why: str) -> None:
        """Join the leader there, or try again where the workers' store listens at the endpoint.

        There no other node can lead, and the guard ends a store that this node's last agent left behind.
        """
        if self._config.lends_endpoint:
            if not self._has_reported_taken_port:
                self._has_reported_taken_port = True
                self._owner.post_notice(f"{why}: retrying until the join timeout; every node needs its own --node-rank")
            self._loop.call_later(ENDPOINT_RETRY_S, lambda: self._choose(True))
            return
        if self._config.node_index is not None:
            self._owner.post_notice(f"{why}: joining the leader there")
        self._owner.start_discovery()


def _choose_listen_host(config: RendezvousConfig) -> str | None:
    """The endpoint's address. All where it is a name: other nodes may know another address by it."""
    host = find_endpoint(config)[0]
    if is_loopback(host):
        return None if config.has_stock_host and config.token else host
    return host if parse_numeric(host) is not None else None
