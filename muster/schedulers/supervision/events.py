"""Events of a supervisor: the input of `decisions.decide`."""

from typing import TypeAlias

from muster._shared.records import record
from muster.schedulers.supervision.state import ReplicaId
from muster.schedulers.wording.reasons import Code, Reason, Reasons


@record
class Begin:
    """Start replicas that wait. In a supervisor that was started again, also repeat a stop that was in progress."""


@record
class ReplicaEnded:
    """A replica has ended."""

    replica: ReplicaId
    exit_code: int | None
    """128+n if signal n ended it. None: not known (the container vanished, the supervisor had died)."""
    reasons: Reasons = ()
    """Why, beside the exit code: out of memory, no such file, the report of its job."""
    final: bool = False
    """Another try would be useless: the command does not exist, the image is gone."""


@record
class Recover:
    """A person continues the app, whose supervisor had died. These replicas have ended since.

    How they ended is not known.
    """

    replicas: tuple[ReplicaId, ...]


@record
class CancelRequested:
    """A request to stop the app, politely first."""

    reasons: Reasons = (Reason(code=Code.CANCELLED),)
    is_interrupt: bool = False
    """A Ctrl-C at the command that the app belongs to, not a cancel from elsewhere."""


@record
class DrainRequested:
    """The app ends, and its agents are asked to stop all ranks at one step: they get no signal before `limit_s`."""

    limit_s: float
    reasons: Reasons = (Reason(code=Code.STOPPED),)


@record
class KillRequested:
    """A request to kill the app at once."""

    reasons: Reasons = (Reason(code=Code.KILLED),)


@record
class ResizeRequested:
    """A request to change the number of replicas of an elastic role."""

    role: str
    replicas: int


@record
class GraceExpired:
    """The grace period of this number has passed."""

    number: int


@record
class LingerExpired:
    """The time in which agents of a failed job end by themselves has passed."""

    number: int


@record
class KillExpired:
    """Since the kill that had this number `decisions.KILL_LIMIT_S` have passed."""

    number: int


Event: TypeAlias = (
    Begin
    | ReplicaEnded
    | Recover
    | CancelRequested
    | DrainRequested
    | KillRequested
    | ResizeRequested
    | GraceExpired
    | LingerExpired
    | KillExpired
)
