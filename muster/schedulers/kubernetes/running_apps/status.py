"""Builds what `torchx status` shows from what was read of an app. Pure."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from torchx.specs.api import AppDef, AppState, ReplicaStatus

from muster._shared.contract import ExitCode, show_controls
from muster._shared.reports import Report
from muster.schedulers.errors import EngineError
from muster.schedulers.failure_report import describe_report, explain_report, find_root_cause
from muster.schedulers.kubernetes import kube
from muster.schedulers.kubernetes.manifests.bundles import decode_app, decode_roles
from muster.schedulers.kubernetes.running_apps.app import (
    find_canceller,
    is_cancelled,
    is_extra,
    is_suspended,
    list_conditions,
    read_job_end,
)
from muster.schedulers.kubernetes.running_apps.pod_status import PodFact, find_latest_pods
from muster.schedulers.timestamps import parse_timestamp
from muster.schedulers.wording.facts import AppFacts, ExplainedReplica
from muster.schedulers.wording.reasons import Code, JobFacts, Reason, Reasons, identify

_POD_STATES: Final = {
    "Pending": AppState.PENDING,
    "Running": AppState.RUNNING,
    "Succeeded": AppState.SUCCEEDED,
    "Failed": AppState.FAILED,
}
_STATES_WITHOUT_POD: Final = {
    AppState.SUCCEEDED: AppState.SUCCEEDED,
    AppState.FAILED: AppState.CANCELLED,
    AppState.CANCELLED: AppState.CANCELLED,
    AppState.UNKNOWN: AppState.UNKNOWN,
}
"""State of the app, or of a role whose Job is gone -> state of a replica that has no pod. All others are PENDING."""

_CONDITIONS: Final = {
    "BackoffLimitExceeded": Code.TOO_MANY_FAILED,
    "FailedIndexes": Code.NO_RETRY_LEFT,
    "MaxFailedIndexesExceeded": Code.NO_RETRY_LEFT,
}
_POLICY: Final = "PodFailurePolicy"
_DEADLINE: Final = "DeadlineExceeded"
_GROUPS: Final = {"Pending": Code.PODS_WAIT, "Running": Code.PODS_RUN, "Failed": Code.PODS_FAILED}


@dataclass(frozen=True, kw_only=True)
class Observation:
    """All that was read of an app, at about the same time."""

    parents: Sequence[Mapping[str, Any]]
    """Jobs (the first has the AppDef), or one JobSet. It is never empty."""
    pods: Sequence[PodFact]
    queue: Reason | None = None
    """Why Kueue or a PodGroup makes the app wait."""
    warnings: Mapping[str, Reason] = field(default_factory=dict)
    """Newest Warning event, by the name of the object it is about."""
    events_refused: bool = False
    """Only events can say why pods wait or do not exist, and the account may not list them."""
    jobs: Mapping[str, JobFacts] = field(default_factory=dict)
    """What the agents of an app that runs have reported, by role."""
    restarts: Mapping[tuple[str, int], int] = field(default_factory=dict)
    """How often policies had commands started again in pods that run, by the label of the role and index."""
    lost_pod: Reason | None = None
    """The app has failed, and no pod that exists shows why: the one that is gone, and what is known of its end."""
    ends: Mapping[str, str] = field(default_factory=dict)
    """Flavour `job`: how Jobs were seen to end before, see `list_ends`. They may have been deleted since."""
    last_end: str = ""
    """No pod runs: when the last one was deleted or evicted, as RFC 3339. It is "" if no event says it."""
    ran_before: bool = False
    """The app was seen to run before."""


def build_facts(app_id: str, observation: Observation) -> AppFacts:
    """Return what is known of an app. One with a damaged annotation is included, to cancel and delete it."""
    damage: Reasons = ()
    try:
        app = decode_app(observation.parents[0])
    except EngineError as error:
        app, damage = AppDef(name=""), (Reason(code=Code.DAMAGED, text=str(error)),)
    state = decide_state(observation)
    report = find_report(observation.pods) if state is not AppState.SUCCEEDED else None
    submitted_s, since_s = _find_times(observation, state)
    return AppFacts(
        app_id=app_id,
        app=app,
        state=state,
        replicas=_build_replicas(app, observation, state),
        # of pods, of commands in them, and of workers in place
        restarts=count_replaced_pods(observation)
        + sum(observation.restarts.values())
        + (0 if report is None else report.attempt),
        reasons=(*damage, *explain_app(observation, state, report)),
        jobs=observation.jobs,
        error=None if report is None else _build_torch_error(report),
        reports=_find_reports(app, observation),
        logs=", ".join(dict.fromkeys(fact.logs for fact in observation.pods if fact.logs)),
        submitted_s=submitted_s,
        since_s=since_s,
    )


def _find_times(observation: Observation, state: AppState) -> tuple[float | None, float | None]:
    """Return when an app was submitted, and since when it is in its state. None: not known."""
    submitted_s = find_submitted_s(observation.parents)
    if state in (AppState.SUBMITTED, AppState.PENDING) or (state is AppState.RUNNING and _waits_again(observation)):
        return submitted_s, _find_wait_s(observation) or submitted_s
    if state is AppState.RUNNING:
        started = (str((parent.get("status") or {}).get("startTime") or "") for parent in observation.parents)
        return submitted_s, min(filter(None, map(_parse_time, started)), default=None)
    ended = [
        str(condition.get("lastTransitionTime") or "")
        for parent in observation.parents
        for condition in list_conditions(parent)
        if condition["type"] in ("Failed", "Complete", "Completed") and condition["status"] == "True"
    ]
    return submitted_s, max(filter(None, map(_parse_time, ended)), default=None)


def _find_wait_s(observation: Observation) -> float | None:
    """Return since when an app waits that ran before. None: it did not, or this is not known."""
    ended_s = _parse_time(observation.last_end)
    if ended_s is not None or not has_run(observation):
        return ended_s
    created = (fact.created for fact in _find_current(observation).values())
    return min(filter(None, map(_parse_time, created)), default=None)


def has_run(observation: Observation) -> bool:
    """Return whether it is known that a pod of an app runs, or did before."""
    is_seen = any(fact.phase in ("Running", "Succeeded", "Failed") for fact in observation.pods)
    return is_seen or observation.ran_before or bool(observation.last_end) or count_replaced_pods(observation) > 0


def _waits_again(observation: Observation) -> bool:
    """Return whether no pod of an app runs, although one did before, and not all have ended."""
    if any(fact.phase == "Running" for fact in observation.pods) or not has_run(observation):
        return False
    is_waiting = any(fact.phase == "Pending" for fact in _find_current(observation).values())
    return is_waiting or not observation.pods or count_missing_pods(observation.parents, observation.pods) > 0


def find_submitted_s(parents: Sequence[Mapping[str, Any]]) -> float | None:
    """Return when an app was submitted, by the cluster's clock, in seconds since the epoch. None: not known."""
    created = [
        str(
            (metadata.get("annotations") or {}).get(kube.SUBMITTED_ANNOTATION)
            or metadata.get("creationTimestamp")
            or ""
        )
        for metadata in (parent["metadata"] for parent in parents)
    ]
    return min(filter(None, map(_parse_time, created)), default=None)


