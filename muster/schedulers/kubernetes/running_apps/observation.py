"""Reads what the status of an app needs, with as few requests as its state allows, and the states of all apps."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from torchx.schedulers.api import ListAppResponse
from torchx.specs.api import AppState

from muster.schedulers.adapter.scheduler import ListedApp
from muster.schedulers.kubernetes import kube
from muster.schedulers.kubernetes.api.connection import Access
from muster.schedulers.kubernetes.api.errors import ApiError, read_if_allowed
from muster.schedulers.kubernetes.api.objects import Objects
from muster.schedulers.kubernetes.running_apps import status
from muster.schedulers.kubernetes.running_apps.app import (
    App,
    AppRef,
    is_inner,
    is_suspended,
    list_conditions,
    read_job_end,
)
from muster.schedulers.kubernetes.running_apps.pod_status import explain_event
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

_WAITS: Final = frozenset({AppState.SUBMITTED, AppState.PENDING})
END_STATES: Final = (AppState.SUCCEEDED, AppState.FAILED, AppState.CANCELLED, AppState.UNKNOWN)
"""UNKNOWN: what is left has ended."""


class Observer:
    """Reads apps, and remembers what Kubernetes forgets of them. Safe to use from several threads."""

    def __init__(self) -> None:
        self._ends: dict[AppRef, dict[str, str]] = {}
        """See `Observation.ends`: what waits for an app knows them after `ttl_s`, too."""
        self._ran: set[AppRef] = set()
        """Apps that were seen to run."""

    def observe(self, app: App) -> tuple[status.Observation, AppState] | None:
        """Read an app. Return None if it does not exist."""
        observation = _observe(app)
        if observation is None:
            self.forget(app.ref)
            return None
        ends = self._note_ends(app.ref, observation.parents)
        observation = replace(observation, ends=ends, ran_before=app.ref in self._ran)
        if status.has_run(observation):
            self._ran.add(app.ref)
        return observation, status.decide_state(observation)

    def _note_ends(self, ref: AppRef, parents: Sequence[Mapping[str, Any]]) -> dict[str, str]:
        """Return how Jobs have ended that were seen to end, now or before."""
        ends = self._ends[ref] = {**self._ends.get(ref, {}), **status.list_ends(parents)}
        return ends

    def forget(self, ref: AppRef) -> None:
        """Forget an app that is deleted."""
        self._ends.pop(ref, None)
        self._ran.discard(ref)

    def decide_state(self, ref: AppRef, parents: Sequence[dict[str, Any]]) -> AppState:
        """Return the state without the pods. It does not distinguish an app that runs from one that waits."""
        ends = self._note_ends(ref, parents)
        return status.decide_state(status.Observation(parents=parents, pods=(), ends=ends, ran_before=ref in self._ran))

    def list_apps(self, resources: Objects, access: Access, namespace: str) -> list[ListAppResponse]:
        """Return the apps of a namespace."""
        apps: dict[AppRef, list[dict[str, Any]]] = {}
        for kind in (kube.JOBSET, kube.JOB):
            for item in _list_parents(resources, kind, namespace):
                if not is_inner(item):
                    name = item["metadata"]["labels"][kube.LABEL_INSTANCE]
                    apps.setdefault(AppRef(namespace=namespace, name=name, access=access), []).append(item)
        states = {ref: self.decide_state(ref, parents) for ref, parents in apps.items()}
        ran = _find_started(resources, namespace) if not _WAITS.isdisjoint(states.values()) else frozenset()
        ran -= {ref.name for ref, parents in apps.items() if any(map(is_suspended, parents))}
        return [
            ListedApp(
                app_id=str(ref),
                state=AppState.RUNNING if state in _WAITS and ref.name in ran else state,
                submitted_s=status.find_submitted_s(apps[ref]),
            )
            for ref, state in sorted(states.items(), key=lambda item: item[0].name)
        ]


def _list_parents(resources: Objects, kind: kube.Kind, namespace: str) -> list[dict[str, Any]]:
    try:
        return resources.list_all(kind, namespace, labels=f"{kube.LABEL_MANAGED_BY}={kube.MANAGED_BY}")
    except ApiError as error:
        if error.refusal.status == 404 or (error.refusal.status == 403 and kind != kube.JOB):
            return []
        raise


def _find_started(resources: Objects, namespace: str) -> frozenset[str]:
    """Return the names of the apps with a pod that runs or has ended.

    Parents do not distinguish such a pod from one that waits. One request for all apps, for the metadata alone: a
    list must not read every pod. An account that may not list pods sees PENDING.
    """
    labels, fields = f"{kube.LABEL_MANAGED_BY}={kube.MANAGED_BY}", "status.phase!=Pending"
    items = read_if_allowed(
        lambda: resources.list_all(kube.POD, namespace, labels=labels, fields=fields, metadata_only=True)
    )
    return frozenset(str((item["metadata"].get("labels") or {}).get(kube.LABEL_INSTANCE)) for item in items or ())


def _observe(app: App) -> status.Observation | None:
    """Read an app. Return None if it does not exist. A healthy app needs two requests.

    A state needs no right to events, Kueue's workloads or PodGroups.
    """
    parents = app.find_parents()
    if not parents:
        return None
    pods = app.list_pods()
    waiting = [fact for fact in pods if fact.phase == "Pending"]
    failed = [parent for parent in parents if kube.parse_kind(parent) == kube.JOB and read_job_end(parent) == "Failed"]
    needs_events = any(fact.needs_events for fact in waiting) or status.count_missing_pods(parents, pods) > 0
    warnings = read_if_allowed(lambda: _read_warnings(app)) if needs_events else {}
    has_ended = all(read_job_end(parent) is not None for parent in parents)
    runs = any(fact.phase == "Running" for fact in pods)
    asks_end = needs_events and warnings is not None and not (has_ended or runs)
    return status.Observation(
        parents=parents,
        pods=pods,
        lost_pod=_explain_lost_pod(app, failed[0])
        if failed and not any(fact.phase == "Failed" for fact in pods)
        else None,
        queue=read_if_allowed(lambda: _read_queue(app, parents[0])) if waiting or not pods else None,
        warnings=warnings or {},
        events_refused=warnings is None,
        last_end=_read_last_end(app) if asks_end else "",
    )


def _read_time(event: Mapping[str, Any]) -> str:
    return str(event.get("lastTimestamp") or event.get("eventTime") or "")


def _read_warnings(app: App) -> dict[str, Reason]:
    """Return the newest Warning about each object of the app."""
    warnings: dict[str, Reason] = {}
    for item in sorted(app.list_events("type=Warning"), key=_read_time):
        name = (item.get("involvedObject") or {}).get("name") or ""
        if name != app.ref.name and not name.startswith(f"{app.ref.name}-"):
            continue
        event = str(item.get("reason")), " ".join(str(item.get("message") or "").split())[:500]
        if event not in _REPEATING_EVENTS:
            warnings[name] = explain_event(*event)
    return warnings


def _explain_lost_pod(app: App, failed: Mapping[str, Any]) -> Reason:
    """Return which pod failed the app although it does not exist any more: it was deleted.

    Its events, kept for 1 h, say why.

    After a Job's failure its controller deletes the other pods. So the cause is the last pod that was ended before.
    """
    prefixes = _list_failed_prefixes(failed)
    ends = read_if_allowed(lambda: _read_pod_ends(app, prefixes))
    if ends:
        failed_at = _find_failure_time(failed)
        before = {name: end for name, end in ends.items() if not failed_at or end[0] <= failed_at}
        order = sorted(before or ends, key=lambda name: ends[name][0])
        name = order[-1 if before else 0]
        return Reason(code=Code.POD_LOST, pods=(name,), causes=(ends[name][1],))
    which = (f"{prefixes[0]}*",) if len(prefixes) == 1 else ()
    return Reason(code=Code.POD_LOST_UNKNOWN, pods=which)


def _read_last_end(app: App) -> str:
    """Return when the last pod was ended, by the pods' events. "": none says so."""
    ends = read_if_allowed(lambda: _read_pod_ends(app, [f"{app.ref.name}-"])) or {}
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


