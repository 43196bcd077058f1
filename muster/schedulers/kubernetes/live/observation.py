"""Reads what the status of an app needs, with as few requests as its state allows."""

import itertools
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from muster.schedulers.kubernetes.api.errors import read_if_allowed
from muster.schedulers.kubernetes.api.objects import Objects
from muster.schedulers.kubernetes.app_id import AppRef
from muster.schedulers.kubernetes.kinds import EVENT, JOB, POD, POD_GROUP_VERSIONS, Kind, parse_kind
from muster.schedulers.kubernetes.labels import KUEUE_QUEUE
from muster.schedulers.kubernetes.live.operations import find_parents, list_conditions, read_job_end
from muster.schedulers.kubernetes.live.pod_status import PodFact, explain_event, read_pod
from muster.schedulers.kubernetes.live.status import Observation, count_missing_pods, list_missing_prefixes
from muster.schedulers.timestamps import parse_timestamp
from muster.schedulers.wording.reasons import Code, Reason

_REPEATING_EVENTS: Final = (("Failed", "Error: ErrImagePull"), ("Failed", "Error: ImagePullBackOff"))
"""Events that only repeat the reason of the event before, which explains what is wrong with the image."""

_END_REASONS: Final = {
    "Evicted": Code.NODE_EVICTED,
    "Preempted": Code.PREEMPTED,
    "TaintManagerEviction": Code.NODE_TAINTED,
    "NodeShutdown": Code.NODE_SHUT_DOWN,
    "Killing": Code.POD_DELETED,
}
"""Reason of a pod's event -> why the pod was ended."""

_ENDS: Final = {
    **dict.fromkeys(("Completed", "AllJobsCompleted"), "Complete"),
    **dict.fromkeys(
        ("BackoffLimitExceeded", "PodFailurePolicy", "FailedIndexes", "MaxFailedIndexesExceeded"), "Failed"
    ),
    **dict.fromkeys(("FailedJobs", "ReachedMaxRestarts"), "Failed"),
}
"""Reason of the event by which the controller of a Job or a JobSet tells of its end -> how it ended."""
_DEADLINE: Final = "DeadlineExceeded"
"""As these, where the deadline is that of the submission: a cancel sets one, too."""


def observe(resources: Objects, ref: AppRef) -> Observation | None:
    """Read an app. Return None if it does not exist. A healthy app needs two requests.

    A state needs no right to events, Kueue's workloads or PodGroups.
    """
    parents = find_parents(resources, ref)
    if not parents:
        return None
    pods = list_pods(resources, ref)
    waiting = [fact for fact in pods if fact.phase == "Pending"]
    failed = [parent for parent in parents if parse_kind(parent) == JOB and read_job_end(parent) == "Failed"]
    needs_events = any(fact.needs_events for fact in waiting) or count_missing_pods(parents, pods) > 0
    no_warnings: dict[str, Reason] | None = None
    no_queue: Reason | None = None
    warnings = read_if_allowed(lambda: _read_warnings(resources, ref), no_warnings) if needs_events else {}
    has_ended = all(read_job_end(parent) is not None for parent in parents)
    asks_ends = needs_events and warnings is not None and not has_ended
    runs = any(fact.phase == "Running" for fact in pods)
    missing = list_missing_prefixes(parents, pods)
    return Observation(
        parents=parents,
        pods=pods,
        lost_pod=_explain_lost_pod(resources, ref, failed[0])
        if failed and not any(fact.phase == "Failed" for fact in pods)
        else None,
        queue=read_if_allowed(lambda: _read_queue(resources, ref, parents[0]), no_queue)
        if waiting or not pods
        else None,
        warnings=warnings or {},
        events_refused=warnings is None,
        last_end=_read_last_end(resources, ref, [f"{ref.name}-"]) if asks_ends and not runs else "",
        missing_end=_read_last_end(resources, ref, missing) if asks_ends and runs and missing else "",
        now_s=time.time(),
    )


