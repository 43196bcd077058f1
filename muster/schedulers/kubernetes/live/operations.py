"""What can be done to an app that exists: cancel, delete, resize."""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from muster.schedulers.errors import SchedulerError
from muster.schedulers.kubernetes.api.errors import ApiError, RequestError
from muster.schedulers.kubernetes.api.objects import JOB, JOBSET, VOLCANO_JOB, Kind, Objects
from muster.schedulers.kubernetes.app_id import AppRef
from muster.schedulers.kubernetes.labels import APPDEF_ANNOTATION, CANCEL_ANNOTATION, LABEL_INSTANCE
from muster.schedulers.kubernetes.live.submit import build_owner_reference
from muster.schedulers.kubernetes.manifests.app_annotation import decode_app
from muster.schedulers.kubernetes.names import LEAD, config_map_name, secret_name

_DEADLINE: Final = "activeDeadlineSeconds"
"""A second of it ends a Job's pods politely, and the Job and its pods stay to be looked at."""


def _name_supplies(app: str) -> tuple[tuple[Kind, str], ...]:
    kinds = (("Service", app), ("ConfigMap", config_map_name(app)), ("Secret", secret_name(app)))
    return tuple((Kind(api_version="v1", kind=kind), name) for kind, name in kinds)


def find_parents(resources: Objects, ref: AppRef) -> list[dict[str, Any]]:
    """The app's Jobs (the first role's first), or its JobSet or Volcano Job; [] when it does not exist."""
    jobs, _ = resources.list_all(JOB, ref.namespace, labels=f"{LABEL_INSTANCE}={ref.name}")
    # Items of a list carry neither apiVersion nor kind.
    ours = [{**job, "apiVersion": JOB.api_version, "kind": JOB.kind} for job in jobs]
    ours.sort(key=lambda job: not _has_app(job))
    if ours and _has_app(ours[0]):
        return ours
    for kind in (JOBSET, VOLCANO_JOB):  # the inner Jobs of a JobSet carry the app's label too, but not the app
        parent = _read_if_allowed(resources, kind, ref)
        if parent is not None:
            return [{**parent, "apiVersion": kind.api_version, "kind": kind.kind}]
    return []


def _has_app(item: Mapping[str, Any]) -> bool:
    return APPDEF_ANNOTATION in (item["metadata"].get("annotations") or {})


def _read_if_allowed(resources: Objects, kind: Kind, ref: AppRef) -> dict[str, Any] | None:
    """None also where a role allows Jobs alone, which is enough for flavour `job`."""
    try:
        return resources.read(kind, ref.namespace, ref.name)
    except ApiError as fault:
        if fault.refusal.status == 403:
            return None
        raise


def cancel(resources: Objects, ref: AppRef) -> None:
    """Stops an app politely and keeps its record: SIGTERM, the grace period, SIGKILL; then it reads CANCELLED."""
    for parent in find_parents(resources, ref):
        metadata: Mapping[str, Any] = parent["metadata"]
        change: dict[str, Any] = {"metadata": {"annotations": {CANCEL_ANNOTATION: "true"}}}
        kind = Kind(api_version=parent["apiVersion"], kind=parent["kind"])
        if kind == JOB:
            change["spec"] = {_DEADLINE: 1}
        elif kind == JOBSET:
            change["spec"] = {"suspend": True}
        resources.patch(kind, ref.namespace, metadata["name"], change)
        if kind == VOLCANO_JOB:
            _command_abort(resources, ref, parent)


def _command_abort(resources: Objects, ref: AppRef, job: Mapping[str, Any]) -> None:
    """Volcano acts on Command objects, which it takes away once it has; one that is still there will do."""
    reference = {**build_owner_reference(job), "controller": True}
    command = {
        "apiVersion": "bus.volcano.sh/v1alpha1",
        "kind": "Command",
        "metadata": {"name": f"{ref.name}-abort", "namespace": ref.namespace, "ownerReferences": [reference]},
        "action": "AbortJob",
        "target": reference,
    }
    try:
        resources.create(command)
    except RequestError as fault:
        if fault.refusal.reason != "AlreadyExists":
            raise


