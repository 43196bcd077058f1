"""Actions of the leader: what `decisions` asks it to send."""

from muster.agent.diagnosis.report import Report
from muster.agent.rendezvous.consensus.members import Seat
from muster.agent.rendezvous.consensus.quorum import Base
from muster.agent.rendezvous.interface import BreakKind
from muster.agent.runtime.records import record


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
