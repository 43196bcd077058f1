"""Events of a supervisor: what `decisions.decide` is told."""

from dataclasses import dataclass
from typing import TypeAlias

from muster.schedulers.supervision.state import ReplicaId

# -- events ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Begin:
    """Start what waits; after a supervisor was started again also: stop once more what was being stopped."""


@dataclass(frozen=True, kw_only=True)
class ReplicaEnded:
    """A replica is gone."""

    replica: ReplicaId
    exit_code: int | None
    """128+n when signal n ended it; None when nobody knows (the container vanished, the supervisor had died)."""
    reason: str = ""
    """One clause to add: "out of memory", "could not be started: no such file"."""
    final: bool = False
    """Trying again would be no use: the command does not exist, the image is gone."""


@dataclass(frozen=True, kw_only=True)
class CancelRequested:
    """Someone wants the app stopped, politely first."""

    reason: str = "cancelled"


@dataclass(frozen=True, kw_only=True)
class KillRequested:
    """Someone wants the app gone at once."""

    reason: str = "killed"


@dataclass(frozen=True, kw_only=True)
class GraceExpired:
    """The grace period of this number has passed."""

    number: int


@dataclass(frozen=True, kw_only=True)
class LingerExpired:
    """The time in which agents of a failed job end by themselves has passed."""

    number: int


Event: TypeAlias = Begin | ReplicaEnded | CancelRequested | KillRequested | GraceExpired | LingerExpired


# -- actions --------------------------------------------------------------------------------------------------------