def _parse_time(text: str) -> float | None:
    try:
        return float(parse_timestamp(text)[0])
    except ValueError:
        return None


def count_replaced_pods(observation: Observation) -> int:
    """Return how often pods were replaced.

    Deleted ones do not exist any more: only counters of the Job know of them.
    """
    latest = list(find_latest_pods(observation.pods).values())
    newest = set(map(id, latest))
    earlier = [fact for fact in observation.pods if id(fact) not in newest]
    drained = Counter((fact.role, fact.index) for fact in earlier if fact.is_drained)
    # A drain of all pods is one restart.
    seen = max(drained.values(), default=0) + sum(not fact.is_drained for fact in earlier)
    by_index = max((fact.drained_before for fact in latest), default=0) + sum(fact.failed_before for fact in latest)
    # Ended Jobs also count deleted pods.
    failed = sum((job.get("status") or {}).get("failed") or 0 for job in _list_jobs(observation.parents, running=True))
    not_replaced = sum(fact.phase == "Failed" and not fact.is_drained for fact in latest)
    # A JobSet replaces all its pods at once.
    restarts = sum((parent.get("status") or {}).get("restarts") or 0 for parent in observation.parents)
    return max(seen, by_index, failed - not_replaced, restarts)


def _list_jobs(parents: Sequence[Mapping[str, Any]], *, running: bool = False) -> list[Mapping[str, Any]]:
    """Return the parents that are Jobs of Kubernetes, all or those that have not ended."""
    jobs = [parent for parent in parents if kube.parse_kind(parent) == kube.JOB]
    return [job for job in jobs if read_job_end(job) is None] if running else jobs


