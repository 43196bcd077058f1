"""Operations on an existing app: cancel, delete, resize."""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from muster.schedulers.errors import EndedAppError, SchedulerError, UnknownAppError
from muster.schedulers.kubernetes.api.errors import ApiError, RequestError
from muster.schedulers.kubernetes.api.objects import Objects
from muster.schedulers.kubernetes.app_id import AppRef
from muster.schedulers.kubernetes.kinds import JOB, JOBSET, VOLCANO_JOB, Kind
from muster.schedulers.kubernetes.labels import APPDEF_ANNOTATION, CANCEL_ANNOTATION, LABEL_COMPONENT, LABEL_INSTANCE
from muster.schedulers.kubernetes.live.submit import build_owner_reference
from muster.schedulers.kubernetes.manifests.app_annotation import decode_app
from muster.schedulers.kubernetes.names import (
    LEADER_TASK,
    build_config_map_name,
    build_secret_name,
    build_workspace_name,
    label_roles,
)
from muster.schedulers.runner.roles import build_role_plan, find_elastic_role

_STOP_JOB: Final = {"activeDeadlineSeconds": 1}
"""Ends a Job's pods with SIGTERM first, and keeps the Job and the pods that have ended."""


def _list_prerequisites(app: str) -> tuple[tuple[Kind, str], ...]:
    kinds = (("Service", app), ("ConfigMap", build_config_map_name(app)), ("Secret", build_secret_name(app)))
    workspace = ("Secret", build_workspace_name(app))  # of versions before it: in the ConfigMap
    return tuple((Kind(api_version="v1", kind=kind), name) for kind, name in (*kinds, workspace))


def find_parents(resources: Objects, ref: AppRef) -> list[dict[str, Any]]:
    """The app's Jobs (the first role's first), or its JobSet or Volcano Job; [] if it does not exist."""
    jobs, _ = resources.list_all(JOB, ref.namespace, labels=f"{LABEL_INSTANCE}={ref.name}")
    # Items of a list have neither apiVersion nor kind.
    ours = [{**job, "apiVersion": JOB.api_version, "kind": JOB.kind} for job in jobs]
    ours.sort(key=lambda job: not _has_app(job))
    if ours and _has_app(ours[0]):
        return ours
    for kind in (JOBSET, VOLCANO_JOB):  # the inner Jobs of a JobSet have the app's label, but not the AppDef
        parent = _read_if_allowed(resources, kind, ref)
        if parent is not None:
            return [{**parent, "apiVersion": kind.api_version, "kind": kind.kind}]
    return []


def _has_app(item: Mapping[str, Any]) -> bool:
    return APPDEF_ANNOTATION in (item["metadata"].get("annotations") or {})


def _read_if_allowed(resources: Objects, kind: Kind, ref: AppRef) -> dict[str, Any] | None:
    """The object; None also if the account may not read the kind: rights to Jobs are enough for flavour `job`."""
    try:
        return resources.read(kind, ref.namespace, ref.name)
    except ApiError as error:
        if error.refusal.status == 403:
            return None
        raise


def cancel(resources: Objects, ref: AppRef) -> None:
    """Stops an app with SIGTERM, then SIGKILL after the grace period. Keeps its objects; its state is CANCELLED.

    Jobs that have ended are left alone: an app that had failed before stays FAILED.
    """
    for parent in find_parents(resources, ref):
        metadata: Mapping[str, Any] = parent["metadata"]
        if read_job_end(parent) is not None:
            continue
        change: dict[str, Any] = {"metadata": {"annotations": {CANCEL_ANNOTATION: "true"}}}
        kind = Kind(api_version=parent["apiVersion"], kind=parent["kind"])
        if kind == JOB:
            change["spec"] = _STOP_JOB
        elif kind == JOBSET:
            change["spec"] = {"suspend": True}
        resources.patch(kind, ref.namespace, metadata["name"], change)
        if kind == VOLCANO_JOB:
            _create_abort_command(resources, ref, parent)


def stop_job(resources: Objects, ref: AppRef, job: Mapping[str, Any]) -> None:
    """Stops one Job of an app that is not cancelled: the Job fails."""
    resources.patch(JOB, ref.namespace, job["metadata"]["name"], {"spec": _STOP_JOB})


