"""Records of members: the job's rules, a member, its recovery state, and its ranks in a round."""

from muster._shared.fields import Count, Name, Paragraph, RoundNumber
from muster._shared.records import record
from muster._shared.reports import FinalFailure
from muster.agent.config import RendezvousConfig
from muster.agent.rendezvous.consensus.quorum import RecoveredRound
from muster.agent.round import Checkpoint

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
    max_restarts_flag: str = "--max-restarts"
    """What the user calls that limit."""
    hang_action: str = "restart"
    """What follows when the whole job hangs: report, restart or stop."""


@record
class RecoveryState:
    """What a member knows of the job and brings when it joins, so that no state is lost with a leader."""

    round_number: RoundNumber = 0
    attempt: Count = 0
    startup_signature: Paragraph | None = None
    final: FinalFailure | None = None
    """Why the job failed for good in its last round; None while it may continue."""
    leader_id: Name | None = None
    """The last leader that it joined. That leader may have formed rounds that this member never received."""
    quorum_rounds: tuple[RecoveredRound, ...] = ()
    checkpoint: Checkpoint | None = None
    """The last one that all ranks of the job have saved, as far as it knows."""


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
    recovery_state: RecoveryState = RecoveryState()
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
    """The silence limit: a node that is silent for this long counts as lost."""
    return config.keep_alive_interval_s * config.keep_alive_max_attempt


def find_margin_s(silence_s: float) -> float:
    """How long before the silence limit a lease ends: a second, less when the limit itself is short."""
    return min(MARGIN_S, silence_s / 3)