# -- the state --------------------------------------------------------------------------------------------------------


def decide_state(observation: Observation) -> AppState:
    """Return the app's state: its end if its parents have ended, else whether a pod of it runs or has run.

    So no state is followed by an earlier one. The exception: what is suspended waits again, as its queue says.

    UNKNOWN: what is left has succeeded, and how a role has ended is not known, since its Job is deleted (`ttl_s`).
    """
    cancelled = any(map(is_cancelled, observation.parents))
    suspended = any(map(is_suspended, observation.parents))
    ends = ["Complete" if end and is_extra(parent) else end for parent, end in _read_ends(observation)]
    end = AppState.FAILED if "Failed" in ends else AppState.SUCCEEDED if {*ends} == {"Complete"} else None
    if end is AppState.SUCCEEDED and list_unknown_roles(observation):
        end = AppState.UNKNOWN
    if "Failed" in _list_all_ends(observation).values():
        return AppState.FAILED  # even if other roles were cancelled later
    if cancelled and end is not AppState.SUCCEEDED:
        # The deadline of a Job that is not suspended ends it soon. Until then it may still create pods.
        pods_ended = all(fact.phase in ("Succeeded", "Failed") for fact in observation.pods)
        if end is not None or (suspended and pods_ended):
            return AppState.CANCELLED
    elif end is not None:
        return end
    is_queued = suspended and not cancelled  # a cancel suspends a JobSet
    if any(fact.phase == "Running" for fact in observation.pods) or (has_run(observation) and not is_queued):
        return AppState.RUNNING
    is_new = not observation.parents[0].get("status") and not observation.pods
    return AppState.SUBMITTED if is_new else AppState.PENDING


# -- the reasons ------------------------------------------------------------------------------------------------------


def explain_app(observation: Observation, state: AppState, report: Report | None) -> Reasons:
    """Return why the app is in this state: one reason per group of pods, the most important first."""
    alone = _list_failed_alone(observation)
    if state is AppState.SUCCEEDED:
        return tuple(alone)
    if state is AppState.CANCELLED:
        by = find_canceller(observation.parents)
        return (Reason(code=Code.STOPPED if by == kube.BY_STOP else Code.CANCELLED),) if by else ()
    if state is AppState.FAILED:
        return tuple(dict.fromkeys(_explain_failure(observation, report)))
    unknown = Code.ROLE_UNKNOWN if state is AppState.UNKNOWN else Code.ROLE_DELETED
    found = [*alone, *([] if observation.queue is None else [observation.queue])]
    if state in (AppState.PENDING, AppState.RUNNING) and _waits_again(observation):
        found.append(Reason(code=Code.RAN_BEFORE))
    found += _group_pods(observation, state, report)
    found += [Reason(code=unknown, role=name) for name in list_unknown_roles(observation)]
    if state is AppState.RUNNING:
        found += [*_explain_replaced(observation), *_explain_starting(observation)]
    found += _explain_missing(observation)
    if state is AppState.PENDING and observation.queue is None and not observation.events_refused:
        found += _count_unexplained(observation)
    if observation.events_refused:
        found.append(Reason(code=Code.EVENTS_HIDDEN))
    return tuple(dict.fromkeys(found))


def _read_ends(observation: Observation) -> list[tuple[Mapping[str, Any], str | None]]:
    return [(parent, read_job_end(parent)) for parent in observation.parents]


