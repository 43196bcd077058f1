"""Records of members: the job's rules, a member, and its ranks in a round."""

from muster._shared.records import record
from muster.agent.config import RendezvousConfig
from muster.agent.rendezvous.consensus.recovery import RecoveryRecord
from muster.agent.round import Holding

FENCE_S = 0.3


@record
class ConsensusRules:
    """What the job was started with; equal on all nodes. All times are seconds."""

    run_id: str
    min_nodes: int
    max_nodes: int
    max_restarts: int
    join_timeout_s: float
    last_call_s: float
    rejoin_wait_s: float
    """How long a takeover waits for members of the last round that have not joined. The old leader may have renewed
    their leases just before it ended; a round without them is formed only after those leases have expired."""
    batch_s: float = 0.2
    """Joins to a running round within this time of one another make one new round."""
    batch_limit_s: float = 1.0
    import_limit_s: float = 10.0
    """How long a node that is ready to join a running job waits for others that still import: this saves a restart."""
    late_join_grace_s: float = 1.0
    """How long a node that joins just before the join timeout has to make a round."""
    fence_s: float = FENCE_S
    """A lost member's workers are killed within this time; no round is formed earlier."""
    announcement_wait_s: float = 2.0
    """How long a leader with empty state forms only rounds of max nodes: an acting leader may announce itself."""
    stop_margin_s: float = 10.0
    """How long after its own limit a member that still stops its workers counts as lost: its node gives up first."""
    loss_wait_s: float = 0.3
    """How long a failure that would end the job waits for the report of a loss that explains it."""
    spare_wait_s: float = 1.0
    """How long a finding of the preflight that would end the job waits for a spare node, which may join last."""
    max_restarts_flag: str = "--max-restarts"
    """What the user calls that limit."""
    hang_action: str = "restart"
    """What follows when the whole job hangs: report, restart or stop."""
    copies_snapshots: bool = True
    """Each node sends its snapshots to a neighbour."""
    policy: str = ""
    """--on."""
    is_managed: bool = False
    """A scheduler has started the agents: it starts others for those that leave."""


@record
class MemberRecord:
    """One member."""

    id: str
    index: int | None
    nproc: int
    role: str
    host: str
    port: int
    """The MASTER_PORT it reserved for the next round, used when it gets rank 0."""
    can_host_store: bool = False
    """Its agent would host the store of the next round, if it gets rank 0."""
    is_leader: bool = False
    is_leaving: bool = False
    """It announced that it leaves; it gets no assignment any more."""
    is_prepared: bool = True
    """False when it joins while it imports what its workers need; `Prepared` follows."""
    stop_limit_s: float = 60.0
    """How long it takes at most to stop its workers, by its own configuration."""
    recovery: RecoveryRecord = RecoveryRecord()
    """What it knew of the job when it joined."""
    group_ranks: tuple[int | None, ...] = ()
    """Its own in the quorum rounds of that record."""
    highest_round: int = 0
    """The highest that it was told of, if that is higher than the record's."""
    last_leader_id: str | None = None
    """The last leader that it joined. That leader may have formed rounds that this member never received."""
    holdings: tuple[Holding, ...] = ()
    """What it has of snapshots, by its join or its last stop."""
    address: str = ""
    """Where the other nodes reach it; "": at the leader's machine."""
    listen_port: int = 0
    """Where it accepts links after a takeover, and for parts of a snapshot; 0: nowhere."""
    leader_address: str = ""
    """The leader's as this member sees it; "": they are on one machine."""
    machine: str = ""
    """The machine's boot id; "": not known."""
    machine_name: str = ""
    """What an administrator calls the machine, where it is not the host; "": not known."""
    segment: str = ""
    """Its NVLink domain; "": not known, or ranks are not ordered by it."""
    join_order: int = 0
    """Set by `membership.on_joined`."""


@record
class RankAssignment:
    """One member's ranks in a round."""

    id: str
    index: int | None
    group_rank: int
    rank_offset: int
    role_rank_offset: int
    role_world_size: int


MARGIN_S = 1.0


def find_silence_s(config: RendezvousConfig) -> float:
    """Return the silence limit: a node that is silent for this long counts as lost."""
    return config.keep_alive_interval_s * config.keep_alive_max_attempt


def find_margin_s(silence_s: float) -> float:
    """Return how long before the silence limit a lease ends: a second, less when the limit itself is short."""
    return min(MARGIN_S, silence_s / 3)
