"""One app in a cluster: its id, its objects, what they say of its state, and how it is deleted and resized.

An id is `NAMESPACE:NAME`, with context and kubeconfig if the user gave them. A later command has nothing but the id, so
the id must hold everything needed to find the app. Context and kubeconfig are percent-encoded, because ids must not
contain a slash.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final
from urllib.parse import quote, unquote

from muster.schedulers.errors import EndedAppError, EngineError, SchedulerError, UnknownAppError
from muster.schedulers.kubernetes import kube
from muster.schedulers.kubernetes.api.connection import Access
from muster.schedulers.kubernetes.api.errors import ApiError, ForbiddenError, read_if_allowed
from muster.schedulers.kubernetes.api.objects import Objects
from muster.schedulers.kubernetes.manifests.bundles import decode_roles
from muster.schedulers.kubernetes.running_apps.pod_status import PodFact, read_pod
from muster.schedulers.runner.roles import build_role_plan, find_elastic_role

_ENDS: Final = {
    **dict.fromkeys(("Complete", "Completed"), "Complete"),
    **dict.fromkeys(("Failed", "FailureTarget"), "Failed"),
}
"""Condition of a Job or a JobSet that has ended -> how."""


@dataclass(frozen=True, kw_only=True)
class AppRef:
    """An app and the cluster it is in."""

    namespace: str
    name: str
    access: Access = field(default_factory=Access)

    def __str__(self) -> str:
        parts = [self.namespace, self.name]
        if self.access.context or self.access.kubeconfig:
            parts.append(quote(self.access.context or "", safe=""))
        if self.access.kubeconfig:
            parts.append(quote(self.access.kubeconfig, safe=""))
        return ":".join(parts)


def parse_app_id(app_id: str) -> AppRef:
    """Parse an app id, `NAMESPACE:NAME[:CONTEXT[:KUBECONFIG]]`.

    Raises:
        SchedulerError: the text does not have this form.
    """
    parts = app_id.split(":")
    if not 2 <= len(parts) <= 4 or not all(parts[:2]):
        raise SchedulerError(f"app id {app_id!r} is not of the form NAMESPACE:NAME")
    context, kubeconfig = (unquote(part) for part in (*parts[2:], "", "")[:2])
    return AppRef(
        namespace=parts[0], name=parts[1], access=Access(context=context or None, kubeconfig=kubeconfig or None)
    )


@dataclass(frozen=True, kw_only=True)
class App:
    """An app, which may not exist, and the cluster it is in."""

    resources: Objects
    ref: AppRef

    def find_parents(self) -> list[dict[str, Any]]:
        """Return the app's Jobs, or its JobSet. Return [] if it does not exist. Each of them has the AppDef."""
        jobs = [
            job for job in self.resources.list_app(kube.JOB, self.ref.namespace, self.ref.name) if not is_inner(job)
        ]
        if jobs:
            return jobs
        # Flavour `job` needs rights to Jobs only.
        jobset = read_if_allowed(partial(self.resources.read, kube.JOBSET, self.ref.namespace, self.ref.name))
        return [] if jobset is None else [jobset]

    def need_parents(self) -> list[dict[str, Any]]:
        """Return what `find_parents` does.

        Raises:
            UnknownAppError: the app does not exist.
        """
        parents = self.find_parents()
        if not parents:
            raise UnknownAppError(f"there is no app {self.ref.name!r} in namespace {self.ref.namespace!r}")
        return parents

    def list_roles(self) -> dict[str, tuple[str, Any]]:
        """Return the label and the role of the AppDef, by the role's name. Raises as `need_parents`."""
        return {role.name: (label, role) for label, role in decode_roles(self.need_parents()[0]).items()}

    def list_pods(self) -> list[PodFact]:
        """Return all its pods, also those that have ended."""
        return [read_pod(item) for item in self.resources.list_app(kube.POD, self.ref.namespace, self.ref.name)]

    def list_events(self, fields: str) -> list[dict[str, Any]]:
        """Return the events of the app's namespace that match. They are kept for 1 h."""
        return self.resources.list_all(kube.EVENT, self.ref.namespace, fields=fields)

    def patch(self, parent: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
        """Apply a merge patch to one of its parents, and return that as it is then."""
        return self.resources.patch(kube.parse_kind(parent), self.ref.namespace, parent["metadata"]["name"], change)

    def delete(self, parent: Mapping[str, Any]) -> None:
        """Delete one of its parents, with the pods."""
        self.resources.delete(kube.parse_kind(parent), self.ref.namespace, parent["metadata"]["name"])


# -- what a parent says -----------------------------------------------------------------------------------------------


def is_inner(job: Mapping[str, Any]) -> bool:
    """Return whether a JobSet has created it. It has the app's labels, too."""
    return any(owner["kind"] == kube.JOBSET.kind for owner in job["metadata"].get("ownerReferences") or [])


def is_cancelled(parent: Mapping[str, Any]) -> bool:
    """Return whether a user has cancelled the app that this object belongs to."""
    return kube.CANCEL_ANNOTATION in (parent["metadata"].get("annotations") or {})


def is_extra(parent: Mapping[str, Any]) -> bool:
    """Return whether the app can do without this Job: its role is not critical, or the one that it serves has ended."""
    annotations = parent["metadata"].get("annotations") or {}
    return not {kube.EXTRA_ANNOTATION, kube.SERVED_ANNOTATION}.isdisjoint(annotations)


def is_suspended(parent: Mapping[str, Any]) -> bool:
    """Return whether it waits until its queue, or a user, resumes it."""
    return bool((parent.get("spec") or {}).get("suspend"))


def find_canceller(parents: Sequence[Mapping[str, Any]]) -> str:
    """Return the command that has cancelled an app. "": none that is known."""
    annotations = [parent["metadata"].get("annotations") or {} for parent in parents]
    return next((each[kube.CANCEL_ANNOTATION] for each in annotations if kube.CANCEL_ANNOTATION in each), "")


def read_job_end(job: Mapping[str, Any]) -> str | None:
    """Return how a Job ended: "Complete", "Failed" (also while its last pods still end), or None while it runs.

    JobSets count in the same way. The record of an app that was cancelled in its queue has no pods to complete: it
    counts as failed.
    """
    if is_cancelled(job) and (job.get("spec") or {}).get("completions") == 0:
        return "Failed"
    if is_suspended(job) and kube.SERVED_ANNOTATION in (job["metadata"].get("annotations") or {}):
        return "Failed"  # it may begin later, and has no time then
    kinds = [condition["type"] for condition in list_conditions(job) if condition["status"] == "True"]
    return next((_ENDS[kind] for kind in kinds if kind in _ENDS), None)


def list_conditions(item: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Read the conditions of an object."""
    return (item.get("status") or {}).get("conditions") or []


# -- delete -----------------------------------------------------------------------------------------------------------


def delete(app: App) -> bool:
    """Delete an app and all it owns, also what an interrupted submission left. False: nothing existed.

    Raises:
        RightError: the account may not delete it. Nothing was changed.
        EngineError: only a part is deleted. The line names both.
    """
    name = app.ref.name
    deleted: list[str] = []
    refused: dict[str, ForbiddenError] = {}

    def remove(kind: kube.Kind, each: str) -> None:
        what = f"{kind.kind.lower()}/{each}"
        try:
            if app.resources.delete(kind, app.ref.namespace, each):
                deleted.append(what)
        except ForbiddenError as error:
            refused[what] = error

    parents = app.find_parents()
    for parent in reversed(parents):
        remove(kube.parse_kind(parent), parent["metadata"]["name"])
        _check_refused(deleted, refused)  # a Job that stays needs what follows
    # Few accounts may list Secrets.
    prerequisites = (
        (kube.SERVICE, name),
        (kube.CONFIG_MAP, kube.build_config_map_name(name)),
        (kube.SECRET, kube.build_secret_name(name)),
        (kube.SECRET, kube.build_workspace_name(name)),
    )
    for kind, each in prerequisites:
        if parents or _is_ours(app, kind, each):
            remove(kind, each)
    for kind in kube.POD_GROUPS:  # without the right, the submission created none
        if _is_ours(app, kind, name):
            remove(kind, name)
    _check_refused(deleted, refused, is_owned=bool(parents))
    return bool(deleted)


def _check_refused(deleted: Sequence[str], refused: Mapping[str, ForbiddenError], *, is_owned: bool = False) -> None:
    """Raise if something was refused. `is_owned`: what was deleted owns it, so that the cluster collects it."""
    if not refused:
        return
    first = next(iter(refused.values()))
    if not deleted:
        raise first
    if is_owned:
        line = f"the cluster removes what it owned; this account may not delete {', '.join(refused)} itself"
    else:
        line = f"not deleted: {', '.join(refused)}"
    raise EngineError(f"deleted: {', '.join(deleted)}; {line} ({first})") from first


def _is_ours(app: App, kind: kube.Kind, name: str) -> bool:
    """Return whether an object that nothing else is known of belongs to the app.

    An empty patch changes nothing and returns the object: few accounts may read Secrets, which they may create.
    """
    try:
        labels = app.resources.patch(kind, app.ref.namespace, name, {})["metadata"].get("labels") or {}
    except ApiError as error:
        if error.refusal.status in (403, 404):
            return False
        raise
    return (labels.get(kube.LABEL_MANAGED_BY), labels.get(kube.LABEL_INSTANCE)) == (kube.MANAGED_BY, app.ref.name)


# -- resize -----------------------------------------------------------------------------------------------------------


def resize(app: App, nodes: int, role_name: str | None = None) -> None:
    """Change the number of nodes of an elastic role, within the MIN:MAX of its submission.

    Args:
        app: of the role.
        nodes: new number.
        role_name: the role. None: the app's only elastic one.

    Raises:
        SchedulerError: no such app or role, several elastic roles, not elastic, out of bounds, it has ended, or nodes
            that run would be ended before others that do not.
    """
    parents, name = app.need_parents(), app.ref.name
    roles = {label: build_role_plan(role) for label, role in decode_roles(parents[0]).items()}
    role = find_elastic_role(name, list(roles.values()), role_name, nodes)
    label = next(label for label, each in roles.items() if each is role)
    if kube.parse_kind(parents[0]) == kube.JOBSET:
        raise SchedulerError(f"app {name!r} is a JobSet, which cannot be resized; use flavor=job")
    job = next((parent for parent in parents if kube.read_role(parent) == label), None)
    if job is None:
        raise EndedAppError(f"the Job of role {role.name!r} of {name!r} is gone")
    if read_job_end(job) is not None:
        raise EndedAppError(f"role {role.name!r} of {name!r} has ended already")
    if kube.KUEUE_MINIMUM in (job["metadata"].get("annotations") or {}) and not is_suspended(job):
        raise SchedulerError(
            f"role {role.name!r} of {name!r} cannot be resized: Kueue admitted a part of its nodes and keeps their "
            "number; submit it with -cfg kueue_elastic=resize"
        )
    running = {fact.index for fact in app.list_pods() if fact.role == label and fact.phase == "Running"}
    absent, ended = sorted(set(range(nodes)) - running), sorted(index for index in running if index >= nodes)
    if absent and ended:  # the job could lose all its state
        raise SchedulerError(
            f"a resize to {nodes} would end node {', '.join(map(str, ended))}, which runs, and keep node "
            f"{', '.join(map(str, absent))}, which does not: wait until all of these run (`muster status`)"
        )
    # Kubernetes changes completions only with the parallelism.
    app.patch(job, {"spec": {"parallelism": nodes, "completions": nodes}})
