"""The state of an app and its replicas, as the supervisor records it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from muster._shared.role_policy import RolePolicy
from muster.schedulers.wording.reasons import Reasons


@dataclass(frozen=True, order=True)
class ReplicaId:
    """One replica of an app."""

    role: str
    index: int

    def __str__(self) -> str:
        return f"{self.role}/{self.index}"


class RetryScope(str, Enum):
    """What starts again when a replica of the role fails: TorchX's RetryPolicy without its synonyms."""

    REPLICA = "replica"
    ROLE = "role"
    APPLICATION = "application"


class ReplicaStatus(str, Enum):
    """The state of a replica."""

    WAITING = "waiting"
    """It is to be started (again)."""
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    LOST = "lost"
    """Ended without success and not started again. The app goes on without it."""
    CANCELLED = "cancelled"
    """Stopped by us."""


class AppPhase(str, Enum):
    """The phase of an app."""

    PENDING = "pending"
    RUNNING = "running"
    RESTARTING = "restarting"
    """Some roles are being stopped in order to start them again."""
    ENDING = "ending"
    """All replicas are being stopped. The outcome is known."""
    ENDED = "ended"


class Outcome(str, Enum):
    """How an app ended. The names are those of TorchX's states."""

    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"


@dataclass(frozen=True, kw_only=True)
class SupervisedRole:
    """What the decisions need to know about a role."""

    name: str
    replicas: int
    runs_agent: bool
    """Runs `muster.agent`, so that exit codes have the contract's meaning."""
    min_replicas: int | None = None
    """With fewer replicas the app has failed. None: all are needed."""
    max_retries: int = 0
    retry_scope: RetryScope = RetryScope.APPLICATION
    """Ignored for agents, whose lost replicas are always replaced one by one."""
    policy: RolePolicy = field(default_factory=RolePolicy)
    ports: Mapping[str, int] = field(default_factory=dict)
    """Its `port_map`."""

    @property
    def is_elastic(self) -> bool:
        """Whether the number of replicas can change while it runs."""
        return self.runs_agent and self.needed < self.replicas

    @property
    def needed(self) -> int:
        """The number of replicas that the app needs to go on."""
        return self.replicas if self.min_replicas is None else self.min_replicas

    @property
    def scope(self) -> RetryScope:
        """What starts again when one of its replicas is lost."""
        return RetryScope.REPLICA if self.runs_agent else self.retry_scope


@dataclass(frozen=True, kw_only=True)
class ReplicaState:
    """The state of one replica, for the decisions."""

    status: ReplicaStatus = ReplicaStatus.WAITING
    starts: int = 0
    restarts: int = 0
    """How often its role's policy had it started again."""
    quick_ends: int = 0
    """How many of its last ends in a row came within `MOST_BACKOFF_S` of a start."""
    exit_code: int | None = None
    """The exit code of its last end, 128+n for signal n. None: there is none yet, or it is not known."""


@dataclass(frozen=True, kw_only=True)
class SupervisedApp:
    """The state of the whole app, for the decisions."""

    replicas: Mapping[ReplicaId, ReplicaState]
    phase: AppPhase = AppPhase.PENDING
    retries: Mapping[str, int] = field(default_factory=dict)
    """Retries used, by role."""
    restarting: tuple[str, ...] = ()
    """Roles being stopped in order to start them again."""
    grace_number: int = 0
    """Distinguishes the running grace period from earlier ones."""
    lingering: int = 0
    """Number of the period in which agents end by themselves. 0: none runs."""
    lingering_role: str = ""
    """The role of these agents. "": all roles."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """How many replicas a role has by request, those with the lowest indices.

    A role that is not named has all that were submitted.
    """
    leaving: tuple[ReplicaId, ...] = ()
    """Replicas that run and were told to end, because their role was to have fewer."""
    over: tuple[str, ...] = ()
    """Roles of which nothing is started again: elastic ones whose job has succeeded, as the exit code of one of their
    agents says, those that have failed and are not critical, and those whose end came with that of another role."""
    failed: Mapping[str, Reasons] = field(default_factory=dict)
    """Roles that have failed for good and are not critical, and why."""
    resizes: int = 0
    """How many requests to resize were handled, refused ones too: so a command sees that its own was."""
    draining: int = 0
    """How many replicas were asked to stop at one step, and end as cancelled while they linger."""
    outcome: Outcome | None = None
    reasons: Reasons = ()
    """Why the app ended, or what was last done about a lost replica."""

    def is_wanted(self, replica: ReplicaId) -> bool:
        """Return whether its role, as it was last resized, has this replica."""
        size = self.sizes.get(replica.role)
        return size is None or replica.index < size

    def running(self, roles: Iterable[str] | None = None) -> tuple[ReplicaId, ...]:
        """Return the replicas that run, of all roles or of the given ones."""
        wanted = None if roles is None else set(roles)
        return tuple(
            each
            for each, state in self.replicas.items()
            if state.status is ReplicaStatus.RUNNING and (wanted is None or each.role in wanted)
        )

    @property
    def is_draining(self) -> bool:
        """Whether replicas were asked to stop at one step."""
        return self.draining > 0

    @property
    def num_restarts(self) -> int:
        """Retries used and restarts by policies, all roles together."""
        return sum(self.retries.values()) + sum(each.restarts for each in self.replicas.values())

    @property
    def app_state(self) -> str:
        """The name of TorchX's AppState."""
        if self.phase is AppPhase.PENDING:
            return "PENDING"
        return "RUNNING" if self.outcome is None or self.phase is not AppPhase.ENDED else self.outcome.value