def _list_failed_alone(observation: Observation) -> list[Reason]:
    """Return why roles have failed without which the app goes on."""
    found = []
    for job in _list_jobs(observation.parents):
        is_served = kube.SERVED_ANNOTATION in (job["metadata"].get("annotations") or {})
        if is_extra(job) and not is_served and read_job_end(job) == "Failed":
            label = kube.read_role(job)
            facts = [fact for fact in observation.pods if fact.role == label and fact.phase == "Failed" and fact.reason]
            last = max(facts, key=lambda fact: fact.finished, default=None)
            causes = (last.reason,) if last is not None and last.reason is not None else ()
            found.append(Reason(code=Code.FAILED_ALONE, role=label, causes=causes))
    return found


def _explain_failure(observation: Observation, report: Report | None) -> Iterator[Reason]:
    yield from [explain_report(report)] if report else _list_told(observation.parents)
    if observation.lost_pod is not None:
        yield observation.lost_pod
    yield from _explain_conditions(observation)
    for label in _list_gone_roles(observation):
        if observation.ends.get(label) == "Failed":
            yield Reason(code=Code.ROLE_FAILED, role=label)
    running = tuple(sorted(map(kube.read_role, _list_jobs(observation.parents, running=True))))
    if running:  # its submitter is gone (flavour `job`, see `cancelling.RoleStop`)
        yield Reason(code=Code.ROLES_RUN, roles=running)
    yield from _group_pods(observation, AppState.FAILED, report)
    if report is None and any(map(_lacks_report, observation.pods)):
        yield Reason(code=Code.REPORT_NOT_KEPT)
    for name in list_unknown_roles(observation):
        yield Reason(code=Code.ROLE_DELETED, role=name)


def _explain_missing(observation: Observation) -> Iterator[Reason]:
    """Say why pods were not created."""
    missing = count_missing_pods(observation.parents, observation.pods)
    if missing and observation.pods:
        existing = {fact.name for fact in observation.pods}
        for each in (event for name, event in observation.warnings.items() if name not in existing):
            yield Reason(code=Code.PODS_MISSING, count=missing, causes=(each,))
    if not observation.pods:
        for each in observation.warnings.values():
            yield Reason(code=Code.NO_PODS, causes=(each,))
        if is_suspended(observation.parents[0]) and observation.queue is None:
            yield _explain_suspended(observation.parents[0])


def _lacks_report(fact: PodFact) -> bool:
    """Return whether an agent has ended because its job has failed, and the pod has not kept what it said last."""
    return (
        fact.phase == "Failed" and fact.exit_code == 1 and not fact.text and bool(fact.log_dir) and not fact.is_drained
    )


def _list_told(parents: Sequence[Mapping[str, Any]]) -> list[Reason]:
    """Return what the agents of an app have left of its failure in the annotations of its Jobs, without the time."""
    annotations = (parent["metadata"].get("annotations") or {} for parent in parents)
    told = [text for each in annotations for name, text in each.items() if kube.FAILED_ANNOTATION.fullmatch(name)]
    return [Reason(code=Code.AGENT_SAID, text=show_controls(text.partition(" ")[2])) for text in told]


def _count_unexplained(observation: Observation) -> Iterator[Reason]:
    """Count the pods of a pending app that wait without a reason, and name the command that shows more."""
    parent = observation.parents[0]
    if not observation.pods:
        if not observation.warnings and not is_suspended(parent):
            yield Reason(code=Code.JOB_UNEXPLAINED, by=f"{_build_kubectl(parent)} describe {_name_object(parent)}")
        return
    current = _find_current(observation)
    total = max(_count_nodes_of_jobs(observation), len(current))
    waits = [
        fact
        for fact in sorted(current.values(), key=lambda fact: (fact.role, fact.index))
        if fact.phase == "Pending" and fact.reason is None and fact.name not in observation.warnings
    ]
    if waits:
        by = f"{_build_kubectl(parent)} describe pod {waits[0].name}"
        yield Reason(code=Code.PODS_UNEXPLAINED, count=len(waits), total=total, by=by)


def _build_kubectl(parent: Mapping[str, Any]) -> str:
    return f"kubectl -n {parent['metadata'].get('namespace') or 'default'}"


