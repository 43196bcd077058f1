"""Actions of a supervisor: what `decisions.decide` has it do with the replicas of its app."""

from dataclasses import dataclass
from typing import TypeAlias

from muster.schedulers.supervision.state import Outcome, ReplicaId


@dataclass(frozen=True, kw_only=True)
class Start:
    """Start these replicas, in order."""

    replicas: tuple[ReplicaId, ...]


@dataclass(frozen=True, kw_only=True)
class Stop:
    """Ask these replicas to end, all at once; GraceExpired with `number` is due one grace period later."""

    replicas: tuple[ReplicaId, ...]
    number: int
    is_interrupt: bool = False
    """A person has pressed Ctrl-C: see `ReplicaDriver.stop`."""


@dataclass(frozen=True, kw_only=True)
class Linger:
    """Do nothing yet; LingerExpired with `number` is due after `delay_s`."""

    number: int
    delay_s: float


@dataclass(frozen=True, kw_only=True)
class Kill:
    """End these replicas now; KillExpired with `number` is due `decisions.KILL_LIMIT_S` later."""

    replicas: tuple[ReplicaId, ...]
    number: int


@dataclass(frozen=True, kw_only=True)
class Finish:
    """Nothing runs any more: record the outcome and exit."""

    outcome: Outcome
    reason: str


Action: TypeAlias = Start | Stop | Linger | Kill | Finish
