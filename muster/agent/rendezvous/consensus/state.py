"""The job as its leader knows it: one frozen record, and its initial value.

Per-member facts are in persistent maps and sets, so that the cost of an event does not grow with the number of members.
"""

import math
from enum import Enum

from muster.agent.diagnosis.report import Failure, Stack
from muster.agent.diagnosis.root_cause import DatedFailure
from muster.agent.rendezvous.consensus.actions import Action, EndJob, FormRound, SetTimer
from muster.agent.rendezvous.consensus.members import ConsensusRules, MemberRecord, RankAssignment
from muster.agent.rendezvous.consensus.quorum import QuorumRound
from muster.agent.runtime.persistent import PersistentMap, PersistentSet
from muster.agent.runtime.records import record

FOREVER = math.inf


class JobPhase(Enum):
    """Where the job stands."""

    FORMING = "forming"
    """No round, or one whose members are stopping."""
    RUNNING = "running"
    ENDING = "ending"


@record
class JobState:
    """All the leader knows. `build_initial_state` makes the first one."""

    rules: ConsensusRules
    forming_since_s: float
    """When the last round ended on all of its members; the join timeout counts from here."""
    phase: JobPhase = JobPhase.FORMING
    members: PersistentMap[str, MemberRecord] = PersistentMap()
    join_count: int = 0
    round_number: int = 0
    highest_known_round: int = 0
    """The highest round that any member knew: the next number is above it."""
    attempt: int = 0
    startup_signature: str | None = None
    """Signature of the start-up failure that ended the attempt before this one."""
    proposed: FormRound | None = None
    """The round that is formed if the leader's own workers have a lease in it."""
    lease_retry_s: float = -FOREVER
    """When the leader's lease is checked again."""
    timer: SetTimer | None = None
    """The leader's timer as last set; None: it has fired."""
    has_formed_round: bool = False
    """This leader has formed a round itself."""
    quorum_rounds: tuple[QuorumRound, ...] = ()
    """The last formed round, preceded by those that it has not yet replaced for all of its members."""
    assignments: PersistentMap[str, RankAssignment] = PersistentMap()
    """Of the current round; empty before the first."""
    unacknowledged: PersistentSet[str] = PersistentSet()
    """Members that have not acknowledged the current round."""
    stopping: PersistentSet[str] = PersistentSet()
    """Members whose workers must still stop before a round can be formed."""
    stop_deadline_s: float = FOREVER
    """When those that still stop count as lost."""
    succeeded: PersistentSet[str] = PersistentSet()
    """Members whose workers of this round all succeeded, also those that were lost afterwards."""
    failures: tuple[DatedFailure, ...] = ()
    stacks: tuple[Stack, ...] = ()
    idle: PersistentMap[str, tuple[Failure, ...]] = PersistentMap()
    """Members whose workers are all idle, and the failures to record if the whole job hangs."""
    failed_by: PersistentSet[str] = PersistentSet()
    """Members that reported failures in this round."""
    loss_explains_until_s: float = -FOREVER
    """A loss until then explains the round's first failure."""
    is_new_attempt: bool = False
    """The next round is a new attempt."""
    final_reason: str | None = None
    """Why the job has failed for good."""
    skips_last_call: bool = False
    """The next round need not wait for the last call."""
    fence_until_s: float = -FOREVER
    announcement_wait_until_s: float = -FOREVER
    rejoin_wait_until_s: float = -FOREVER
    must_find_last_round: bool = False
    """This leader's node ran before, and its memory is lost: the job may continue elsewhere. So it forms a round only
    with all `max` nodes, or once a member has brought the last round."""
    last_join_s: float = -FOREVER
    batch_since_s: float | None = None
    """Since when a member is ready to join the running job in a new round."""
    importing: PersistentSet[str] = PersistentSet()
    """Members without an assignment that still import what their workers need."""
    importing_in_round: PersistentSet[str] = PersistentSet()
    """Members of the current round that still import what their workers need."""
    loss_wait_until_s: float | None = None
    """When a failure that would end the job becomes final, unless a loss explains it before."""
    end_wait_until_s: float = FOREVER
    """Until when the job's end waits for members that were lost and may continue with another leader."""
    job_end: EndJob | None = None
    """How the job ended, for members that join late."""


Decision = tuple[JobState, tuple[Action, ...]]


def build_initial_state(
    rules: ConsensusRules, now_s: float, *, takeover: bool, must_find_last_round: bool = False
) -> JobState:
    """A leader's first state: it waits for an acting leader's announcement, a candidate for members to rejoin."""
    if takeover:
        # The node whose end caused this takeover has a guard, too: its workers are killed within the fence time.
        return JobState(
            rules=rules,
            forming_since_s=now_s,
            skips_last_call=True,
            fence_until_s=now_s + rules.fence_s,
            rejoin_wait_until_s=now_s + rules.rejoin_wait_s,
        )
    return JobState(
        rules=rules,
        forming_since_s=now_s,
        announcement_wait_until_s=now_s + rules.announcement_wait_s,
        must_find_last_round=must_find_last_round,
    )


def describe_member(state: JobState, member: MemberRecord) -> str:
    """A member's name in messages: "node 1 (host-b)"."""
    assignment = state.assignments.get(member.id)
    number = member.index if member.index is not None else assignment.group_rank if assignment else None
    return f"a new node ({member.host})" if number is None else f"node {number} ({member.host})"
