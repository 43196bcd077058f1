"""Actions of a supervisor: what `decisions.decide` has it do with the replicas of its app."""

from typing import TypeAlias

from muster._shared.records import record
from muster.schedulers.supervision.state import Outcome, ReplicaId


@record
class Start:
    """Start these replicas, in order."""

    replicas: tuple[ReplicaId, ...]


@record
class Stop:
    """Ask these replicas to end, all at once. GraceExpired with `number` is due one grace period later."""

    replicas: tuple[ReplicaId, ...]
    number: int
    is_interrupt: bool = False
    """A person has pressed Ctrl-C: see `ReplicaDriver.stop`."""


@record
class Linger:
    """Do nothing yet. LingerExpired with `number` is due after `delay_s`."""

    number: int
    delay_s: float


@record
class Kill:
    """End these replicas now. KillExpired with `number` is due `decisions.KILL_LIMIT_S` later."""

    replicas: tuple[ReplicaId, ...]
    number: int


@record
class Finish:
    """Nothing runs any more, so record the outcome and exit."""

    outcome: Outcome


Action: TypeAlias = Start | Stop | Linger | Kill | Finish
