"""Operations on an existing app: find, delete, resize."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from muster.schedulers.errors import EndedAppError, EngineError, SchedulerError, UnknownAppError
from muster.schedulers.kubernetes.api.errors import ApiError, ForbiddenError, read_if_allowed
from muster.schedulers.kubernetes.api.objects import Objects
from muster.schedulers.kubernetes.app_id import AppRef
from muster.schedulers.kubernetes.kinds import (
    CONFIG_MAP,
    JOB,
    JOBSET,
    POD_GROUP_VERSIONS,
    SECRET,
    SERVICE,
    Kind,
    parse_kind,
)
from muster.schedulers.kubernetes.labels import (
    BY_STOP,
    CANCEL_ANNOTATION,
    KUEUE_MINIMUM,
    LABEL_INSTANCE,
    LABEL_MANAGED_BY,
    MANAGED_BY,
    read_role,
)
from muster.schedulers.kubernetes.live.pod_status import PodFact
from muster.schedulers.kubernetes.manifests.app_annotation import decode_roles
from muster.schedulers.kubernetes.names import (
    build_config_map_name,
    build_secret_name,
    build_workspace_name,
)
from muster.schedulers.runner.roles import build_role_plan, find_elastic_role

_POD_GROUPS: Final = tuple(
    Kind(api_version=version, kind="PodGroup") for versions in POD_GROUP_VERSIONS.values() for version in versions
)

_ENDS: Final = {
    **dict.fromkeys(("Complete", "Completed"), "Complete"),
    **dict.fromkeys(("Failed", "FailureTarget"), "Failed"),
}
"""Condition of a Job or a JobSet that has ended -> how."""


def _list_prerequisites(app: str) -> tuple[tuple[Kind, str], ...]:
    workspace = (SECRET, build_workspace_name(app))
    return (SERVICE, app), (CONFIG_MAP, build_config_map_name(app)), (SECRET, build_secret_name(app)), workspace


def find_parents(resources: Objects, ref: AppRef) -> list[dict[str, Any]]:
    """Return the app's Jobs, or its JobSet. Return [] if it does not exist. Each of them has the AppDef."""
    ours = [job for job in resources.list_app(JOB, ref.namespace, ref.name) if not is_inner(job)]
    if not all(map(_is_record, ours)):
        return ours
    # An interrupted cancel leaves both. Flavour `job` needs rights to Jobs only.
    parent = read_if_allowed(partial(resources.read, JOBSET, ref.namespace, ref.name), None)
    return ours if parent is None else [parent, *ours]


def is_inner(job: Mapping[str, Any]) -> bool:
    """Return whether a JobSet has created it. It has the app's labels, too."""
    return any(owner["kind"] == JOBSET.kind for owner in job["metadata"].get("ownerReferences") or [])


def is_cancelled(parent: Mapping[str, Any]) -> bool:
    """Return whether a user has cancelled the app that this object belongs to."""
    return CANCEL_ANNOTATION in (parent["metadata"].get("annotations") or {})


def is_suspended(parent: Mapping[str, Any]) -> bool:
    """Return whether it waits until its queue, or a user, resumes it."""
    return bool((parent.get("spec") or {}).get("suspend"))


def find_canceller(parents: Sequence[Mapping[str, Any]]) -> str:
    """Return the command that has cancelled an app. "": none that is known."""
    annotations = [parent["metadata"].get("annotations") or {} for parent in parents]
    return next((each[CANCEL_ANNOTATION] for each in annotations if CANCEL_ANNOTATION in each), "")


def describe_stopper(parents: Sequence[Mapping[str, Any]]) -> str:
    """Say what has stopped an app: "cancelled by `torchx cancel`". "": nothing that is known."""
    by = find_canceller(parents)
    if by:
        return f"{'stopped' if by == BY_STOP else 'cancelled'} by `{by}`"
    if not parents:
        return "its Job was deleted"
    return "its Job was suspended" if any(map(is_suspended, parents)) else ""


def _is_record(job: Mapping[str, Any]) -> bool:
    """Return whether this Job is the record of an app that was cancelled in its queue."""
    return is_cancelled(job) and (job.get("spec") or {}).get("completions") == 0


def read_job_end(job: Mapping[str, Any]) -> str | None:
    """Return how a Job ended: "Complete", "Failed" (also while its last pods still end), or None while it runs.

    JobSets count in the same way. The record of an app that was cancelled in its queue has no pods to complete: it
    counts as failed.
    """
    if _is_record(job):
        return "Failed"
    kinds = [condition["type"] for condition in list_conditions(job) if condition["status"] == "True"]
    return next((_ENDS[kind] for kind in kinds if kind in _ENDS), None)


