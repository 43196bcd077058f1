"""The job as its leader knows it: one frozen record, with one of three phases, and its initial value.

Per-member facts are in persistent maps and sets, so that the cost of an event does not grow with the number of members.
"""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from muster._shared.contract import AskKind
from muster._shared.fields import LateRank, Shared
from muster._shared.layouts import StatusPageLayout
from muster._shared.records import NO_ITEMS, record, replace
from muster._shared.reports import Failure, FinalFailure, Stack
from muster.agent.diagnosis.root_cause import DatedFailure
from muster.agent.rendezvous.consensus.actions import Action, JobEnd, RoundFacts, SetTimer
from muster.agent.rendezvous.consensus.members import ConsensusRules, MemberRecord, RankAssignment, describe_node
from muster.agent.rendezvous.consensus.quorum import QuorumRound
from muster.agent.rendezvous.consensus.recovery import RecoveryRecord
from muster.agent.rendezvous.interface import DrainReport
from muster.agent.rendezvous.restarts import Restarts
from muster.agent.round import Checkpoint, PartMemory
from muster.agent.runtime.persistent import PersistentMap, PersistentSet

if TYPE_CHECKING:
    from muster.agent.rendezvous.consensus.halves import Plan

FOREVER = math.inf


@record
class NewRound:
    """The next round, first proposed and then formed."""

    round_number: int
    attempt: int
    world_size: int
    master_port: int
    """The MASTER_PORT of rank 0."""
    use_agent_store: bool
    """Whether rank 0's agent hosts the store. It does not for a single worker, which has no other to wait for."""
    assignments: tuple[RankAssignment, ...]
    """Assignments in order of group rank."""
    quorum_rounds: tuple[QuorumRound, ...]
    plans: "Mapping[str, Plan]" = NO_ITEMS
    """What features have planned for it, by their names."""


@record
class Forming:
    """No round runs. Its members still stop, or the next one waits for members."""

    since_s: float
    """When the last round ended on all of its members. The join timeout counts from here."""
    stopping: PersistentSet[str] = PersistentSet()
    """Members whose workers must still stop before a round can be formed."""
    stop_deadline_s: float = FOREVER
    """When members that still stop count as lost."""
    skips_last_call: bool = False
    """Whether the next round need not wait for the last call."""
    is_new_attempt: bool = False
    """Whether the next round is a new attempt."""
    final: FinalFailure | None = None
    """Why the job has failed for good."""
    proposed: NewRound | None = None
    """The round that will form if the leader's own workers have a lease in it."""
    lease_retry_s: float = -FOREVER
    """When the leader's lease is checked again."""
    end_wait_until_s: float = FOREVER
    """Until when the job's end waits for unreachable members, which may not know that it failed."""


@record
class Asker:
    """A person's request that waits for its answer."""

    id: str
    """The member that has passed the request on."""
    request: int
    """The member's number of the request. If no person has asked, it is `HANG` or `STANDSTILL`."""
    kind: AskKind


HANG, STANDSTILL = 0, 1
"""Reasons for which the leader itself requests stacks, without a member's id."""


@record
class WantedDrain:
    """A requested drain."""

    kind: int
    reason: str
    limit_s: float
    askers: tuple[Asker, ...] = ()
    """The people who ask; empty for a preemption."""
    leaving: tuple[str, ...] = ()
    """Members that do not continue after a stop."""
    preempted: tuple[str, ...] = ()
    """Those among them that leave whatever people are answered."""
    until_s: float = FOREVER
    """As `Drain.until_s`."""
    obstacle: str = ""
    """As `Drain.obstacle`."""


@record
class WantedStacks:
    """Stacks that a person waits for."""

    number: int
    asker: Asker
    begun_s: float
    ids: PersistentSet[str]
    """Members that have not answered."""
    stacks: tuple[Stack, ...] = ()
    missing: int = 0


