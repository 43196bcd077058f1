"""Words why a node waits. Pure; imported by `member` once a node has waited for a few seconds."""

from muster._shared.records import record
from muster.agent.config import RendezvousConfig
from muster.agent.rendezvous.interface import STORM_REASON

LONG_S = 60.0
"""After this time a member prints its own line. Until then its leader's lines are enough."""

_NAMED = 8
"""How many machines a line names."""


@record
class WaitFacts:
    """What a node knows while it waits for a round."""

    present: int | None = None
    """How many nodes have joined, if this node leads."""
    hosts: tuple[str, ...] = ()
    """Their machines, in order."""
    is_accepted: bool = False
    """Whether a leader elsewhere has accepted this node."""
    is_on_loopback: bool = False
    """Whether only nodes on this machine reach the endpoint, if this node leads."""
    storm_s: float = 0.0
    """How much longer the next round is held back after a storm of rounds, if this node leads."""
    last_error: str = ""
    """Why the job's endpoint could not be asked for a leader; "" if nothing is known."""


def describe_wait(config: RendezvousConfig, endpoint: tuple[str, int], facts: WaitFacts, waited_s: float) -> str | None:
    """Return one line for the console; None while there is nothing to say.

    Args:
        config: this node's.
        endpoint: where the job's nodes search for their leader.
        facts: what is known now.
        waited_s: time since the node began to wait.
    """
    host, port = endpoint
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    left = f"{max(0.0, config.join_timeout_s - waited_s):.0f} s left of join_timeout"
    if facts.storm_s > 0:
        return f"the next round waits {facts.storm_s:.0f} s more: {STORM_REASON}"
    if facts.present is not None:
        missing = _describe_missing(config, facts.present, facts.hosts)
        if facts.present >= config.min_nodes:
            return f"{missing}{_describe_flags(config, address)} ({left})"
        reach = f"check that the others run, and that no firewall keeps them from {address}"
        if facts.last_error:
            reach = f"this node itself does not reach {facts.last_error}"
        elif facts.is_on_loopback and config.is_by_hand:
            reach = f"{address} is on loopback: nodes on other machines cannot join"
        return f"{missing}{_describe_flags(config, address)}; {reach} ({left})"
    if facts.is_accepted:
        # The leader has said more.
        line = f"joined the job at {address}: waiting for more nodes; the node there prints which are here ({left})"
        return line if waited_s >= LONG_S else None
    check = "check that its node runs, the address and the firewall"
    if facts.last_error:
        return f"no leader found yet: {facts.last_error}; still trying; {check} ({left})"
    return f"looking for the job's leader at {address}; {check} ({left})"


def _describe_missing(config: RendezvousConfig, present: int, hosts: tuple[str, ...]) -> str:
    are = "is" if present == 1 else "are"
    shown = ", ".join(hosts[:_NAMED])
    if present < config.min_nodes:
        least = "at least " if config.min_nodes < config.max_nodes else ""
        return f"waiting for nodes: {present} of {least}{config.min_nodes} {are} here{f': {shown}' if shown else ''}"
    return f"waiting for nodes of the last round: {present} {are} here"


def _describe_flags(config: RendezvousConfig, address: str) -> str:
    """Return the flags that the other nodes need; nodes that a scheduler starts already have them."""
    if config.token is not None and not config.has_shared_token:
        return ""
    if config.lends_endpoint:
        flags = f"--master-addr {config.master_addr} --master-port {config.master_port}"
    else:
        run_id = "" if config.run_id == "none" else f" --rdzv-id {config.run_id}"
        flags = f"--rdzv-backend c10d --rdzv-endpoint {address}{run_id}"
    own = "" if config.node_index is None else " and a --node-rank of their own"
    return f"; the others need --nnodes {_describe_nnodes(config)} {flags}{own}"


def _describe_nnodes(config: RendezvousConfig) -> str:
    return str(config.max_nodes) if config.min_nodes == config.max_nodes else f"{config.min_nodes}:{config.max_nodes}"