def _read_pod_ends(app: App, prefixes: Sequence[str]) -> dict[str, tuple[str, Reason]]:
    """Map each pod to (when it was ended, why), by the pods' events."""
    events = app.list_events("involvedObject.kind=Pod")
    ends: dict[str, tuple[str, Reason]] = {}
    # A Killing after an eviction lacks the reason.
    for item in sorted(events, key=lambda item: item.get("reason") != "Killing"):
        name = str((item.get("involvedObject") or {}).get("name") or "")
        code = _END_REASONS.get(item.get("reason") or "")
        if code is None or not any(name.startswith(prefix) for prefix in prefixes):
            continue
        time = str(item.get("firstTimestamp") or item.get("eventTime") or "")[:19]
        text = " ".join(str(item.get("message") or "").split())[:300]
        ends[name] = (min(time, ends[name][0]) if name in ends else time, Reason(code=code, text=text))
    return ends


def _read_queue(app: App, parent: Mapping[str, Any]) -> Reason | None:
    labels = parent["metadata"].get("labels") or {}
    if kube.KUEUE_QUEUE in labels:
        return _read_kueue(app, parent, labels[kube.KUEUE_QUEUE])
    template = ((parent.get("spec") or {}).get("template") or {}).get("spec") or {}
    if "schedulingGroup" in template or template.get("schedulerName") == "volcano":
        return _read_pod_group(app)
    return None


def _read_kueue(app: App, parent: Mapping[str, Any], queue: str) -> Reason | None:
    versions = app.resources.list_group_versions("kueue.x-k8s.io")
    if not versions:
        return None
    workloads = kube.Kind(api_version=versions[0], kind="Workload")
    items = read_if_allowed(lambda: app.resources.list_all(workloads, app.ref.namespace))
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


def _read_pod_group(app: App) -> Reason | None:
    for kind in kube.POD_GROUPS:
        group = app.resources.read(kind, app.ref.namespace, app.ref.name)
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
