"""Builds what `torchx status` shows from what was read of an app. Pure."""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from torchx.specs.api import NONE, AppDef, AppState, ReplicaStatus

from muster._shared.codec import to_data
from muster._shared.contract import ExitCode, describe_exit_code, show_controls
from muster._shared.reports import Report
from muster.schedulers.adapter.facts import AppFacts
from muster.schedulers.adapter.job_line import format_duration
from muster.schedulers.adapter.records import JobFacts
from muster.schedulers.adapter.replica_errors import replace_line
from muster.schedulers.errors import EngineError
from muster.schedulers.failure_report import describe_report, find_root_cause
from muster.schedulers.kubernetes.kinds import JOB, parse_kind
from muster.schedulers.kubernetes.labels import (
    BY_STOP,
    FAILED_ANNOTATION,
    KUEUE_QUEUE,
    LABEL_COMPONENT,
    SUBMITTED_ANNOTATION,
    read_role,
)
from muster.schedulers.kubernetes.live.operations import (
    find_canceller,
    is_cancelled,
    is_suspended,
    list_conditions,
    read_job_end,
)
from muster.schedulers.kubernetes.live.pod_status import PodFact, find_latest_pods
from muster.schedulers.kubernetes.manifests.app_annotation import decode_app, decode_roles
from muster.schedulers.kubernetes.names import label_roles
from muster.schedulers.timestamps import parse_timestamp

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

_REASONS: Final = {
    "PodFailurePolicy": "",  # the pods' report explains it
    "BackoffLimitExceeded": "more replicas failed than max_retries allows",
    "FailedIndexes": "a replica failed, and no retry of it was left (--max_retries)",
    "MaxFailedIndexesExceeded": "a replica failed, and no retry of it was left (--max_retries)",
}
_DEADLINE: Final = "DeadlineExceeded"
_RAN_BEFORE: Final = (
    "no pod of the job runs now, but it ran before: its pods ended or were deleted, and the cluster creates new ones"
)
_VERBS: Final = {"Pending": ("waits", "wait"), "Running": ("runs", "run"), "Failed": ("failed", "failed")}
_NO_POD: Final = "it has no pod, because the job has ended"
_SAME_REASONS: Final = {
    **dict.fromkeys(("FailedAttachVolume", "FailedMapVolume"), "FailedMount"),
    "BackOff": "CrashLoopBackOff",  # the event, between two attempts
}
"""Reasons that follow each other as long as a pod waits for the same thing -> the one that stands for them."""
_EVENTS_REFUSED: Final = "this account may not list events, which say why pods wait"


@dataclass(frozen=True, kw_only=True)
class Observation:
    """All that was read of an app, at about the same time."""

    parents: Sequence[Mapping[str, Any]]
    """Jobs (the first has the AppDef), or one JobSet. It is never empty."""
    pods: Sequence[PodFact]
    queue_reason: str = ""
    """Why Kueue or a PodGroup makes the app wait."""
    warnings: Mapping[str, str] = field(default_factory=dict)
    """Newest Warning event, by the name of the object it is about."""
    events_refused: bool = False
    """Only events can say why pods wait or do not exist, and the account may not list them."""
    jobs: Mapping[str, JobFacts] = field(default_factory=dict)
    """What the agents of an app that runs have reported, by role."""
    lost_pod: str = ""
    """The app has failed, and no pod that exists shows why: the one that is gone, and what is known of its end."""
    last_end: str = ""
    """No pod runs: when the last one that did was deleted or evicted, as RFC 3339. It is "" if no event says it."""
    missing_end: str = ""
    """Some pods run, and others do not exist: when the last of those was deleted or evicted. As `last_end`."""
    now_s: float | None = None
    """When this was read, by this machine's clock. None: the status does not say how long pods have been missing."""
    ends: Mapping[str, str] = field(default_factory=dict)
    """Flavour `job`: how Jobs were seen to end before, see `list_ends`. They may have been deleted since."""
    ran_before: bool = False
    """The app was seen to run before."""


