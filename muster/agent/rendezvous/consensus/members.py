"""Records of members: the job's rules, a member, and its ranks in a round."""

from collections.abc import Iterable

from muster._shared.codec import clean_name
from muster._shared.records import record
from muster.agent.config import RendezvousConfig
from muster.agent.rendezvous.consensus.recovery import RecoveryRecord
from muster.agent.rendezvous.interface import Saved
from muster.agent.round import PartOffer
from muster.agent.runtime.limits import ANNOUNCEMENT_WAIT_S, LEASE_MARGIN_S, STOP_MARGIN_S

FENCE_S = 0.3


@record
class ConsensusRules:
    """The settings with which the job was started, equal on all nodes. All times are in seconds."""

    run_id: str
    min_nodes: int
    max_nodes: int
    max_restarts: int
    join_timeout_s: float
    last_call_s: float
    rejoin_wait_s: float
    """How long a takeover waits for members of the last round that have not joined.

    The old leader may have renewed their leases just before it ended. A round without them is formed only after those
    leases have expired.
    """
    batch_s: float = 0.2
    """Joins to a running round within this time of one another make one new round."""
    batch_limit_s: float = 1.0
    import_limit_s: float = 10.0
    """How long a node that is ready to join a running job waits for others that still import, which saves a restart."""
    late_join_grace_s: float = 1.0
    """How long a node that joins just before the join timeout has to form a round."""
    fence_s: float = FENCE_S
    """A lost member's workers are killed within this time. No round is formed earlier."""
    announcement_wait_s: float = ANNOUNCEMENT_WAIT_S
    stop_margin_s: float = STOP_MARGIN_S
    loss_wait_s: float = 0.3
    """How long a failure that would end the job waits for the report of a loss that explains it."""
    spare_wait_s: float = 1.0
    """How long the finding of a check that would end the job waits for a spare node, which may join last."""
    max_restarts_flag: str = "--max-restarts"
    """The name of that limit that the user knows."""
    hang_action: str = "restart"
    """What follows when the whole job hangs: report, restart or stop."""
    policy: str = ""
    """The value of --on."""
    is_managed: bool = False
    """Whether a scheduler has started the agents, and replaces those that leave."""


@record
class MemberRecord:
    """One member."""

    id: str
    index: int | None
    nproc: int
    role: str
    host: str
    port: int
    """The MASTER_PORT that it reserved for the next round, used if it gets rank 0."""
    can_host_store: bool = False
    """Whether its agent would host the store of the next round, if it gets rank 0."""
    is_leader: bool = False
    is_leaving: bool = False
    """Whether it has announced that it leaves; it gets no assignment any more."""
    is_prepared: bool = True
    """False if it joins while it imports what its workers need; `Prepared` follows."""
    stop_limit_s: float = 60.0
    """The most time that it takes to stop its workers, by its own configuration."""
    recovery: RecoveryRecord = RecoveryRecord()
    """What it knew of the job when it joined."""
    group_ranks: tuple[int | None, ...] = ()
    """Its own ranks in the quorum rounds of that record."""
    highest_round: int = 0
    """The highest round that it has heard of, if that is higher than the record's."""
    last_leader_id: str | None = None
    """The last leader that it joined. That leader may have formed rounds that this member never received."""
    offers: tuple[PartOffer, ...] = ()
    """What it has for features, by its join or its last stop."""
    saved: Saved | None = None
    """The checkpoint that it had last reported when it joined."""
    address: str = ""
    """Where the other nodes reach it; "" means at the leader's machine."""
    listen_port: int = 0
    """Where it accepts links after a takeover, and streams of features; 0 if nowhere."""
    leader_address: str = ""
    """The leader's address as this member sees it; "" if they are on one machine."""
    machine: str = ""
    """The machine's boot id; "" if unknown."""
    machine_name: str = ""
    """An administrator's name for the machine, if it is not the host; "" if unknown."""
    segment: str = ""
    """Its NVLink domain; "" if unknown, or if ranks are not ordered by it."""
    join_order: int = 0
    """The order of its join, set by `membership.on_joined`."""


@record
class RankAssignment:
    """One member's ranks in a round."""

    id: str
    index: int | None
    group_rank: int
    rank_offset: int
    role_rank_offset: int
    role_world_size: int


def find_margin_s(silence_s: float) -> float:
    """Return how long before the silence limit a lease ends: a second, or less if the limit itself is short."""
    return min(LEASE_MARGIN_S, silence_s / 3)


def build_rules(config: RendezvousConfig) -> ConsensusRules:
    """Return the job's rules from one node's configuration."""
    return ConsensusRules(
        run_id=clean_name(config.run_id),
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        max_restarts=config.max_restarts,
        max_restarts_flag=config.max_restarts_flag,
        hang_action=config.hang_action,
        policy=config.policy,
        is_managed=not config.is_by_hand,
        join_timeout_s=config.join_timeout_s,
        last_call_s=config.last_call_timeout_s,
        rejoin_wait_s=config.silence_s - find_margin_s(config.silence_s) + FENCE_S,
    )


def find_leader_host(members: Iterable[MemberRecord]) -> str:
    """Return the address of the leader's machine as the other nodes see it; loopback if all are on it."""
    seen = ""
    for member in members:
        if member.is_leader and member.address:
            return member.address
        seen = seen or member.leader_address
    return seen or "127.0.0.1"


def describe_node(member: MemberRecord, group_rank: int | None) -> str:
    """Return a member's name in messages: "node 1 (host-b)"."""
    number = group_rank if member.index is None else member.index
    return f"a new node ({member.host})" if number is None else f"node {number} ({member.host})"