@record
class Drain:
    """A drain of the running round, from its beginning until it is withdrawn or the round ends."""

    number: int
    kind: int = StatusPageLayout.STOP
    askers: tuple[Asker, ...] = ()
    """People who wait for an answer."""
    done_by: PersistentMap[str, tuple[LateRank, ...]] = PersistentMap()
    """Members whose workers have done what was committed, or whose time was over, with their late ranks."""
    queued: WantedDrain | None = None
    """A stop that begins when this one has ended."""
    reason: str
    begun_s: float
    ids: PersistentSet[str]
    """The members for which it has begun."""
    leaving: PersistentSet[str] = PersistentSet()
    """Members that asked for it because their nodes must leave. They leave in any case, even if it is withdrawn."""
    reports: PersistentMap[str, DrainReport] = PersistentMap()
    """Reports of the members that have reported."""
    step: int | None = None
    """The committed step."""
    last_rank: int | None = None
    """Of the ranks that stopped at the step, the one that ended last."""
    until_s: float = FOREVER
    """When a drain for nodes that join is given up, and the round broken. Infinity: it is for something else."""
    obstacle: str = ""
    """Why the ranks could not stop at one step, of a wait for nodes that join."""

    @property
    def is_join(self) -> bool:
        """Whether it is for nodes that join."""
        return self.until_s < FOREVER

    @property
    def is_stop(self) -> bool:
        """Whether the ranks end. In drains of all other kinds they continue."""
        return self.kind == StatusPageLayout.STOP


@record
class RoundRunning:
    """A round runs."""

    succeeded: PersistentSet[str] = PersistentSet()
    """Members whose workers all succeeded, including those that were lost afterwards."""
    idle: PersistentMap[str, tuple[Failure, ...]] = PersistentMap()
    """Members whose workers are all idle, and the failures to record if the whole job hangs."""
    urgent: PersistentSet[str] = PersistentSet()
    """Those members for which the hang is judged at once, whatever the others do."""
    still: PersistentMap[str, float] = PersistentMap()
    """Members whose workers all stand still, and since when."""
    still_asked_s: float = 0.0
    """How long all had stood still when it was last asked what they do."""
    has_told_still: bool = False
    """Whether it was reported that the job stands still."""
    has_reported_hang: bool = False
    """Whether, with --hang-action report, a hang of the job was reported."""
    succeeded_s: float = -FOREVER
    """When a member last succeeded."""
    batch_since_s: float | None = None
    """Since when a member has been ready to join the running job in a new round."""
    loss_wait_until_s: float | None = None
    """When a failure that would end the job becomes final, unless a loss explains it before."""
    end_wait_until_s: float = FOREVER
    """Until when the job's end waits for members that were lost and may continue with another leader."""
    drain: Drain | None = None
    """The drain that is in progress, or committed."""
    drains: int = 0
    """How many drains have begun; each gets the next number."""
    wanted_stacks: tuple[WantedStacks, ...] = ()


@record
class Ending:
    """The job has ended, or rendezvous has failed."""

    job_end: JobEnd | None
    """How the job ended, for members that join late; None if rendezvous has failed."""


@record
class RoundFailures:
    """The failures of the current round."""

    seen: tuple[DatedFailure, ...] = ()
    stacks: tuple[Stack, ...] = ()
    failed_by: PersistentSet[str] = PersistentSet()
    """Members that reported failures."""
    loss_explains_until_s: float = -FOREVER
    """Until when a loss explains the first failure."""
    has_stepped: bool = False
    """Whether a rank is known to have done a step in the round, or all have saved a checkpoint."""
    restarts_before: Restarts | None = None
    """What was known before the attempt that the failure costs was counted."""
    root_rank: int | None = None
    """The global rank that was the root cause when the round was broken; None if unknown."""
    is_provisional: bool = False
    """Whether that may be a consequence; then nodes hear what has failed once all is known."""
    is_settled: bool = False
    """Whether all failures of the round are known, and what follows from them is decided."""


@record
class Storm:
    """Rounds that are formed and broken one after the other."""

    formed_s: tuple[float, ...] = ()
    """When the last rounds were formed, without a step in any of them."""
    wait_until_s: float = -FOREVER
    """Until when the next round is not formed."""
    waits: int = 0
    """How many such waits there have been."""


@record
class Saving:
    """A step that some members of the round have saved."""

    round_number: int
    step: int
    path_rank: int
    """The group rank of the member that has reported the path."""
    path: str = ""
    """The path, as named by the lowest of these ranks that named one; "" if none has."""
    ids: PersistentSet[str] = PersistentSet()
    """The members that have reported it."""


