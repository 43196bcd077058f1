"""The job as its leader knows it: one frozen record, and how it begins.

What is kept of every member is in ledgers, so that no event costs more because there are many.
"""

import math
from enum import Enum

from muster.agent.diagnosis.report import Failure, Stack
from muster.agent.diagnosis.root_cause import DatedFailure
from muster.agent.rendezvous.consensus.actions import Action, EndJob
from muster.agent.rendezvous.consensus.members import ConsensusRules, MemberRecord, RankAssignment
from muster.agent.rendezvous.consensus.persistent import PersistentMap, PersistentSet
from muster.agent.rendezvous.consensus.quorum import QuorumBase
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
    since_s: float
    """When this forming began; the join timeout counts from here."""
    phase: JobPhase = JobPhase.FORMING
    members: PersistentMap[str, MemberRecord] = PersistentMap()
    joins: int = 0
    round: int = 0
    floor: int = 0
    """The highest round any member knew: numbers only go up, for everybody."""
    attempt: int = 0
    early: str | None = None
    """Signature of the start-up failure that ended the attempt before this one."""
    doubtful: bool = False
    """Members that are counted on may be free to follow others: no round is formed. Kept up by the leader, which knows
    who was heard when."""
    in_office: bool = False
    """True once this leader has formed a round itself."""
    bases: tuple[QuorumBase, ...] = ()
    """The last formed round, preceded by those it has not yet replaced for all of its members."""
    seats: PersistentMap[str, RankAssignment] = PersistentMap()
    """Of the current round; empty before the first."""
    unconfirmed: PersistentSet[str] = PersistentSet()
    pending: PersistentSet[str] = PersistentSet()
    """Members whose workers must still stop before a round can be formed."""
    done: PersistentSet[str] = PersistentSet()
    """Members whose workers of this round all ended well, also those that vanished afterwards."""
    failures: tuple[DatedFailure, ...] = ()
    stacks: tuple[Stack, ...] = ()
    idle: PersistentMap[str, tuple[Failure, ...]] = PersistentMap()
    """Members without a sign of life, and what they will be blamed for if it is all of them."""
    failed_by: PersistentSet[str] = PersistentSet()
    excused_until_s: float = -FOREVER
    """A loss until then explains the round's first failure."""
    charged: bool = False
    """The next round is a new attempt."""
    final: str | None = None
    """Why the job has failed for good."""
    reform: bool = False
    """The next round need not wait for a last call."""
    fence_until_s: float = -FOREVER
    quiet_until_s: float = -FOREVER
    gather_until_s: float = -FOREVER
    last_join_s: float = -FOREVER
    batch_since_s: float | None = None
    """Since when there is a member that could take part in a new round."""
    importing: PersistentSet[str] = PersistentSet()
    """Members without a seat whose workers could not start yet: they still import."""
    importing_seated: PersistentSet[str] = PersistentSet()
    """Members of the current round that still import what they need for it."""
    blame_until_s: float | None = None
    """When a failure that spends the last attempt becomes final, unless a loss explains it."""
    end_until_s: float = FOREVER
    """When the job's success need not wait any longer for members that vanished after theirs."""
    verdict: EndJob | None = None
    """How the job ended, for those who come late."""


Decision = tuple[JobState, tuple[Action, ...]]


def build_initial_state(rules: ConsensusRules, now_s: float, *, takeover: bool) -> JobState:
    """A leader's first state: empty for the named leader, gathering for a candidate."""
    if takeover:
        # Workers of the node whose end made way for this takeover die within the fence as everywhere.
        fence_s, gather_s = now_s + rules.fence_s, now_s + rules.gather_s
        return JobState(rules=rules, since_s=now_s, reform=True, fence_until_s=fence_s, gather_until_s=gather_s)
    return JobState(rules=rules, since_s=now_s, quiet_until_s=now_s + rules.quiet_s)


def describe_member(state: JobState, peer: MemberRecord) -> str:
    """How people know a node: "node 1 (host-b)"."""
    seat = state.seats.get(peer.id)
    number = peer.index if peer.index is not None else seat.group_rank if seat else None
    return f"a new node ({peer.host})" if number is None else f"node {number} ({peer.host})"