def list_conditions(item: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Read the conditions of an object."""
    return (item.get("status") or {}).get("conditions") or []


def delete(resources: Objects, ref: AppRef) -> bool:
    """Delete an app and all it owns, also what an interrupted submission left. False: nothing existed.

    Raises:
        RightError: the account may not delete it. Nothing was changed.
        EngineError: only a part is deleted. The line names both.
    """
    deletion = _Deletion(resources, ref)
    parents = find_parents(resources, ref)
    for parent in reversed(parents):
        deletion.delete(parse_kind(parent), parent["metadata"]["name"])
        deletion.check()  # a Job that stays needs what follows
    # Few accounts may list Secrets.
    for kind, name in _list_prerequisites(ref.name):
        if parents or _is_ours(resources, kind, ref, name):
            deletion.delete(kind, name)
    for kind in _POD_GROUPS:  # without the right, the submission created none
        if _is_ours(resources, kind, ref, ref.name):
            deletion.delete(kind, ref.name)
    deletion.check(is_owned=bool(parents))
    return bool(deletion.deleted)


class _Deletion:
    """What of an app is deleted, and what is refused."""

    def __init__(self, resources: Objects, ref: AppRef) -> None:
        self._resources = resources
        self._ref = ref
        self.deleted: list[str] = []
        self._refused: dict[str, ForbiddenError] = {}

    def delete(self, kind: Kind, name: str) -> None:
        what = f"{kind.kind.lower()}/{name}"
        try:
            if self._resources.delete(kind, self._ref.namespace, name):
                self.deleted.append(what)
        except ForbiddenError as error:
            self._refused[what] = error

    def check(self, *, is_owned: bool = False) -> None:
        """Raise if something was refused. `is_owned`: what was deleted owns it, so that the cluster collects it."""
        if not self._refused:
            return
        first = next(iter(self._refused.values()))
        if not self.deleted:
            raise first
        refused, deleted = ", ".join(self._refused), ", ".join(self.deleted)
        if is_owned:
            line = f"the cluster removes what it owned; this account may not delete {refused} itself"
        else:
            line = f"not deleted: {refused}"
        raise EngineError(f"deleted: {deleted}; {line} ({first})") from first


def _is_ours(resources: Objects, kind: Kind, ref: AppRef, name: str) -> bool:
    """Return whether an object that nothing else is known of belongs to the app.

    An empty patch changes nothing and returns the object: few accounts may read Secrets, which they may create.
    """
    try:
        labels = resources.patch(kind, ref.namespace, name, {})["metadata"].get("labels") or {}
    except ApiError as error:
        if error.refusal.status in (403, 404):
            return False
        raise
    return (labels.get(LABEL_MANAGED_BY), labels.get(LABEL_INSTANCE)) == (MANAGED_BY, ref.name)


def resize(resources: Objects, ref: AppRef, pods: Iterable[PodFact], nodes: int, role_name: str | None = None) -> None:
    """Change the number of nodes of an elastic role, within the MIN:MAX of its submission.

    Args:
        resources: of the cluster.
        ref: the app.
        pods: those it has.
        nodes: new number.
        role_name: the role. None: the app's only elastic one.

    Raises:
        SchedulerError: no such app or role, several elastic roles, not elastic, out of bounds, it has ended, or nodes
            that run would be ended before others that do not.
    """
    parents = find_parents(resources, ref)
    if not parents:
        raise UnknownAppError(f"there is no app {ref.name!r} in namespace {ref.namespace!r}")
    roles = {label: build_role_plan(role) for label, role in decode_roles(parents[0]).items()}
    role = find_elastic_role(ref.name, list(roles.values()), role_name, nodes)
    label = next(label for label, each in roles.items() if each is role)
    # A JobSet has all roles.
    parent = next((parent for parent in parents if read_role(parent) == label), parents[0])
    kind = parse_kind(parent)
    if kind == JOB and read_role(parent) != label:
        raise EndedAppError(f"the Job of role {role.name!r} of {ref.name!r} is gone: nothing was changed")
    if kind == JOBSET:
        raise SchedulerError(f"app {ref.name!r} is a {parent['kind']}, which cannot be resized; use flavor=job")
    if kind == JOB and read_job_end(parent) is not None:
        raise EndedAppError(f"role {role.name!r} of {ref.name!r} has ended already: nothing was changed")
    if KUEUE_MINIMUM in (parent["metadata"].get("annotations") or {}) and not parent["spec"].get("suspend"):
        raise SchedulerError(
            f"role {role.name!r} of {ref.name!r} cannot be resized: Kueue admitted a part of its nodes and keeps their "
            "number; submit it with -cfg kueue_elastic=resize"
        )
    _check_who_stays({fact.index for fact in pods if fact.role == label and fact.phase == "Running"}, nodes)
    # Kubernetes changes completions only with the parallelism.
    change = {"parallelism": nodes, "completions": nodes}
    resources.patch(kind, ref.namespace, parent["metadata"]["name"], {"spec": change})


def _check_who_stays(running: set[int], nodes: int) -> None:
    """Refuse to end nodes that run while some of those that would stay do not: the job could lose all its state.

    Raises:
        SchedulerError: it would.
    """
    absent, ended = sorted(set(range(nodes)) - running), sorted(index for index in running if index >= nodes)
    if absent and ended:
        raise SchedulerError(
            f"a resize to {nodes} would end node {', '.join(map(str, ended))}, which runs, and keep node "
            f"{', '.join(map(str, absent))}, which does not: wait until all of these run (`muster status`)"
        )