@record
class JobState:
    """Everything the leader knows. `build_initial_state` makes the first one."""

    rules: ConsensusRules
    phase: Forming | RoundRunning | Ending
    timer: SetTimer | None = None
    """The leader's timer as last set; None if it has fired."""
    members: PersistentMap[str, MemberRecord] = PersistentMap()
    join_count: int = 0
    last_join_s: float = -FOREVER
    importing: PersistentSet[str] = PersistentSet()
    """Members without an assignment that still import what their workers need."""
    importing_in_round: PersistentSet[str] = PersistentSet()
    """Members of the current round that still import what their workers need."""
    round_number: int = 0
    highest_known_round: int = 0
    """The highest round that any member knew; the next number is above it."""
    attempt: int = 0
    restarts: Restarts = Restarts()
    """What the attempts so far have failed of, and on which nodes."""
    suspected_until_s: PersistentMap[str, float] = PersistentMap()
    """Until when a suspected node is the last choice, by `NodeFault.machine` and index."""
    storm: Storm = Storm()
    has_formed_round: bool = False
    """Whether this leader has formed a round itself."""
    formed: tuple[NewRound, Shared[RoundFacts]] | None = None
    """The last round, and what every member was told of it, for members that join during it."""
    must_find_last_round: bool = False
    """Whether this leader's node ran before and lost its memory, so that the job may continue elsewhere.

    Then it forms its first round only with all `max` nodes, or with members that prove that they know the last round.
    """
    quorum_rounds: tuple[QuorumRound, ...] = ()
    """The last formed round, preceded by those that it has not yet replaced for all of its members."""
    assignments: PersistentMap[str, RankAssignment] = PersistentMap()
    """Assignments of the current round; empty before the first."""
    unacknowledged: PersistentSet[str] = PersistentSet()
    """Members that have not acknowledged the current round."""
    failures: RoundFailures = RoundFailures()
    checkpoint: Checkpoint | None = None
    """The last checkpoint that all ranks have saved."""
    saving: tuple[Saving, ...] = ()
    """Later steps that only some of them have saved."""
    memories: tuple[PartMemory, ...] = ()
    """What features remember of the job."""
    parts: Mapping[str, object] = NO_ITEMS
    """What the halves of features know, by their names."""
    recovery: Shared[RecoveryRecord] = Shared(RecoveryRecord())
    """What members must know of all this, as `update_recovery` last made it."""
    fence_until_s: float = -FOREVER
    announcement_wait_until_s: float = -FOREVER
    rejoin_wait_until_s: float = -FOREVER


Decision = tuple[JobState, tuple[Action, ...]]


def build_initial_state(
    rules: ConsensusRules, now_s: float, *, takeover: bool, must_find_last_round: bool = False
) -> JobState:
    """Return a leader's first state.

    A first leader waits for an acting leader's announcement, and a candidate for members to rejoin.
    """
    if takeover:
        # The ended node's guard kills its workers within the fence time.
        return JobState(
            rules=rules,
            phase=Forming(since_s=now_s, skips_last_call=True),
            fence_until_s=now_s + rules.fence_s,
            rejoin_wait_until_s=now_s + rules.rejoin_wait_s,
        )
    return JobState(
        rules=rules,
        phase=Forming(since_s=now_s),
        announcement_wait_until_s=now_s + rules.announcement_wait_s,
        must_find_last_round=must_find_last_round,
    )


def update_recovery(state: JobState) -> JobState:
    """Update the recovery record and count its change. Nothing changes any more once the job has ended.

    Only this leader needs rounds of other leaders that the running one does not replace; members get them with the next
    round.
    """
    phase, known = state.phase, state.recovery.value
    if isinstance(phase, Ending):
        return state
    forming = phase if isinstance(phase, Forming) else None
    record = RecoveryRecord(
        version=known.version,
        round_number=state.round_number,
        attempt=state.attempt + (1 if forming is not None and forming.is_new_attempt else 0),
        restarts=state.restarts,
        final=None if forming is None else forming.final,
        quorum_rounds=tuple(each.build_recovered() for each in state.quorum_rounds if not each.is_late),
        checkpoint=state.checkpoint,
        memories=state.memories,
    )
    if record == known:
        return state
    return replace(state, recovery=Shared(replace(record, version=known.version + 1)))


def describe_member(state: JobState, member: MemberRecord) -> str:
    """Return a member's name in messages."""
    assignment = state.assignments.get(member.id)
    return describe_node(member, None if assignment is None else assignment.group_rank)
