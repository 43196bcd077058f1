"""Who takes part: the job's rules, a member, what it brings along, and its ranks in a round."""

from muster.agent.rendezvous.consensus.quorum import CarriedBase
from muster.agent.runtime.records import record

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
    gather_s: float
    """How long a takeover waits for those of the last round who have not come: their leases, which the old leader may
    have renewed in its last moment, must have run out before a round is formed without them."""
    batch_s: float = 0.2
    """Joins to a running round within this time of one another make one new round."""
    batch_limit_s: float = 1.0
    import_limit_s: float = 10.0
    """How long a node that could join a running job at once waits for others that still import: one restart spared."""
    last_chance_s: float = 1.0
    """How long a node that comes just before the join timeout has to make a round."""
    fence_s: float = FENCE_S
    """A lost member kills its workers within this time; no round is formed earlier."""
    quiet_s: float = 2.0
    """A leader with empty state forms no round of fewer than max nodes before: an acting leader may call."""
    blame_s: float = 0.3
    """A failure so shortly before a loss was caused by it: the last attempt is not given up earlier."""


@record
class RecoveryState:
    """What a member brings along: the job's state as far as it knows, so that no leader takes it to its grave."""

    round: int = 0
    attempt: int = 0
    early: str | None = None
    final: str | None = None
    """Why the last round was the job's last one; None while it may go on."""
    leader: str | None = None
    """Id of the last leader it joined: one that may have formed rounds which it never heard of."""
    bases: tuple[CarriedBase, ...] = ()


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
    is_leader: bool = False
    leaving: bool = False
    """It said that it goes; it gets no seat any more."""
    is_prepared: bool = True
    """False while it imports what its workers need, when it joins; `Prepared` follows."""
    carry: RecoveryState = RecoveryState()
    order: int = 0
    """Order of joining; set by `advance`."""


@record
class RankAssignment:
    """One member's place in a round."""

    id: str
    index: int | None
    group_rank: int
    rank_offset: int
    role_rank_offset: int
    role_world_size: int