def build_facts(app_id: str, observation: Observation) -> AppFacts:
    """Return what is known of an app. One with a damaged annotation is included, to cancel and delete it."""
    damage = ""
    try:
        app = decode_app(observation.parents[0])
    except EngineError as error:
        app, damage = AppDef(name=""), str(error)
    state = decide_state(observation)
    report = find_report(observation.pods) if state is not AppState.SUCCEEDED else None
    submitted_s, since_s = _find_times(observation, state)
    return AppFacts(
        app_id=app_id,
        app=app,
        state=state,
        replicas=_build_replicas(app, observation, state),
        # of pods, and of workers in place
        restarts=count_replaced_pods(observation) + (0 if report is None else report.attempt),
        messages=(damage, build_message(observation, state, report)),
        waits=_list_waits(observation),
        jobs=observation.jobs,
        error=None if report is None else json.dumps(_build_torch_error(report)),
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
    status = [parent.get("status") or {} for parent in observation.parents]
    if state is AppState.RUNNING:
        started = [str(each.get("startTime") or "") for each in status]
        return submitted_s, min(filter(None, map(_parse_time, started)), default=None)
    ended = [str(each.get("completionTime") or "") for each in status]
    ended += [
        str(condition.get("lastTransitionTime") or "")
        for parent in observation.parents
        for condition in list_conditions(parent)
        if condition["type"] in ("Failed", "Complete") and condition["status"] == "True"
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
        str((metadata.get("annotations") or {}).get(SUBMITTED_ANNOTATION) or metadata.get("creationTimestamp") or "")
        for metadata in (parent["metadata"] for parent in parents)
    ]
    return min(filter(None, map(_parse_time, created)), default=None)


def _parse_time(text: str) -> float | None:
    seconds = _read_seconds(text)
    return float(seconds) if seconds else None


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
    jobs = [parent for parent in parents if parse_kind(parent) == JOB]
    return [job for job in jobs if read_job_end(job) is None] if running else jobs


# -- the state --------------------------------------------------------------------------------------------------------


def decide_state(observation: Observation) -> AppState:
    """Return the app's state: its end if its parents have ended, else whether a pod of it runs or has run.

    So no state is followed by an earlier one. The exception: what is suspended waits again, as its queue says.

    UNKNOWN: what is left has succeeded, and how a role has ended is not known, since its Job is deleted (`ttl_s`).
    """
    cancelled = any(map(is_cancelled, observation.parents))
    suspended = any(map(is_suspended, observation.parents))
    end = _decide_end(observation.parents)
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


def _decide_end(parents: Sequence[Mapping[str, Any]]) -> AppState | None:
    if parse_kind(parents[0]) != JOB:
        parents = parents[:1]  # an interrupted cancel's record may follow
    ends = [read_job_end(parent) for parent in parents]
    if "Failed" in ends:
        return AppState.FAILED
    return AppState.SUCCEEDED if all(end == "Complete" for end in ends) else None


# -- the message --------------------------------------------------------------------------------------------------


def build_message(observation: Observation, state: AppState, report: Report | None) -> str:
    """Return why the app is in this state: one clause per group of pods, the most important first."""
    if state is AppState.SUCCEEDED:
        return ""
    if state is AppState.CANCELLED:
        by = find_canceller(observation.parents)
        return f"{'stopped' if by == BY_STOP else 'cancelled'} ({by})" if by else ""
    clauses: list[str] = []
    if state is AppState.FAILED:
        clauses += [describe_report(report)] if report else _list_told(observation.parents)
        clauses.append(observation.lost_pod)
        clauses += _describe_conditions(observation)
        gone = [label for label in _list_gone_roles(observation) if observation.ends.get(label) == "Failed"]
        clauses += [f"role {label} has failed, and its Job is deleted" for label in gone]
        clauses += _describe_running_roles(observation.parents)
    else:
        clauses.append(observation.queue_reason)
    if state in (AppState.PENDING, AppState.RUNNING) and _waits_again(observation):
        clauses.append(_RAN_BEFORE)
    clauses += _group_pods(observation, state, report)
    if state is AppState.FAILED and report is None and any(map(_lacks_report, observation.pods)):
        clauses.append("Kubernetes has not kept its report: `muster log --failed` finds it in the pods' logs")
    lost = ", and how it ended is not known" if state is AppState.UNKNOWN else ""
    clauses += [f"the Job of role {name} is deleted{lost}" for name in list_unknown_roles(observation)]
    if state is AppState.RUNNING:
        clauses.append(_describe_starting(observation))
        clauses.append(_describe_replaced(observation))
    missing = count_missing_pods(observation.parents, observation.pods)
    if missing and observation.pods and state is not AppState.FAILED:
        reasons = dict.fromkeys(_list_creation_warnings(observation))
        since = _describe_missing_time(observation) if state is AppState.RUNNING else ""
        clauses += [f"{_name_missing(missing)}{since}: {text}{_advise(text)}" for text in reasons]
    if not observation.pods and state is not AppState.FAILED:
        clauses += [f"no pods: {text}{_advise(text)}" for text in dict.fromkeys(observation.warnings.values())]
        if is_suspended(observation.parents[0]) and not observation.queue_reason:
            clauses.append(_describe_suspended(observation.parents[0]))
    if state is AppState.PENDING and not (observation.queue_reason or observation.events_refused):
        clauses += _describe_unexplained(observation)
    if observation.events_refused and state is not AppState.FAILED:
        clauses.append(_EVENTS_REFUSED)
    return "; ".join(clause for clause in clauses if clause)


def _lacks_report(fact: PodFact) -> bool:
    """Return whether an agent has ended because its job has failed, and the pod has not kept what it said last."""
    return (
        fact.phase == "Failed" and fact.exit_code == 1 and not fact.text and bool(fact.log_dir) and not fact.is_drained
    )


def _list_told(parents: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what the agents of an app have left of its failure in the annotations of its Jobs, without the time."""
    annotations = (parent["metadata"].get("annotations") or {} for parent in parents)
    told = [text for each in annotations for name, text in each.items() if FAILED_ANNOTATION.fullmatch(name)]
    return [show_controls(text.partition(" ")[2]) for text in told]


def _describe_unexplained(observation: Observation) -> list[str]:
    """Say how many pods of a pending app wait without a reason, and which command shows more."""
    parent = observation.parents[0]
    kubectl = f"kubectl -n {parent['metadata'].get('namespace') or 'default'} describe"
    if not observation.pods:
        if observation.warnings or is_suspended(parent):
            return []
        name = f"{parse_kind(parent).kind.lower()} {parent['metadata']['name']}"
        return [f"it has no pods yet, and Kubernetes gives no reason: {kubectl} {name}"]
    current = _find_current(observation)
    total = max(_count_nodes_of_jobs(observation), len(current))
    waits = [
        fact
        for fact in sorted(current.values(), key=lambda fact: (fact.role, fact.index))
        if fact.phase == "Pending" and not fact.reason and fact.name not in observation.warnings
    ]
    clauses = []
    for is_placed, one, several in (
        (False, "waits, and Kubernetes gives no reason", "wait, and Kubernetes gives no reason"),
        (
            True,
            "has a node, and its container has not started yet",
            "have a node, and their containers have not started yet",
        ),
    ):
        found = [fact for fact in waits if bool(fact.node) is is_placed]
        if found:
            what = one if len(found) == 1 else several
            clauses.append(f"{_count_pods(len(found), total)} {what}: {kubectl} pod {found[0].name}")
    return clauses


def _count_pods(count: int, total: int) -> str:
    return f"{count} of {total} pod{'s'[: total != 1]}"


def _name_missing(count: int) -> str:
    return f"{count} pod{'s'[: count != 1]} not created"


def _describe_missing_time(observation: Observation) -> str:
    """Say how long pods of an app that runs have been missing: " for 40 s". "": this is not known.

    They have been missing since the pods before them ended. If Kubernetes knows of none, say when their Job began: they
    may never have been created, or Kubernetes may have forgotten how they ended.
    """
    if observation.now_s is None:
        return ""
    drained = [fact.finished for fact in find_latest_pods(observation.pods).values() if fact.is_drained]
    since = list(filter(None, map(_parse_time, (*drained, observation.missing_end))))
    if since:
        return f" for {format_duration(observation.now_s - max(since))}"
    jobs = _list_jobs(observation.parents, running=True)
    began = map(_parse_time, (str((job.get("status") or {}).get("startTime") or "") for job in jobs))
    since = list(filter(None, (*began, find_submitted_s(jobs))))
    if not since or count_replaced_pods(observation):
        return ""
    return f" (its Job began {format_duration(observation.now_s - max(since))} ago)"


def _describe_starting(observation: Observation) -> str:
    """Say which nodes of a running app have no pod that runs, if nothing else says why."""
    current = _find_current(observation)
    starts = sorted(fact.index for fact in current.values() if fact.phase == "Pending" and not fact.reason)
    starts = [] if observation.warnings else starts
    clauses = [f"{_name_nodes(starts)} of {len(current)} in a pod that starts"] if starts else []
    missing = count_missing_pods(observation.parents, observation.pods)
    if missing and not observation.warnings:
        job = next(iter(_list_jobs(observation.parents, running=True)), observation.parents[0])["metadata"]
        more = f"if it takes longer, run: kubectl -n {job.get('namespace') or 'default'} describe job {job['name']}"
        since = _describe_missing_time(observation) or " yet"
        clauses.append(f"{_name_missing(missing)}{since}: the Job controller replaces a pod after 10 s; {more}")
    return "; ".join(clauses)


def _describe_replaced(observation: Observation) -> str:
    """Say of the last pod that has failed, and was replaced by one that runs, how it ended. "": none that exists."""
    current = _find_current(observation)
    ended = [
        fact
        for fact in observation.pods
        if fact.phase == "Failed"
        and fact.reason
        and not fact.is_drained
        and (newest := current.get((fact.role, fact.index))) is not None
        and newest is not fact
        and newest.phase == "Running"
    ]
    last = max(ended, key=lambda fact: fact.finished, default=None)
    return "" if last is None else f"the pod of node {last.index} was replaced: {last.reason}"


def _name_nodes(indexes: Sequence[int]) -> str:
    return _name_some("node", list(map(str, indexes)))


def _name_some(what: str, names: Sequence[str]) -> str:
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return f"{what}{'s' if len(names) > 1 else ''} {shown}"


def count_nodes_now(parents: Sequence[Mapping[str, Any]], label: str) -> int | None:
    """Return how many nodes a role has after any resize. None: not known, or its kind cannot be resized."""
    for job in _list_jobs(parents):
        if (job["metadata"].get("labels") or {}).get(LABEL_COMPONENT) == label:
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


def list_missing_prefixes(parents: Sequence[Mapping[str, Any]], pods: Sequence[PodFact]) -> list[str]:
    """Return the beginnings of the names of pods that do not exist yet, though their Jobs run."""
    latest = find_latest_pods(pods)
    return [
        f"{job['metadata']['name']}-{index}-"
        for job in _list_jobs(parents, running=True)
        for index in range((job.get("spec") or {}).get("parallelism") or 0)
        if (fact := latest.get((read_role(job), index))) is None or fact.is_drained
    ]


def _advise(event: str) -> str:
    """Return the advice on an event that prevents the creation of pods."""
    if "PodSecurity" in event and "restricted" in event:
        return "; try -cfg security=restricted"
    return "; request less, or delete unused objects" if "exceeded quota" in event else ""


def _describe_suspended(parent: Mapping[str, Any]) -> str:
    metadata = parent["metadata"]
    if KUEUE_QUEUE in (metadata.get("labels") or {}):
        return f"suspended: waiting for its queue {metadata['labels'][KUEUE_QUEUE]}"
    name = f"{parse_kind(parent).kind.lower()} {metadata['name']}"
    patch = """--type=merge -p '{"spec":{"suspend":false}}'"""
    return f"suspended: to resume it, run: kubectl -n {metadata.get('namespace') or 'default'} patch {name} {patch}"


def _describe_conditions(observation: Observation) -> list[str]:
    has_pod = any(fact.phase == "Failed" for fact in observation.pods)
    clauses = []
    for parent in observation.parents:
        for condition in list_conditions(parent):
            # FailureTarget becomes Failed.
            if condition["type"] in ("Failed", "FailureTarget") and condition["status"] == "True":
                reason = condition.get("reason") or ""
                detail = f"{reason}: {condition.get('message', '')}"
                # The failed pod explains more.
                known = _REASONS.get(reason, detail)
                if reason == _DEADLINE and _has_failed_before(observation, parent):
                    known = "stopped because another role failed"
                clauses.append(detail if reason == "PodFailurePolicy" and not has_pod else known)
    return list(dict.fromkeys(clauses))


def _has_failed_before(observation: Observation, parent: Mapping[str, Any]) -> bool:
    """Return whether another role has failed by itself: its end gives the others a deadline, see `role_stop`."""
    return any(
        condition["type"] == "Failed" and condition.get("reason") != _DEADLINE
        for other in observation.parents
        if other is not parent
        for condition in list_conditions(other)
    )


def _list_gone_roles(observation: Observation) -> list[str]:
    """List labels of roles whose Job was deleted after its own end, while others remain (flavour `job`)."""
    present = {role for role in map(read_role, _list_jobs(observation.parents)) if role}
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
    ends = [(read_role(job), read_job_end(job), is_cancelled(job)) for job in _list_jobs(parents)]
    return {role: end for role, end, cancelled in ends if end == "Complete" or (end and not cancelled)}


def _list_all_ends(observation: Observation) -> dict[str, str]:
    return {**observation.ends, **list_ends(observation.parents)}


def _describe_running_roles(parents: Sequence[Mapping[str, Any]]) -> list[str]:
    """Describe roles of a failed app that run on because its submitter is gone (flavour `job`, see `role_stop`)."""
    names = sorted(map(read_role, _list_jobs(parents, running=True)))
    return [f"still running: role {', '.join(names)}; `torchx cancel` stops it"] if names else []


def _group_pods(observation: Observation, state: AppState, report: Report | None) -> list[str]:
    """Group pods, the largest group first: `3 of 4 pods wait: Insufficient nvidia.com/gpu (3 of 3 nodes)`.

    The second number is that of the nodes: pods that were deleted count, too. Pods that failed are named, unless they
    only repeat the report.
    """
    current = _find_current(observation)
    groups: dict[tuple[str, str], list[PodFact]] = {}
    reasons: dict[tuple[str, str], str] = {}
    for fact in current.values():
        reason, code = _find_reason(observation, fact)
        healthy = not reason and fact.phase != "Failed"
        repeats = state is AppState.FAILED and (fact.phase == "Pending" or (report is not None and _repeats(fact)))
        if not healthy and not repeats:
            group = fact.phase, code
            groups.setdefault(group, []).append(fact)
            reasons[group] = max(reasons.get(group, ""), reason, key=len)  # some lack the cause
    count = max(_count_nodes_of_jobs(observation), len(current))
    clauses = []
    for group, facts in sorted(groups.items(), key=lambda item: -len(item[1])):
        phase, reason = group[0], reasons[group]
        detail = next((f" ({fact.text.splitlines()[-1][:300]})" for fact in facts if fact.text), "")
        what = _describe_failed(facts, reason) if phase == "Failed" else reason
        one, several = _VERBS.get(phase, (f"is {phase}", f"are {phase}"))
        clauses.append(f"{_count_pods(len(facts), count)} {one if len(facts) == 1 else several}: {what}{detail}")
    return clauses


def _find_reason(observation: Observation, fact: PodFact) -> tuple[str, str]:
    """Return why a pod waits or ended, and the code of that: see `PodFact`."""
    event = "" if fact.reason or fact.phase != "Pending" else observation.warnings.get(fact.name, "")
    code = fact.code or event.partition(":")[0]
    return fact.reason or event, _SAME_REASONS.get(code, code)


def _list_waits(observation: Observation) -> tuple[str, ...]:
    """Return why nodes wait: what stays the same as long as they do, see `AppFacts`."""
    waiting = [fact for fact in _find_current(observation).values() if fact.phase == "Pending"]
    missing = count_missing_pods(observation.parents, observation.pods)
    events = [text.partition(":")[0] for text in _list_creation_warnings(observation)] if missing else []
    queue = re.sub(r"\d+", "", observation.queue_reason)  # how much is missing changes with other jobs
    codes = [queue, *(_find_reason(observation, fact)[1] for fact in waiting), *events]
    return tuple(sorted(set(filter(None, codes))))


def _list_creation_warnings(observation: Observation) -> list[str]:
    """Return the warnings that are not about a pod that exists."""
    existing = {fact.name for fact in observation.pods}
    return [text for name, text in observation.warnings.items() if name not in existing]


def _repeats(fact: PodFact) -> bool:
    """Return whether a pod that has failed says no more than the job's report: its agent ended because of that."""
    is_told = fact.report is not None or fact.exit_code == ExitCode.WORKERS_FAILED
    return (
        is_told and not fact.text and fact.exit_code is not None and fact.reason == describe_exit_code(fact.exit_code)
    )


def _describe_failed(facts: Sequence[PodFact], reason: str) -> str:
    """Name the pods of a group, and say how they ended: "node 1 (pod NAME) was ended by SIGKILL"."""
    facts = sorted(facts, key=lambda fact: (fact.role, fact.index))
    if len(facts) == 1:
        pod = f"pod {facts[0].name}"
        who = pod if facts[0].index < 0 else f"node {facts[0].index} ({pod})"
    elif len({fact.role for fact in facts}) == 1 and facts[0].index >= 0:
        who = _name_nodes([fact.index for fact in facts])
    else:
        who = _name_some("pod", [fact.name for fact in facts])
    if not reason.startswith(("was ", "exited ")):
        return f"{who}: {reason}"
    return f"{who} {reason.replace('was ', 'were ', 1) if len(facts) > 1 else reason}"


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
        for name, label in zip(names, label_roles(names), strict=True)
    }
    return {name: report for name, report in found.items() if report is not None}


def _build_torch_error(report: Report, exit_code: int | None = None) -> dict[str, Any]:
    """Return torch's error format, which TorchX prints, with the whole report."""
    root, line = find_root_cause(report), describe_report(report)
    text = "" if root is None else root.traceback or "\n".join(root.stderr_tail)
    code, time_s = (None, 0.0) if root is None else (root.exit_code, root.time_s)
    message = {
        "message": line,
        "errorCode": code or exit_code or 1,
        "extraInfo": {"py_callstack": text or line, "timestamp": str(int(time_s))},
    }
    return {"message": message, "report": to_data(report)}


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


def _build_replicas(app: Any, observation: Observation, state: AppState) -> list[ReplicaStatus]:
    current = _find_current(observation)
    labels = label_roles([role.name for role in app.roles])
    ended = (AppState.FAILED, AppState.CANCELLED)
    unknown = [] if state in ended else list_unknown_roles(observation)
    ends = _list_all_ends(observation)
    replicas: list[ReplicaStatus] = []
    for role, label in zip(app.roles, labels, strict=True):
        shown = AppState.UNKNOWN if label in unknown else AppState.SUCCEEDED if ends.get(label) == "Complete" else state
        nodes = count_nodes_now(observation.parents, label)
        replicas += [
            _build_replica(
                role.name,
                index,
                current.get((label, index)),
                shown,
                is_removed=nodes is not None and index >= nodes,
            )
            for index in range(role.num_replicas)
        ]
    return replicas


def _build_replica(
    role: str, index: int, fact: PodFact | None, app_state: AppState, *, is_removed: bool
) -> ReplicaStatus:
    if fact is None and is_removed:
        return _build_cancelled(role, index, "ended by a resize")
    without_pod = _STATES_WITHOUT_POD.get(app_state, AppState.PENDING)
    if without_pod is AppState.CANCELLED and (fact is None or (fact.terminating and fact.phase != "Failed")):
        # A failed app's controller deletes its other pods.
        why = "its pod is being deleted, because the job has ended" if fact else _NO_POD
        return _build_cancelled(role, index, why)
    if fact is None:
        return ReplicaStatus(id=index, state=without_pod, role=role, hostname="")
    error = NONE
    if fact.phase == "Failed":
        error = json.dumps(_build_torch_error(fact.report, fact.exit_code) if fact.report else _build_plain_error(fact))
    state = _POD_STATES.get(fact.phase, AppState.UNKNOWN)
    return ReplicaStatus(id=index, state=state, role=role, hostname=fact.name, structured_error_msg=error)


def _build_cancelled(role: str, index: int, why: str) -> ReplicaStatus:
    return replace_line(ReplicaStatus(id=index, state=AppState.CANCELLED, role=role, hostname=""), why)
