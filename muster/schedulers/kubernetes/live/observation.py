"""Reads everything about an app that its status needs, with as few requests as its state allows."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

from muster.schedulers.kubernetes.api.errors import ApiError
from muster.schedulers.kubernetes.api.objects import EVENT, POD, Kind, Objects
from muster.schedulers.kubernetes.app_id import AppRef
from muster.schedulers.kubernetes.labels import KUEUE_QUEUE, LABEL_COMPONENT, LABEL_INSTANCE
from muster.schedulers.kubernetes.live.operations import find_parents
from muster.schedulers.kubernetes.live.pod_status import PodFact, read_pod
from muster.schedulers.kubernetes.live.status import Observation, count_lacking
from muster.schedulers.kubernetes.manifests.pod_group import NATIVE_VERSIONS, VOLCANO_VERSION
from muster.schedulers.kubernetes.names import LEAD

_Seen = TypeVar("_Seen")

_POD_GROUPS: Final = (*NATIVE_VERSIONS, VOLCANO_VERSION)

_BARE: Final = ("Failed: Error: ErrImagePull", "Failed: Error: ImagePullBackOff")
"""Events that only repeat the reason of the one before, which says what was wrong with the image."""


def observe(resources: Objects, ref: AppRef) -> Observation | None:
    """Reads an app; None when it does not exist. Two requests for an app that runs well."""
    parents = find_parents(resources, ref)
    if not parents:
        return None
    pods = list_pods(resources, ref, lead=find_lead(parents[0]))
    waiting = [fact for fact in pods if fact.phase == "Pending"]
    return Observation(
        parents=parents,
        pods=pods,
        queue_words=_if_allowed(lambda: _read_queue(resources, ref, parents[0]), "") if waiting or not pods else "",
        warnings=_if_allowed(lambda: _read_warnings(resources, ref), {})
        if any(fact.needs_events for fact in waiting) or count_lacking(parents, pods)
        else {},
    )


def _if_allowed(look: Callable[[], _Seen], otherwise: _Seen) -> _Seen:
    """What only explains must not be needed: many roles may not read events, Kueue's workloads or PodGroups."""
    try:
        return look()
    except ApiError as fault:
        if fault.refusal.status == 403:
            return otherwise
        raise


def list_pods(resources: Objects, ref: AppRef, *, lead: str) -> list[PodFact]:
    """All pods of an app, also those that ended."""
    items, _ = resources.list_all(POD, ref.namespace, labels=f"{LABEL_INSTANCE}={ref.name}")
    return [read_pod(item, lead=lead) for item in items]


def find_lead(parent: Mapping[str, Any]) -> str:
    """Volcano: label of the elastic role, whose node 0 is a task of its own; "" without one."""
    for task in (parent.get("spec") or {}).get("tasks") or ():
        if task.get("name") == LEAD:
            return str(task["template"]["metadata"]["labels"].get(LABEL_COMPONENT, ""))
    return ""


def _read_warnings(resources: Objects, ref: AppRef) -> dict[str, str]:
    """The newest Warning about each object of the app."""
    items, _ = resources.list_all(EVENT, ref.namespace, fields="type=Warning")
    warnings: dict[str, str] = {}
    for item in sorted(items, key=lambda item: str(item.get("lastTimestamp") or item.get("eventTime") or "")):
        name = (item.get("involvedObject") or {}).get("name") or ""
        if name != ref.name and not name.startswith(f"{ref.name}-"):
            continue
        text = f"{item.get('reason')}: {' '.join(str(item.get('message') or '').split())[:500]}"
        if text not in _BARE:
            warnings[name] = text
    return warnings


def _read_queue(resources: Objects, ref: AppRef, parent: Mapping[str, Any]) -> str:
    labels = parent["metadata"].get("labels") or {}
    if KUEUE_QUEUE in labels:
        return _read_kueue(resources, ref, parent, labels[KUEUE_QUEUE])
    template = ((parent.get("spec") or {}).get("template") or {}).get("spec") or {}
    if "schedulingGroup" in template or template.get("schedulerName") == "volcano":
        return _read_pod_group(resources, ref)
    return ""


def _read_kueue(resources: Objects, ref: AppRef, parent: Mapping[str, Any], queue: str) -> str:
    versions = resources.find_group("kueue.x-k8s.io")
    if not versions:
        return ""
    items, _ = resources.list_all(Kind(api_version=versions[0], kind="Workload"), ref.namespace)
    uid = parent["metadata"].get("uid")
    for item in items:
        if any(owner.get("uid") == uid for owner in item["metadata"].get("ownerReferences") or []):
            words = _read_false(item, ("QuotaReserved", "Admitted"))
            return f"waits in queue {queue}: {words}" if words else ""
    return f"waits in queue {queue}"


def _read_pod_group(resources: Objects, ref: AppRef) -> str:
    for version in _POD_GROUPS:
        group = resources.read(Kind(api_version=version, kind="PodGroup"), ref.namespace, ref.name)
        if group is not None:
            words = _read_false(group, ("PodGroupScheduled", "Scheduled")) or _read_true(group, "Unschedulable")
            return f"waits for its gang: {words}" if words else ""
    return ""


def _read_false(item: Mapping[str, Any], types: Sequence[str]) -> str:
    for condition in (item.get("status") or {}).get("conditions") or []:
        if condition["type"] in types and condition["status"] == "False":
            return str(condition.get("message") or condition.get("reason") or "")
    return ""


def _read_true(item: Mapping[str, Any], kind: str) -> str:
    for condition in (item.get("status") or {}).get("conditions") or []:
        if condition["type"] == kind and condition["status"] == "True":
            return str(condition.get("message") or condition.get("reason") or "")
    return ""