def read_gone(resources: Objects, ref: AppRef, parents: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the parents of an app that has been deleted as they were at their end, by its events.

    `ttl_s` may delete them before anybody has seen how they ended. []: the events do not tell of all.

    Args:
        resources: of the cluster.
        ref: the app.
        parents: as they were seen last.
    """
    none: list[dict[str, Any]] = []
    fields = f"involvedObject.kind={parse_kind(parents[0]).kind}"
    events = read_if_allowed(lambda: resources.list_all(EVENT, ref.namespace, fields=fields)[0], none)
    ends = (*_ENDS, _DEADLINE)
    told = {(item.get("involvedObject") or {}).get("name"): item for item in events if item.get("reason") in ends}
    ended = [
        {**parent, "status": {**(parent.get("status") or {}), "conditions": [_build_condition(event)]}}
        for parent in parents
        if (event := told.get(parent["metadata"]["name"])) is not None and _tells_end(event, parent)
    ]
    return ended if len(ended) == len(parents) else []


def _tells_end(event: Mapping[str, Any], parent: Mapping[str, Any]) -> bool:
    """Return whether an event tells how a parent has ended, and not that a later cancel has given it a deadline."""
    if event["reason"] != _DEADLINE:
        return True
    limit_s, began = parent["spec"].get("activeDeadlineSeconds"), (parent.get("status") or {}).get("startTime")
    return bool(limit_s and began and parse_timestamp(_read_time(event))[0] >= parse_timestamp(began)[0] + limit_s)


def _build_condition(event: Mapping[str, Any]) -> dict[str, Any]:
    reason, message = str(event["reason"]), event.get("message")
    kind = _ENDS.get(reason, "Failed")
    when = _read_time(event)
    return {"type": kind, "status": "True", "reason": reason, "message": message, "lastTransitionTime": when}


def _read_time(event: Mapping[str, Any]) -> str:
    return str(event.get("lastTimestamp") or event.get("eventTime") or "")


def list_pods(resources: Objects, ref: AppRef) -> list[PodFact]:
    """Return all pods of an app, also those that have ended."""
    return [read_pod(item) for item in resources.list_app(POD, ref.namespace, ref.name)]


def _read_warnings(resources: Objects, ref: AppRef) -> dict[str, Reason]:
    """Return the newest Warning about each object of the app."""
    items, _ = resources.list_all(EVENT, ref.namespace, fields="type=Warning")
    warnings: dict[str, Reason] = {}
    for item in sorted(items, key=_read_time):
        name = (item.get("involvedObject") or {}).get("name") or ""
        if name != ref.name and not name.startswith(f"{ref.name}-"):
            continue
        event = str(item.get("reason")), " ".join(str(item.get("message") or "").split())[:500]
        if event not in _REPEATING_EVENTS:
            warnings[name] = explain_event(*event)
    return warnings


def _explain_lost_pod(resources: Objects, ref: AppRef, failed: Mapping[str, Any]) -> Reason:
    """Return which pod failed the app although it does not exist any more: it was deleted.

    Its events, kept for 1 h, say why.

    After a Job's failure its controller deletes the other pods. So the cause is the last pod that was ended before.
    """
    prefixes = _list_failed_prefixes(failed)
    no_ends: dict[str, tuple[str, Reason]] | None = None
    ends = read_if_allowed(lambda: _read_pod_ends(resources, ref, prefixes), no_ends)
    if ends:
        failed_at = _find_failure_time(failed)
        before = {name: end for name, end in ends.items() if not failed_at or end[0] <= failed_at}
        order = sorted(before or ends, key=lambda name: ends[name][0])
        name = order[-1 if before else 0]
        return Reason(code=Code.POD_LOST, pods=(name,), causes=(ends[name][1],))
    which = (f"{prefixes[0]}*",) if len(prefixes) == 1 else ()
    return Reason(code=Code.POD_LOST_HIDDEN if ends is None else Code.POD_LOST_UNKNOWN, pods=which)


def _read_last_end(resources: Objects, ref: AppRef, prefixes: Sequence[str]) -> str:
    """Return when the last pod with such a name was ended, by the pods' events, which are kept for 1 h.

    "": none says so.
    """
    no_ends: dict[str, tuple[str, Reason]] = {}
    ends = read_if_allowed(lambda: _read_pod_ends(resources, ref, prefixes), no_ends)
    time = max((time for time, _ in ends.values()), default="")
    return f"{time}Z" if time else ""


def _list_failed_prefixes(job: Mapping[str, Any]) -> list[str]:
    """Return how the names of the pods begin that failed a Job: those of its failed indexes, or of all."""
    name = job["metadata"]["name"]
    indexes = re.findall(r"\d+", str((job.get("status") or {}).get("failedIndexes") or ""))
    return [f"{name}-{index}-" for index in indexes] or [f"{name}-"]


def _find_failure_time(job: Mapping[str, Any]) -> str:
    """Return when the Job began to fail, as RFC 3339. Return "" if it does not say."""
    ends = [item for item in list_conditions(job) if item["type"] in ("FailureTarget", "Failed")]
    times = [item.get("lastTransitionTime") for item in ends]
    return str(min((time for time in times if time), default=""))


def _read_pod_ends(resources: Objects, ref: AppRef, prefixes: Sequence[str]) -> dict[str, tuple[str, Reason]]:
    """Map each pod to (when it was ended, why), by the pods' events."""
    items, _ = resources.list_all(EVENT, ref.namespace, fields="involvedObject.kind=Pod")
    ends: dict[str, tuple[str, Reason]] = {}
    # A Killing after an eviction lacks the reason.
    for item in sorted(items, key=lambda item: item.get("reason") != "Killing"):
        name = str((item.get("involvedObject") or {}).get("name") or "")
        code = _END_REASONS.get(item.get("reason") or "")
        if code is None or not any(name.startswith(prefix) for prefix in prefixes):
            continue
        time = str(item.get("firstTimestamp") or item.get("eventTime") or "")[:19]
        text = " ".join(str(item.get("message") or "").split())[:300]
        ends[name] = (min(time, ends[name][0]) if name in ends else time, Reason(code=code, text=text))
    return ends


def _read_queue(resources: Objects, ref: AppRef, parent: Mapping[str, Any]) -> Reason | None:
    labels = parent["metadata"].get("labels") or {}
    if KUEUE_QUEUE in labels:
        return _read_kueue(resources, ref, parent, labels[KUEUE_QUEUE])
    template = ((parent.get("spec") or {}).get("template") or {}).get("spec") or {}
    if "schedulingGroup" in template or template.get("schedulerName") == "volcano":
        return _read_pod_group(resources, ref)
    return None


def _read_kueue(resources: Objects, ref: AppRef, parent: Mapping[str, Any], queue: str) -> Reason | None:
    versions = resources.list_group_versions("kueue.x-k8s.io")
    if not versions:
        return None
    workloads = Kind(api_version=versions[0], kind="Workload")
    none: list[dict[str, Any]] | None = None
    items = read_if_allowed(lambda: resources.list_all(workloads, ref.namespace)[0], none)
    if items is None:
        return Reason(code=Code.QUEUE_HIDDEN, queue=queue, what=workloads.resource)
    uid = parent["metadata"].get("uid")
    for item in items:
        if any(owner.get("uid") == uid for owner in item["metadata"].get("ownerReferences") or []):
            text = _read_condition(item, ("QuotaReserved", "Admitted"), "False")
            return Reason(code=Code.QUEUE, queue=queue, text=text, what=_forget_numbers(text)) if text else None
    return Reason(code=Code.QUEUE, queue=queue)


def _forget_numbers(text: str) -> str:
    """Return a text without numbers: how much is missing changes with other jobs."""
    return re.sub(r"\d+", "", text)


def _read_pod_group(resources: Objects, ref: AppRef) -> Reason | None:
    for version in itertools.chain.from_iterable(POD_GROUP_VERSIONS.values()):
        group = resources.read(Kind(api_version=version, kind="PodGroup"), ref.namespace, ref.name)
        if group is not None:
            text = _read_condition(group, ("PodGroupScheduled", "Scheduled"), "False")
            text = text or _read_condition(group, ("Unschedulable",), "True")
            return Reason(code=Code.GANG, text=text, what=_forget_numbers(text)) if text else None
    return None


def _read_condition(item: Mapping[str, Any], types: Sequence[str], status: str) -> str:
    """Return the message of the first condition of one of these types that has this status. Return "" without one."""
    for condition in list_conditions(item):
        if condition["type"] in types and condition["status"] == status:
            return str(condition.get("message") or condition.get("reason") or "")
    return ""
