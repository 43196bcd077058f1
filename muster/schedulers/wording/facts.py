"""What is known of an app. `adapter.status` builds TorchX's response from it, and `job_line` the line for people."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torchx.specs import AppDef, AppState
from torchx.specs.api import ReplicaStatus

from muster._shared.reports import Report
from muster.schedulers.wording.reasons import JobFacts, Reasons


@dataclass
class ExplainedReplica(ReplicaStatus):  # type: ignore[misc]
    """A replica of which its adapter knows why it is in its state, or has an error in torch's format."""

    reasons: Reasons = ()


@dataclass(frozen=True, kw_only=True)
class AppFacts:
    """What is known of an app, at about one time."""

    app_id: str
    app: AppDef
    """As submitted, without secrets. See `runner.app_codec`."""
    state: AppState
    replicas: Sequence[ReplicaStatus] | None
    """The replicas of all roles, in order of role and index. None: none has been recorded yet."""
    restarts: int = 0
    """The number of restarts: of replicas and, in place, of workers."""
    reasons: Reasons = ()
    """Why the app is in this state, the most important reason first."""
    jobs: Mapping[str, JobFacts] = field(default_factory=dict)
    """What the agents of each role report, by role. For an app that has ended, it is their last report.

    See `failure_report.RecordReader`.
    """
    error: str | None = None
    """The root cause in torch's format, as JSON. None: there is none."""
    reports: Mapping[str, Report] = field(default_factory=dict)
    """The reports of its agents, by role, where they say more than the replicas."""
    ui_url: str | None = None
    """A link for the user."""
    logs: str = ""
    """Where its logs are, for people, if no link leads there. "": not known."""
    submitted_s: float | None = None
    """Wall-clock seconds. None: not known."""
    since_s: float | None = None
    """When it came into its state, in wall-clock seconds. None: not known.

    Agents of a job that runs may know it better.
    """
