"""Actions of the leader: what `decisions.decide` asks it to send."""

from typing import Annotated

from muster._shared.contract import AskOutcome, StatusPageLayout
from muster._shared.fields import Count, Limit, Line, Seconds, Step
from muster._shared.records import record
from muster._shared.reports import FinalFailure, RankProgress, Report, Stacks
from muster.agent.rendezvous.consensus.members import RankAssignment
from muster.agent.rendezvous.consensus.quorum import QuorumRound
from muster.agent.rendezvous.interface import BreakKind, LateRank, NoticeKind
from muster.agent.round import Checkpoint

LateRanks = Annotated[tuple[LateRank, ...], Limit(most=64)]


@record
class Answer:
    """What became of a person's request; `muster._shared.control.Answer` is the same on the person's side."""

    outcome: AskOutcome
    line: Line
    """For the person."""
    step: Step | None = None
    """The agreed one."""
    ranks: Count = 0
    """How many it concerns."""
    took_s: Seconds = 0.0
    late: LateRanks = ()
    stacks: Stacks = ()
    progress: Annotated[tuple[RankProgress, ...], Limit(most=4096)] = ()
    """Of the ranks whose stacks were asked for."""


@record
class FormRound:
    """Send each member of the round its ranks; rank 0's port is `master_port`."""

    round_number: int
    attempt: int
    restarts_left: int
    world_size: int
    master_port: int
    use_agent_store: bool
    """Rank 0's agent hosts the store. Not for a single worker, which has no other to wait for."""
    assignments: tuple[RankAssignment, ...]
    """In order of group rank."""
    quorum_rounds: tuple[QuorumRound, ...]
    startup_signature: str | None


@record
class BreakRound:
    """Ask these members to stop the workers of the round."""

    ids: tuple[str, ...]
    round_number: int
    kind: BreakKind
    reason: str
    want_stacks: bool
    next_attempt: int
    startup_signature: str | None
    is_hang: bool = False
    """The flight recorders of all nodes are wanted, too."""
    final: FinalFailure | None = None
    """With `BreakKind.FINAL`."""
    leaving: tuple[str, ...] = ()
    """Members for which a drain ends the job with this round. With `BreakKind.DRAINED` their workers have ended, and
    their processes take part in no other round."""
    is_interrupt: bool = False
    """A member left because of a Ctrl-C."""


@record
class DropMembers:
    """Close the connections of these members: they count as lost."""

    ids: tuple[str, ...]
    reason: str


@record
class CheckLease:
    """Answer with `events.LeaseChecked`: would the leader's own workers have a lease if these were the rounds?

    Members that are needed may be free to join another leader by now: then this leader would have none.
    """

    quorum_rounds: tuple[QuorumRound, ...]


@record
class SetTimer:
    """Feed `events.TimerFired` at this time; it replaces the timer set before."""

    round_number: int
    due_s: float
    """Infinity: no timer is needed."""


@record
class CommitRound:
    """Every member of the round has acknowledged it: a quorum of older rounds is not needed any more."""

    round_number: int


@record
class BeginDrain:
    """Ask these members to write a ceiling for their workers, and to report it."""

    ids: tuple[str, ...]
    round_number: int
    drain: int
    limit_s: float
    kind: int = StatusPageLayout.STOP
    is_asked: bool = False
    """A person waits for an answer."""


@record
class CommitDrain:
    """Tell these members the step at which all ranks stop."""

    ids: tuple[str, ...]
    round_number: int
    drain: int
    step: int


@record
class WithdrawDrain:
    """Tell these members that no step was agreed on."""

    ids: tuple[str, ...]
    round_number: int
    drain: int
    reason: str


@record
class WantStacks:
    """Ask these members for the stacks of their workers."""

    ids: tuple[str, ...]
    round_number: int
    number: int


@record
class AnswerRequest:
    """Answer a person's request that this member has passed on."""

    id: str
    request: int
    answer: Answer


@record
class CompleteCheckpoint:
    """Tell these members that all ranks have saved a checkpoint."""

    ids: tuple[str, ...]
    checkpoint: Checkpoint


@record
class EndJob:
    """The job has ended for these members."""

    ids: tuple[str, ...]
    succeeded: bool
    report: Report | None
    printer_id: str | None
    """The member that prints the report."""
    is_drained: bool = False
    """A drain has ended it before its work was done."""


@record
class FailRendezvous:
    """No round could be formed within the join timeout."""

    reason: str


@record
class Notify:
    """One line for the leader's console."""

    text: str
    kind: NoticeKind = NoticeKind.LINE


SentAction = (
    FormRound
    | BreakRound
    | CommitRound
    | BeginDrain
    | CommitDrain
    | WithdrawDrain
    | WantStacks
    | AnswerRequest
    | CompleteCheckpoint
    | EndJob
    | FailRendezvous
    | Notify
)
"""Actions that send a message, or print a line."""

Action = SentAction | DropMembers | CheckLease | SetTimer
