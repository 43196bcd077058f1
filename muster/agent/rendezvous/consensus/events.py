"""The words of membership: rules, members, the events a leader feeds to `membership.advance` and what comes out."""

from muster.agent.diagnosis.report import Failure, Report, Stack
from muster.agent.rendezvous.consensus.quorum import Base, CarriedBase
from muster.agent.rendezvous.interface import BreakKind
from muster.agent.runtime.records import record

FENCE_S = 0.3


@record
class Rules:
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
class Carry:
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
class Peer:
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
    carry: Carry = Carry()
    order: int = 0
    """Order of joining; set by `advance`."""


@record
class Seat:
    """One member's place in a round."""

    id: str
    index: int | None
    group_rank: int
    rank_offset: int
    role_rank_offset: int
    role_world_size: int


# -- events -------------------------------------------------------------------------------------------------------


@record
class Joined:
    """A member asks to take part; its workers of earlier rounds are gone."""

    peer: Peer


@record
class Lost:
    """A member's connection closed, or it fell silent."""

    id: str
    reason: str


@record
class SawEnd:
    """A lost member's process was seen to end: comes after its `Lost`, which cannot wait for the proof."""

    id: str


@record
class Left:
    """A member said that it goes. Its workers may still be stopping: `Lost` follows when it is gone."""

    id: str
    reason: str


@record
class Prepared:
    """A member has imported what its workers need."""

    id: str


@record
class Confirmed:
    """A member has received a round."""

    id: str
    round: int


@record
class Failed:
    """Workers of a member failed."""

    id: str
    round: int
    failures: tuple[Failure, ...]
    excuse_s: float = 0.0
    """How long it may take until a node that has been silent for suspiciously long is given up. Its guard kills its
    workers before that, and that is what the others' workers fail of."""


@record
class Idle:
    """No worker of a member shows life; without failures: one does again."""

    id: str
    round: int
    failures: tuple[Failure, ...]


@record
class Succeeded:
    """All workers of a member ended well."""

    id: str
    round: int


@record
class Stopped:
    """No worker of the round is left on a member; it is ready for the next one."""

    id: str
    round: int
    port: int
    failures: tuple[Failure, ...] = ()
    stacks: tuple[Stack, ...] = ()


@record
class Tick:
    """Time has passed: `next_due_s` was reached."""


Event = Joined | Lost | SawEnd | Left | Prepared | Confirmed | Failed | Idle | Succeeded | Stopped | Tick

# -- outputs ------------------------------------------------------------------------------------------------------


@record
class Form:
    """Send every seat its round; rank 0's port is `master_port`."""

    number: int
    attempt: int
    restarts_left: int
    world_size: int
    master_port: int
    seats: tuple[Seat, ...]
    """In order of group rank."""
    bases: tuple[Base, ...]
    early: str | None


@record
class Break:
    """Tell these members to stop the workers of the round."""

    ids: tuple[str, ...]
    number: int
    kind: BreakKind
    reason: str
    want_stacks: bool
    next_attempt: int
    early: str | None


@record
class Settle:
    """Every member of the round has confirmed it: older rounds are no base for anybody any more."""

    number: int


@record
class End:
    """The job is over for these members."""

    ids: tuple[str, ...]
    succeeded: bool
    report: Report | None
    printer: str | None
    """The member that prints the report."""


@record
class GiveUp:
    """The nodes did not come together in time."""

    reason: str


@record
class Tell:
    """One line for the leader's console."""

    text: str


Output = Form | Break | Settle | End | GiveUp | Tell