def stop_rest(resources: Objects, ref: AppRef, jobs: Sequence[Mapping[str, Any]]) -> bool:
    """Flavour `job`, several roles: stops the Jobs that still run once one has failed. No controller does.

    Returns:
        Whether anything was stopped: the first of several callers does it.
    """
    if "Failed" not in [job_end(job) for job in jobs]:
        return False
    running = [job for job in jobs if job_end(job) is None and (job.get("spec") or {}).get(_DEADLINE) != 1]
    for job in running:
        resources.patch(JOB, ref.namespace, job["metadata"]["name"], {"spec": {_DEADLINE: 1}})
    return bool(running)


def job_end(job: Mapping[str, Any]) -> str | None:
    """How a Job ended: "Complete", "Failed" (also while it takes its pods down), or None while it goes on."""
    for condition in job.get("status", {}).get("conditions") or []:
        if condition["status"] == "True" and condition["type"] in ("Complete", "Failed", "FailureTarget"):
            return "Complete" if condition["type"] == "Complete" else "Failed"
    return None


def delete(resources: Objects, ref: AppRef) -> bool:
    """Deletes an app with all it owns, and what a broken submission may have left. False: there was nothing."""
    found = False
    for parent in reversed(find_parents(resources, ref)):
        kind = Kind(api_version=parent["apiVersion"], kind=parent["kind"])
        found = resources.delete(kind, ref.namespace, parent["metadata"]["name"]) or found
    # By name, not by label: few are allowed to list Secrets.
    for kind, name in _name_supplies(ref.name):
        found = resources.delete(kind, ref.namespace, name) or found
    return found


def resize(resources: Objects, ref: AppRef, nodes: int) -> None:
    """Gives an elastic app another number of nodes, within what it was submitted with.

    Args:
        resources: of the cluster.
        ref: the app.
        nodes: of its first role.

    Raises:
        SchedulerError: no such app, not elastic, out of bounds, or over.
    """
    parents = find_parents(resources, ref)
    if not parents:
        raise SchedulerError(f"there is no app {ref.name!r} in namespace {ref.namespace!r}")
    parent = parents[0]
    role = decode_app(parent["metadata"]["annotations"][APPDEF_ANNOTATION]).roles[0]
    least = role.min_replicas or role.num_replicas
    if least == role.num_replicas:
        raise SchedulerError(
            f"app {ref.name!r} has a fixed number of nodes, {role.num_replicas}; start it with -j MIN:MAX"
        )
    if not least <= nodes <= role.num_replicas:
        raise SchedulerError(f"app {ref.name!r} can have {least} to {role.num_replicas} nodes, not {nodes}")
    kind = Kind(api_version=parent["apiVersion"], kind=parent["kind"])
    if kind not in _RESIZES:
        raise SchedulerError(f"app {ref.name!r} is a {parent['kind']}, whose size is fixed; use flavor=job")
    if kind == JOB and job_end(parent) is not None:
        raise SchedulerError(f"app {ref.name!r} is over")
    change = _RESIZES[kind](parent, nodes)
    resources.patch(kind, ref.namespace, parent["metadata"]["name"], {"spec": change})


def _resize_job(_: Mapping[str, Any], nodes: int) -> dict[str, Any]:
    # both in one patch: Kubernetes takes a new number of completions only if it equals the parallelism
    return {"parallelism": nodes, "completions": nodes}


def _resize_volcano(job: Mapping[str, Any], nodes: int) -> dict[str, Any]:
    tasks = copy.deepcopy(job["spec"]["tasks"])
    leads = tasks[0]["name"] == LEAD
    tasks[1 if leads else 0]["replicas"] = nodes - 1 if leads else nodes
    return {"tasks": tasks}


_RESIZES: Final[Mapping[Kind, Callable[[Mapping[str, Any], int], dict[str, Any]]]] = {
    JOB: _resize_job,
    VOLCANO_JOB: _resize_volcano,
}