def _name_object(parent: Mapping[str, Any]) -> str:
    return f"{kube.parse_kind(parent).kind.lower()} {parent['metadata']['name']}"


def _explain_starting(observation: Observation) -> Iterator[Reason]:
    """Say which nodes of a running app have no pod that runs, if nothing else says why."""
    if observation.warnings:
        return
    current = _find_current(observation)
    starts = sorted(fact.index for fact in current.values() if fact.phase == "Pending" and fact.reason is None)
    if starts:
        yield Reason(code=Code.PODS_START, nodes=tuple(starts), total=len(current))
    missing = count_missing_pods(observation.parents, observation.pods)
    if missing:
        job = next(iter(_list_jobs(observation.parents, running=True)), observation.parents[0])
        by = f"{_build_kubectl(job)} describe job {job['metadata']['name']}"
        yield Reason(code=Code.PODS_REPLACED_SOON, count=missing, by=by)


def _explain_replaced(observation: Observation) -> Reasons:
    """Say of the last pod that has failed and was replaced how it ended. Empty: none that exists.

    A pod that ended with another one, which was disrupted, says nothing.
    """
    current = _find_current(observation)
    ended = [
        (fact, fact.reason)
        for fact in observation.pods
        if fact.phase == "Failed"
        and fact.reason is not None
        and not (fact.is_drained and fact.reason.code is Code.EXITED)
        and current.get((fact.role, fact.index), fact) is not fact
    ]
    if not ended:
        return ()
    last, reason = max(ended, key=lambda each: each[0].finished)
    return (Reason(code=Code.POD_REPLACED, nodes=(last.index,), causes=(reason,)),)


def count_nodes_now(parents: Sequence[Mapping[str, Any]], label: str) -> int | None:
    """Return how many nodes a role has after any resize. None: not known, or its kind cannot be resized."""
    for job in _list_jobs(parents):
        if (job["metadata"].get("labels") or {}).get(kube.LABEL_COMPONENT) == label:
            nodes = (job.get("spec") or {}).get("completions")
            return nodes if isinstance(nodes, int) else None
    return None


def _find_current(observation: Observation) -> dict[tuple[str, int], PodFact]:
    """Return the newest pod of every node, without the nodes that a resize has ended.

    A pod that was drained is replaced, unless the app has failed: it says nothing of its node any more.
    """
    latest = find_latest_pods(observation.pods)
    has_failed = decide_state(observation) is AppState.FAILED
    nodes = {role: count_nodes_now(observation.parents, role) for role, _ in latest}
    return {
        (role, index): fact
        for (role, index), fact in latest.items()
        if ((known := nodes[role]) is None or index < known or fact.phase == "Running")
        and (has_failed or not fact.is_drained)
    }


def count_missing_pods(parents: Sequence[Mapping[str, Any]], pods: Sequence[PodFact]) -> int:
    """Return how many nodes have no pod yet, according to their Jobs. For other kinds: 1 without any pod, else 0."""
    if not _list_jobs(parents):
        return 0 if pods else 1
    expected = sum((job.get("spec") or {}).get("parallelism") or 0 for job in _list_jobs(parents, running=True))
    return max(0, expected - sum(not fact.is_drained for fact in find_latest_pods(pods).values()))


def _explain_suspended(parent: Mapping[str, Any]) -> Reason:
    labels = parent["metadata"].get("labels") or {}
    if kube.KUEUE_QUEUE in labels:
        return Reason(code=Code.SUSPENDED_IN_QUEUE, queue=labels[kube.KUEUE_QUEUE])
    patch = """--type=merge -p '{"spec":{"suspend":false}}'"""
    return Reason(code=Code.SUSPENDED, by=f"{_build_kubectl(parent)} patch {_name_object(parent)} {patch}")


