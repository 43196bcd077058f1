"""Chooses the backend, and imports only that one."""

from muster._shared.records import replace
from muster.agent.config import RendezvousConfig
from muster.agent.rendezvous.interface import Lease, Notice, PostEvent, Rendezvous
from muster.agent.runtime.loop import Loop

OWN_NAMES = frozenset({"muster", "c10d"})
"""On our command line `c10d` means muster's own; torch's is `c10d-torch`."""


def create_rendezvous(
    config: RendezvousConfig,
    nproc: int,
    role: str,
    loop: Loop,
    lease: Lease | None,
    node_name: str,
    post: PostEvent,
) -> Rendezvous:
    """Return the backend that `config` names, ready for `join`.

    Args:
        config: where and how the nodes find each other.
        nproc: the number of workers on this node.
        role: the role whose role ranks are counted together.
        loop: the agent's.
        lease: the guard's; None if there is no guard.
        node_name: this machine's name in reports.
        post: gets the events, on the loop.

    Raises:
        UsageError: torch knows no backend of that name, or it refuses its parameters.
    """
    if config.standalone or (config.backend == "static" and config.max_nodes == 1):
        from muster.agent.rendezvous.one_node import OneNodeRendezvous

        return OneNodeRendezvous(config, nproc=nproc, loop=loop, post=post, node_name=node_name)
    if config.backend not in OWN_NAMES and config.backend != "static":
        from muster.agent.rendezvous.torch_handlers.rendezvous import create_torch_rendezvous

        return create_torch_rendezvous(config, nproc, role, loop, post, node_name)
    from muster.agent.rendezvous.member.member import Member
    from muster.agent.rendezvous.transport.addresses import FixedPort
    from muster.agent.rendezvous.transport.tcp_network import TcpNetwork
    from muster.agent.runtime.ports import PortReservation

    config = add_shared_token(config, post)
    return Member(
        config,
        nproc=nproc,
        role=role,
        loop=loop,
        post=post,
        lease=lease,
        node_name=node_name,
        network=TcpNetwork(loop, config.token),
        reserve=(lambda: FixedPort(config.master_port)) if config.lends_endpoint else PortReservation,
    )


def add_shared_token(config: RendezvousConfig, post: PostEvent) -> RendezvousConfig:
    """Give the agents of one user a common token if all nodes are on this machine, which may have other users."""
    from muster.agent.rendezvous.transport.addresses import is_loopback

    if config.max_nodes == 1 or config.token is not None or not is_loopback(config.host or "localhost"):
        return config
    from muster.agent.rendezvous.shared_token import find_shared_token

    try:
        return replace(config, token=find_shared_token(config.port), has_shared_token=True)
    except OSError as error:
        post(Notice(text=f"no token for the nodes on this machine: {error}"))
        return config