def is_cancelled(parent: Mapping[str, Any]) -> bool:
    """Whether a user has cancelled the app that this object belongs to."""
    return CANCEL_ANNOTATION in (parent["metadata"].get("annotations") or {})


def _create_abort_command(resources: Objects, ref: AppRef, job: Mapping[str, Any]) -> None:
    """Volcano executes Command objects and then deletes them; one that still exists has the same effect."""
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
    except RequestError as error:
        if error.refusal.reason != "AlreadyExists":
            raise


def read_job_end(job: Mapping[str, Any]) -> str | None:
    """How a Job ended: "Complete", "Failed" (also while its last pods still end), or None while it runs.

    Other kinds have no such conditions: None.
    """
    for condition in job.get("status", {}).get("conditions") or []:
        if condition["status"] == "True" and condition["type"] in ("Complete", "Failed", "FailureTarget"):
            return "Complete" if condition["type"] == "Complete" else "Failed"
    return None


def delete(resources: Objects, ref: AppRef) -> bool:
    """Deletes an app and all it owns, also what an interrupted submission left. False: nothing existed."""
    found = False
    for parent in reversed(find_parents(resources, ref)):
        kind = Kind(api_version=parent["apiVersion"], kind=parent["kind"])
        found = resources.delete(kind, ref.namespace, parent["metadata"]["name"]) or found
    # By name, not by label: few accounts may list Secrets.
    for kind, name in _list_prerequisites(ref.name):
        found = resources.delete(kind, ref.namespace, name) or found
    return found


def resize(resources: Objects, ref: AppRef, nodes: int, role_name: str | None = None) -> None:
    """Changes the number of nodes of an elastic role, within the MIN:MAX of its submission.

    Args:
        resources: of the cluster.
        ref: the app.
        nodes: new number.
        role_name: the role; None: the app's only elastic one.

    Raises:
        SchedulerError: no such app or role, several elastic roles, not elastic, out of bounds, or it has ended.
    """
    parents = find_parents(resources, ref)
    if not parents:
        raise UnknownAppError(f"there is no app {ref.name!r} in namespace {ref.namespace!r}")
    app = decode_app(parents[0])
    roles = [build_role_plan(role) for role in app.roles]
    role = find_elastic_role(ref.name, roles, role_name, nodes)
    label = label_roles([each.name for each in roles])[roles.index(role)]
    parent = _find_parent_of_role(parents, label)
    kind = Kind(api_version=parent["apiVersion"], kind=parent["kind"])
    if kind not in _RESIZES:
        raise SchedulerError(f"app {ref.name!r} is a {parent['kind']}, which cannot be resized; use flavor=job")
    if kind == JOB and read_job_end(parent) is not None:
        raise EndedAppError(f"role {role.name!r} of {ref.name!r} has ended already: nothing was changed")
    resources.patch(kind, ref.namespace, parent["metadata"]["name"], {"spec": _RESIZES[kind](parent, label, nodes)})


def _find_parent_of_role(parents: Sequence[dict[str, Any]], label: str) -> dict[str, Any]:
    """The role's own Job; the JobSet or Volcano Job has all roles."""
    labels = [(parent["metadata"].get("labels") or {}).get(LABEL_COMPONENT) for parent in parents]
    return parents[labels.index(label)] if label in labels else parents[0]


def _resize_job(_: Mapping[str, Any], __: str, nodes: int) -> dict[str, Any]:
    # Both in one patch: Kubernetes accepts a new number of completions only if it equals the parallelism.
    return {"parallelism": nodes, "completions": nodes}


def _resize_volcano(job: Mapping[str, Any], label: str, nodes: int) -> dict[str, Any]:
    tasks = copy.deepcopy(job["spec"]["tasks"])
    names = [task["name"] for task in tasks]
    tasks[names.index(label)]["replicas"] = nodes - 1 if LEADER_TASK in names else nodes
    return {"tasks": tasks}


_RESIZES: Final[Mapping[Kind, Callable[[Mapping[str, Any], str, int], dict[str, Any]]]] = {
    JOB: _resize_job,
    VOLCANO_JOB: _resize_volcano,
}