def _explain_conditions(observation: Observation) -> Iterator[Reason]:
    has_pod = any(fact.phase == "Failed" for fact in observation.pods)
    for parent in observation.parents:
        for condition in list_conditions(parent):
            # FailureTarget becomes Failed.
            if condition["type"] not in ("Failed", "FailureTarget") or condition["status"] != "True":
                continue
            word = condition.get("reason") or ""
            if word == _POLICY and has_pod:
                continue  # the pods' report explains it
            if word == _DEADLINE and _has_failed_before(observation, parent):
                yield Reason(code=Code.OTHER_ROLE_FAILED)
            elif word in _CONDITIONS:
                yield Reason(code=_CONDITIONS[word])
            else:
                yield Reason(code=Code.SCHEDULER_SAID, word=word, text=condition.get("message", ""))


def _has_failed_before(observation: Observation, parent: Mapping[str, Any]) -> bool:
    """Return whether another role has failed by itself: its end gives the others a deadline."""
    return any(
        condition["type"] == "Failed" and condition.get("reason") != _DEADLINE
        for other in observation.parents
        if other is not parent
        for condition in list_conditions(other)
    )


def _list_gone_roles(observation: Observation) -> list[str]:
    """List labels of roles whose Job was deleted after its own end, while others remain (flavour `job`)."""
    present = {role for role in map(kube.read_role, _list_jobs(observation.parents)) if role}
    try:
        labels = list(decode_roles(observation.parents[0])) if present else []
    except EngineError:  # damaged, as the status says
        return []
    return [label for label in labels if label not in present]


def list_unknown_roles(observation: Observation) -> list[str]:
    """List roles whose Job is deleted, and was not seen to end before (flavour `job`)."""
    return [label for label in _list_gone_roles(observation) if label not in observation.ends]


