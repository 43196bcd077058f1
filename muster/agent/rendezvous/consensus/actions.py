"""Actions of the leader: what `decisions` asks it to send."""

from muster.agent.diagnosis.report import Report
from muster.agent.rendezvous.consensus.members import RankAssignment
from muster.agent.rendezvous.consensus.quorum import QuorumBase
from muster.agent.rendezvous.interface import BreakKind
from muster.agent.runtime.records import record


@record
class FormRound:
    """Send every seat its round; rank 0's port is `master_port`."""

    number: int
    attempt: int
    restarts_left: int
    world_size: int
    master_port: int
    seats: tuple[RankAssignment, ...]
    """In order of group rank."""
    bases: tuple[QuorumBase, ...]
    early: str | None


@record
class BreakRound:
    """Tell these members to stop the workers of the round."""

    ids: tuple[str, ...]
    number: int
    kind: BreakKind
    reason: str
    want_stacks: bool
    next_attempt: int
    early: str | None


@record
class CommitRound:
    """Every member of the round has confirmed it: older rounds are no base for anybody any more."""

    number: int


@record
class EndJob:
    """The job is over for these members."""

    ids: tuple[str, ...]
    succeeded: bool
    report: Report | None
    printer: str | None
    """The member that prints the report."""


@record
class FailRendezvous:
    """The nodes did not come together in time."""

    reason: str


@record
class Notify:
    """One line for the leader's console."""

    text: str


Action = FormRound | BreakRound | CommitRound | EndJob | FailRendezvous | Notify
