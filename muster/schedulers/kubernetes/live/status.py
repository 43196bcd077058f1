"""Builds what `torchx status` shows from what was read of an app. Pure."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from torchx.schedulers.api import DescribeAppResponse
from torchx.specs.api import NONE, AppDef, AppState, ReplicaStatus, RoleStatus

from muster.schedulers.errors import EngineError
from muster.schedulers.failure_report import describe_report, find_root_cause
from muster.schedulers.kubernetes.labels import LABEL_COMPONENT
from muster.schedulers.kubernetes.live.operations import is_cancelled, read_job_end
from muster.schedulers.kubernetes.live.pod_status import PodFact, find_latest_pods
from muster.schedulers.kubernetes.manifests.app_annotation import decode_app
from muster.schedulers.kubernetes.names import label_roles
from muster.schedulers.timestamps import parse_timestamp

_VOLCANO_STATES: Final = {
    "Pending": AppState.PENDING,
    "Aborting": AppState.RUNNING,
    "Aborted": AppState.CANCELLED,
    "Running": AppState.RUNNING,
    "Restarting": AppState.RUNNING,
    "Completing": AppState.RUNNING,
    "Completed": AppState.SUCCEEDED,
    "Terminating": AppState.RUNNING,
    "Terminated": AppState.FAILED,
    "Failed": AppState.FAILED,
}
_POD_STATES: Final = {
    "Pending": AppState.PENDING,
    "Running": AppState.RUNNING,
    "Succeeded": AppState.SUCCEEDED,
    "Failed": AppState.FAILED,
}
_REASONS: Final = {
    "PodFailurePolicy": "",  # the pods' report explains it
    "BackoffLimitExceeded": "more replicas failed than max_retries allows",
    "FailedIndexes": "a replica failed more often than max_retries allows",
    "MaxFailedIndexesExceeded": "a replica failed more often than max_retries allows",
    "DeadlineExceeded": "stopped because another role failed",
}


@dataclass(frozen=True, kw_only=True)
class Observation:
    """All that was read of an app, at about the same time."""

    parents: Sequence[Mapping[str, Any]]
    """Jobs (the first role's first), or one JobSet or Volcano Job; not empty."""
    pods: Sequence[PodFact]
    queue_reason: str = ""
    """Why Kueue or a PodGroup makes the app wait."""
    warnings: Mapping[str, str] = field(default_factory=dict)
    """Newest Warning event, by the name of the object it is about."""
    running: str = ""
    """What is known of an app that runs: a hang with which it goes on, how far it is."""
    lost_pod: str = ""
    """The app has failed, and no pod that exists shows why: the one that is gone, and what is known of its end."""


def build_status(app_id: str, observation: Observation) -> DescribeAppResponse:
    """The response to TorchX's `describe`; also of an app with a damaged annotation, to cancel and delete it."""
    damage = ""
    try:
        app = decode_app(observation.parents[0])
    except EngineError as error:
        app, damage = AppDef(name=""), str(error)
    state = decide_state(observation)
    report = find_report(observation.pods) if state is not AppState.SUCCEEDED else None
    extra: dict[str, Any] = {}
    if any(item.name == "metadata" for item in dataclasses.fields(DescribeAppResponse)):
        extra["metadata"] = dict(app.metadata or {})
    return DescribeAppResponse(
        app_id=app_id,
        state=state,
        # pods that were replaced; workers that failed were restarted in place
        num_restarts=count_replaced_pods(observation) + _count_attempts(report),
        msg="; ".join(filter(None, (damage, build_message(observation, state, report)))) or NONE,
        structured_error_msg=NONE if report is None else json.dumps(_build_torch_error(report)),
        roles=app.roles,
        roles_statuses=_build_replicas(app, observation, state),
        **extra,
    )


def _count_attempts(report: Mapping[str, Any] | None) -> int:
    """How often workers had been restarted in place when the job failed; 0 while it has not."""
    attempt = (report or {}).get("attempt")
    return attempt if isinstance(attempt, int) else 0


def count_replaced_pods(observation: Observation) -> int:
    """How many pods were replaced. Deleted ones do not exist any more: only counters of the Job know of them."""
    latest = find_latest_pods(observation.pods).values()
    seen = len(observation.pods) - len(latest)
    by_index = sum(fact.replaced for fact in latest)
    # Once a Job has ended it counts the pods that it deleted itself, too.
    failed = sum((job.get("status") or {}).get("failed") or 0 for job in _list_jobs(observation.parents, running=True))
    not_replaced = sum(fact.phase == "Failed" for fact in latest)
    return max(seen, by_index, failed - not_replaced)


def _list_jobs(parents: Sequence[Mapping[str, Any]], *, running: bool = False) -> list[Mapping[str, Any]]:
    """The parents that are Jobs of Kubernetes, all or those that have not ended."""
    jobs = [parent for parent in parents if parent["apiVersion"].startswith("batch/v1") and parent["kind"] == "Job"]
    return [job for job in jobs if read_job_end(job) is None] if running else jobs


# -- the state --------------------------------------------------------------------------------------------------------


def decide_state(observation: Observation) -> AppState:
    """The app's state: its end if its parents have ended, else the state of its pods."""
    first = observation.parents[0]
    cancelled = any(map(is_cancelled, observation.parents))
    end = _decide_end(observation.parents)
    if any(read_job_end(job) == "Failed" and not is_cancelled(job) for job in _list_jobs(observation.parents)):
        return AppState.FAILED  # also if its other roles were cancelled afterwards
    if cancelled and end is not AppState.SUCCEEDED:
        pods_ended = all(fact.phase in ("Succeeded", "Failed") for fact in observation.pods)
        return AppState.CANCELLED if end is not None or pods_ended else AppState.RUNNING
    if end is not None:
        return end
    if not first.get("status") and not observation.pods:
        return AppState.SUBMITTED
    return AppState.RUNNING if any(fact.phase == "Running" for fact in observation.pods) else AppState.PENDING


def _decide_end(parents: Sequence[Mapping[str, Any]]) -> AppState | None:
    kind, status = parents[0]["kind"], parents[0].get("status") or {}
    if kind == "JobSet":
        conditions = {item["type"] for item in status.get("conditions") or [] if item["status"] == "True"}
        if "Failed" in conditions:
            return AppState.FAILED
        return AppState.SUCCEEDED if "Completed" in conditions else None
    if not parents[0]["apiVersion"].startswith("batch/"):
        state = _VOLCANO_STATES.get((status.get("state") or {}).get("phase", ""))
        return state if state in (AppState.SUCCEEDED, AppState.FAILED, AppState.CANCELLED) else None
    ends = [read_job_end(job) for job in parents]
    if "Failed" in ends:
        return AppState.FAILED
    return AppState.SUCCEEDED if all(end == "Complete" for end in ends) else None


# -- the message --------------------------------------------------------------------------------------------------


def build_message(observation: Observation, state: AppState, report: Mapping[str, Any] | None) -> str:
    """Why the app is in this state: one clause per group of pods, the most important first."""
    if state in (AppState.SUCCEEDED, AppState.CANCELLED):
        return ""
    clauses: list[str] = []
    if state is AppState.FAILED:
        clauses += [describe_report(report)] if report else []
        clauses.append(observation.lost_pod)
        clauses += _describe_conditions(observation)
        clauses += _describe_running_roles(observation.parents)
    else:
        clauses += [observation.running, observation.queue_reason]
    clauses += _group_pods(observation, state)
    missing = count_missing_pods(observation.parents, observation.pods)
    if missing and observation.pods and state is not AppState.FAILED:
        existing = {fact.name for fact in observation.pods}
        reasons = dict.fromkeys(text for name, text in observation.warnings.items() if name not in existing)
        clauses += [f"{missing} pods not created: {text}{_advise(text)}" for text in reasons]
    if not observation.pods and state is not AppState.FAILED:
        clauses += [f"no pods: {text}{_advise(text)}" for text in dict.fromkeys(observation.warnings.values())]
        if _is_suspended(observation.parents[0]) and not observation.queue_reason:
            clauses.append("suspended: waiting for its queue or to be resumed")
    return "; ".join(clause for clause in clauses if clause)


def count_missing_pods(parents: Sequence[Mapping[str, Any]], pods: Sequence[PodFact]) -> int:
    """How many nodes have no pod yet, according to their Jobs. For other kinds: 1 without any pod, else 0."""
    if not _list_jobs(parents):
        return 0 if pods else 1
    expected = sum((job.get("spec") or {}).get("parallelism") or 0 for job in _list_jobs(parents, running=True))
    return max(0, expected - len(find_latest_pods(pods)))


def _advise(event: str) -> str:
    """Advice on an event that prevents the creation of pods."""
    if "PodSecurity" in event and "restricted" in event:
        return "; try -cfg security=restricted"
    return "; request less, or delete unused objects" if "exceeded quota" in event else ""


def _is_suspended(parent: Mapping[str, Any]) -> bool:
    return bool((parent.get("spec") or {}).get("suspend"))


def _describe_conditions(observation: Observation) -> list[str]:
    has_pod = any(fact.phase == "Failed" for fact in observation.pods)
    clauses = []
    for parent in observation.parents:
        for condition in (parent.get("status") or {}).get("conditions") or []:
            # FailureTarget becomes Failed once the last pods have ended.
            if condition["type"] in ("Failed", "FailureTarget") and condition["status"] == "True":
                reason = condition.get("reason") or ""
                detail = f"{reason}: {condition.get('message', '')}"
                # The failed pod explains more, if it still exists.
                known = _REASONS.get(reason, detail)
                clauses.append(detail if reason == "PodFailurePolicy" and not has_pod else known)
    return list(dict.fromkeys(clauses))


def _describe_running_roles(parents: Sequence[Mapping[str, Any]]) -> list[str]:
    """Flavour `job`: roles of an app that has failed, if the process that submitted it is gone (see `role_stop`)."""
    labels = [job["metadata"].get("labels") or {} for job in _list_jobs(parents, running=True)]
    names = sorted(label.get(LABEL_COMPONENT, "") for label in labels)
    return [f"still running: role {', '.join(names)}; `torchx cancel` stops it"] if names else []


def _group_pods(observation: Observation, state: AppState) -> list[str]:
    """`3/4 Pending: Insufficient nvidia.com/gpu (3 of 3 nodes)`, the largest group first."""
    current = find_latest_pods(observation.pods)
    groups: dict[tuple[str, str], list[PodFact]] = {}
    for fact in current.values():
        reason = fact.reason or (observation.warnings.get(fact.name, "") if fact.phase == "Pending" else "")
        healthy = not reason and fact.phase != "Failed"
        if healthy or (state is AppState.FAILED and fact.phase == "Pending"):
            continue
        groups.setdefault((fact.phase, reason), []).append(fact)
    clauses = []
    for (phase, reason), facts in sorted(groups.items(), key=lambda item: -len(item[1])):
        detail = next((f" ({fact.text.splitlines()[-1][:300]})" for fact in facts if fact.text), "")
        clauses.append(f"{len(facts)}/{len(current)} {phase}: {reason}{detail}")
    return clauses


# -- reports ----------------------------------------------------------------------------------------------------------


def find_report(pods: Sequence[PodFact]) -> Mapping[str, Any] | None:
    """The agents' report of the job, the same on all nodes. The latest counts: the job recovered from earlier ones."""
    reports = [(fact.finished, fact.report) for fact in pods if fact.report is not None and fact.phase == "Failed"]
    return max(reports, key=lambda item: item[0])[1] if reports else None


def _build_torch_error(report: Mapping[str, Any], exit_code: int | None = None) -> dict[str, Any]:
    """Torch's error format, which TorchX prints, with the whole report."""
    failure = find_root_cause(report)
    callstack = failure.get("traceback") or "\n".join(failure.get("stderr_tail") or ()) or describe_report(report)
    message = {
        "message": describe_report(report),
        "errorCode": failure.get("exit_code") or exit_code or 1,
        "extraInfo": {"py_callstack": callstack, "timestamp": str(int(failure.get("time_s") or 0))},
    }
    return {"message": message, "report": report}


def _build_plain_error(fact: PodFact) -> dict[str, Any]:
    text = fact.text.splitlines()[-1] if fact.text else ""
    message = {
        "message": f"{fact.reason}: {text}" if text else fact.reason,
        "errorCode": fact.exit_code or 1,
        "extraInfo": {"py_callstack": fact.text, "timestamp": str(_read_seconds(fact.finished))},
    }
    return {"message": message}


def _read_seconds(timestamp: str) -> int:
    try:
        return parse_timestamp(timestamp)[0]
    except ValueError:
        return 0


# -- replicas ---------------------------------------------------------------------------------------------------------


def _build_replicas(app: Any, observation: Observation, state: AppState) -> list[RoleStatus]:
    current = find_latest_pods(observation.pods)
    labels = label_roles([role.name for role in app.roles])
    statuses = []
    for role, label in zip(app.roles, labels, strict=True):
        replicas = [
            _build_replica(role.name, index, current.get((label, index)), state) for index in range(role.num_replicas)
        ]
        statuses.append(RoleStatus(role=role.name, replicas=replicas))
    return statuses


def _build_replica(role: str, index: int, fact: PodFact | None, app_state: AppState) -> ReplicaStatus:
    if fact is None:
        # Once the app has failed, its controller deletes the other pods.
        without_pod = {AppState.SUCCEEDED: AppState.SUCCEEDED, AppState.FAILED: AppState.CANCELLED}
        state = without_pod.get(app_state, AppState.CANCELLED if app_state is AppState.CANCELLED else AppState.PENDING)
        return ReplicaStatus(id=index, state=state, role=role, hostname="")
    error = NONE
    if fact.phase == "Failed":
        error = json.dumps(_build_torch_error(fact.report, fact.exit_code) if fact.report else _build_plain_error(fact))
    state = _POD_STATES.get(fact.phase, AppState.UNKNOWN)
    return ReplicaStatus(id=index, state=state, role=role, hostname=fact.name, structured_error_msg=error)