def list_ends(parents: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return how the Jobs have ended that did, by the label of their role (flavour `job`). Leave out cancelled ones."""
    jobs = [job for job in _list_jobs(parents) if not is_extra(job) or read_job_end(job) == "Complete"]
    ends = [(kube.read_role(job), read_job_end(job), is_cancelled(job)) for job in jobs]
    return {role: end for role, end, cancelled in ends if end == "Complete" or (end and not cancelled)}


def _list_all_ends(observation: Observation) -> dict[str, str]:
    return {**observation.ends, **list_ends(observation.parents)}


def _group_pods(observation: Observation, state: AppState, report: Report | None) -> Iterator[Reason]:
    """Group pods by what they wait for, or how they ended, the largest group first.

    The second number is that of the nodes: pods that were deleted count, too. Pods that failed are named, unless they
    only repeat the report.
    """
    current = _find_current(observation)
    groups: dict[tuple[object, ...], list[tuple[PodFact, Reason]]] = {}
    for fact in current.values():
        reason = fact.reason
        if reason is None and fact.phase == "Pending":
            reason = observation.warnings.get(fact.name)
        repeats = state is AppState.FAILED and (fact.phase == "Pending" or (report is not None and _repeats(fact)))
        if reason is not None and not repeats:
            same = (reason,) if fact.phase == "Failed" else identify(reason)
            groups.setdefault((fact.phase, same), []).append((fact, reason))
    total = max(_count_nodes_of_jobs(observation), len(current))
    for group in sorted(groups.values(), key=lambda group: -len(group)):
        facts = sorted((fact for fact, _ in group), key=lambda fact: (fact.role, fact.index))
        text = next((fact.text.splitlines()[-1][:300] for fact, _ in group if fact.text), "")
        is_one_role = len({fact.role for fact in facts}) == 1 and facts[0].index >= 0
        yield Reason(
            code=_GROUPS.get(facts[0].phase, Code.PODS_OTHER),
            count=len(facts),
            total=total,
            word=facts[0].phase,
            nodes=tuple(fact.index for fact in facts) if is_one_role else (),
            pods=tuple(fact.name for fact in facts),
            text=text,
            causes=(max((reason for _, reason in group), key=lambda reason: len(reason.text)),),  # some lack the cause
        )


def _repeats(fact: PodFact) -> bool:
    """Return whether a pod that has failed says no more than the job's report: its agent ended because of that."""
    is_told = fact.report is not None or fact.exit_code == ExitCode.WORKERS_FAILED
    return is_told and not fact.text and fact.reason is not None and fact.reason.code is Code.EXITED


def _count_nodes_of_jobs(observation: Observation) -> int:
    return sum((job.get("spec") or {}).get("completions") or 0 for job in _list_jobs(observation.parents))


# -- reports ----------------------------------------------------------------------------------------------------------


def find_report(pods: Sequence[PodFact]) -> Report | None:
    """Find the agents' report of the job, the same on all nodes. The latest counts: the job recovered from others."""
    reports = [(fact.finished, fact.report) for fact in pods if fact.report is not None and fact.phase == "Failed"]
    return max(reports, key=lambda item: item[0])[1] if reports else None


def _find_reports(app: Any, observation: Observation) -> dict[str, Report]:
    names = [role.name for role in app.roles]
    found = {
        name: find_report([fact for fact in observation.pods if fact.role == label])
        for name, label in zip(names, kube.label_roles(names), strict=True)
    }
    return {name: report for name, report in found.items() if report is not None}


def _build_torch_error(report: Report) -> str:
    """Return torch's error format as JSON, which TorchX prints."""
    root, line = find_root_cause(report), describe_report(report)
    text = "" if root is None else root.traceback or "\n".join(root.stderr_tail)
    code, time_s = (None, 0.0) if root is None else (root.exit_code, root.time_s)
    info = {"py_callstack": text or line, "timestamp": str(int(time_s))}
    return json.dumps({"message": {"message": line, "errorCode": code or 1, "extraInfo": info}})


# -- replicas ---------------------------------------------------------------------------------------------------------


def _build_replicas(app: Any, observation: Observation, state: AppState) -> list[ReplicaStatus]:
    current = _find_current(observation)
    labels = kube.label_roles([role.name for role in app.roles])
    ended = (AppState.FAILED, AppState.CANCELLED)
    unknown = [] if state in ended else list_unknown_roles(observation)
    ends = _list_all_ends(observation)
    extra = [kube.read_role(job) for job in _list_jobs(observation.parents) if is_extra(job) and read_job_end(job)]
    extra = [label for label in extra if label not in ends]
    replicas: list[ReplicaStatus] = []
    for role, label in zip(app.roles, labels, strict=True):
        shown = AppState.UNKNOWN if label in unknown else AppState.SUCCEEDED if ends.get(label) == "Complete" else state
        if label in extra:
            shown = AppState.CANCELLED
        nodes = count_nodes_now(observation.parents, label)
        replicas += [
            _build_replica(
                role.name,
                index,
                current.get((label, index)),
                shown,
                is_removed=nodes is not None and index >= nodes,
                restarts=observation.restarts.get((label, index), 0),
            )
            for index in range(role.num_replicas)
        ]
    return replicas


def _build_replica(
    role: str, index: int, fact: PodFact | None, app_state: AppState, *, is_removed: bool, restarts: int
) -> ReplicaStatus:
    if fact is None and is_removed:
        return _build_cancelled(role, index, Code.RESIZED_AWAY)
    without_pod = _STATES_WITHOUT_POD.get(app_state, AppState.PENDING)
    if without_pod is AppState.CANCELLED and (fact is None or (fact.terminating and fact.phase != "Failed")):
        # A failed app's controller deletes its other pods.
        return _build_cancelled(role, index, Code.POD_ENDS if fact else Code.HAS_NO_POD)
    if fact is None:
        return ReplicaStatus(id=index, state=without_pod, role=role, hostname="")
    state = _POD_STATES.get(fact.phase, AppState.UNKNOWN)
    known = ExplainedReplica(id=index, state=state, role=role, hostname=fact.name)
    if fact.phase == "Failed" and fact.report is None:
        text = fact.text.splitlines()[-1] if fact.text else ""
        known.reasons = (Reason(code=Code.POD_ENDED, text=text, causes=(fact.reason,) if fact.reason else ()),)
    elif restarts:
        known.reasons = (Reason(code=Code.RESTARTS, count=restarts),)
    return known


def _build_cancelled(role: str, index: int, code: Code) -> ReplicaStatus:
    return ExplainedReplica(id=index, state=AppState.CANCELLED, role=role, hostname="", reasons=(Reason(code=code),))
