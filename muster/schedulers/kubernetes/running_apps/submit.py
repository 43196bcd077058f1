"""Creates an app's objects: checks first, then creates all of them or none."""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Final

from muster.schedulers.errors import EngineError, SchedulerError
from muster.schedulers.interrupts import raise_dropped_interrupts
from muster.schedulers.kubernetes import kube
from muster.schedulers.kubernetes.api.errors import ApiError, ForbiddenError, RequestError, Unreachable
from muster.schedulers.kubernetes.api.objects import Objects
from muster.schedulers.kubernetes.manifests.features import ABSENCES
from muster.schedulers.kubernetes.manifests.jobs import add_pod_group
from muster.schedulers.kubernetes.manifests.request import Request, complete_documents
from muster.schedulers.kubernetes.running_apps.app import App
from muster.schedulers.kubernetes.schema import check_version
from muster.schedulers.naming import make_secret

_SEVERAL_ROLES: Final = (
    "each role is its own Job: when one fails, this process stops the others as long as it lives (--wait, --log), and "
    "after that `torchx cancel` does; with flavor=jobset the cluster does"
)

_ABSENCES: Final = {
    kube.JOBSET.kind: f"JobSet is not installed in this cluster ({kube.JOBSET.api_version}); install it, or use "
    "flavor=job, which does not need it",
    **dict.fromkeys(
        kube.POD_GROUP_VERSIONS[kube.NATIVE_GROUP], "this cluster has no native PodGroups; use gang=none or gang=auto"
    ),
    kube.VOLCANO_POD_GROUP_VERSION: "Volcano is not installed in this cluster; use gang=none or gang=auto",
    **ABSENCES,
}
"""Kind, or version of a PodGroup -> what is said if the cluster does not have it and a request needs it."""


def submit(app: App, request: Request, notify: Callable[[str], None]) -> None:
    """Create all objects of a request, or none.

    Creates the prerequisites first, then the parents, and then makes these their owners, so that they go with the last
    of them. After a failure or an interrupt, deletes the objects created so far.

    Args:
        app: its namespace is that of the objects.
        request: from `build_request`.
        notify: called with each line that the user should see.

    Raises:
        SchedulerError, EngineError: one line that says what to do.
    """
    with raise_dropped_interrupts():
        documents = _prepare(app, request, notify)
    attempted: list[dict[str, Any]] = []
    with ExitStack() as undo:
        undo.callback(_roll_back, app, attempted, notify)
        with raise_dropped_interrupts():
            _create_all(app, documents, attempted)
        undo.pop_all()
    if request.has_several_jobs:
        notify(_SEVERAL_ROLES)


def _prepare(app: App, request: Request, notify: Callable[[str], None]) -> list[dict[str, Any]]:
    """Check whether the cluster can run the request, and complete its documents. This changes nothing."""
    resources = app.resources
    check_version(resources.read_version(), elastic=request.inputs.elastic, source="the server")
    for kind in (kube.JOB, kube.POD):  # or nothing created could be seen
        resources.list_app(kind, app.ref.namespace, app.ref.name)
    _check_kinds(resources, request)
    _check_queue(app, request)
    documents = complete_documents(
        request,
        namespace=app.ref.namespace,
        secret=make_secret(),
        submission_id=os.urandom(8).hex(),
        pod_group_version=_find_pod_group_version(app, request, notify),
    )
    if request.inputs.options.validate_spec:
        for document in documents:
            resources.create(document, dry_run=True)
    return documents


def _create_all(app: App, documents: Sequence[dict[str, Any]], attempted: list[dict[str, Any]]) -> None:
    """Create all documents. What the Jobs share belongs to all of them: the cluster deletes it with the last one.

    No Job owns another: each can be deleted after its own end (`ttl_s`) while others run.

    Args:
        app: whose.
        documents: in the order of creation.
        attempted: gets those that are created, or may be: the server did not refuse them.
    """
    owners: list[dict[str, Any]] = []
    shared: list[dict[str, Any]] = []
    for document in documents:
        is_owner = document["kind"] in kube.PARENT_KINDS
        created = _create(app, document, attempted, needs_uid=is_owner)
        if is_owner:
            owner = {"apiVersion": document["apiVersion"], "kind": document["kind"], "name": _name(document)}
            uid = created["metadata"]["uid"]
            # To block the deletion would need a further right.
            owners.append({**owner, "uid": uid, "controller": False, "blockOwnerDeletion": False})
        else:
            shared.append(document)
    for document in shared:
        change = {"metadata": {"ownerReferences": owners}}
        app.resources.patch(kube.parse_kind(document), app.ref.namespace, _name(document), change)


def _create(app: App, document: dict[str, Any], attempted: list[dict[str, Any]], *, needs_uid: bool) -> dict[str, Any]:
    """Create one document. Records it before the first request, whose response may be lost."""
    attempted.append(document)
    try:
        return app.resources.create(document, needs_uid=needs_uid)
    except (ApiError, RequestError) as error:
        if not error.refusal.maybe_done:
            attempted.pop()
        raise


def _roll_back(app: App, attempted: Sequence[dict[str, Any]], notify: Callable[[str], None]) -> None:
    """Delete what this submission created, also where responses were lost. Reports errors, does not raise them."""
    left: list[dict[str, Any]] = []
    first: EngineError | SchedulerError | None = None
    for document in reversed(attempted):
        if not isinstance(first, Unreachable):  # each further one would wait as long
            try:
                app.resources.delete(kube.parse_kind(document), app.ref.namespace, _name(document))
                continue
            except (EngineError, SchedulerError) as error:
                first = first or error
        left.append(document)
    if left:
        names = " ".join(f"{kube.parse_kind(document).resource}/{_name(document)}" for document in reversed(left))
        command = f"kubectl -n {app.ref.namespace} delete {names}"
        notify(f"some created objects could not be removed ({first}); to remove them, run: {command}")


def _name(document: Mapping[str, Any]) -> str:
    name: str = document["metadata"]["name"]
    return name


def _check_kinds(resources: Objects, request: Request) -> None:
    for kind in map(kube.parse_kind, request.documents):
        absence = _ABSENCES.get(kind.kind) or _ABSENCES.get(kind.api_version)
        if absence is not None and not resources.has_kind(kind):
            raise EngineError(absence)


def _check_queue(app: App, request: Request) -> None:
    options = request.inputs.options
    if options.resolved_gang == "kueue" and options.queue:
        versions = app.resources.list_group_versions("kueue.x-k8s.io")
        if not versions:
            has_volcano = bool(app.resources.list_group_versions(kube.VOLCANO_GROUP))
            advice = "for a queue of Volcano give gang=volcano, too" if has_volcano else "install it or remove queue"
            raise EngineError(f"queue={options.queue}: Kueue is not installed in this cluster; {advice}")
        kind, problem = (
            kube.Kind(api_version=versions[0], kind="LocalQueue"),
            f"namespace {app.ref.namespace!r} has no LocalQueue",
        )
    elif options.resolved_gang == "volcano" and options.queue:
        kind, problem = kube.VOLCANO_QUEUE, "Volcano has no queue"
    else:
        return
    with contextlib.suppress(ForbiddenError):  # an account that may not read queues: no check
        if app.resources.read(kind, app.ref.namespace, options.queue) is None:
            names = sorted(item["metadata"]["name"] for item in app.resources.list_all(kind, app.ref.namespace))
            known = f"existing queues: {', '.join(names)}" if names else "there are no queues"
            raise SchedulerError(f"{problem} {options.queue!r}; {known}")


def _find_pod_group_version(app: App, request: Request, notify: Callable[[str], None]) -> str | None:
    """Find the cluster's version of PodGroup, if the account may create one (gang=auto without a queue)."""
    if not request.may_add_pod_group:
        return None
    problem = "no queue is given and the cluster has no PodGroups"
    for version in _list_pod_group_versions(app.resources):
        grouped = add_pod_group(request.documents, version, request.inputs)
        group = next(document for document in grouped if document["kind"] == "PodGroup")
        metadata = {**group["metadata"], "namespace": app.ref.namespace}
        if _may_create(app.resources, {**group, "metadata": metadata}):
            notify(f"pods start together: PodGroup of {version}")
            return version
        problem = f"this account is not allowed to create podgroups.{version.partition('/')[0]}"
    notify(
        f"{problem}: pods start one by one; without room for {request.inputs.minimum} pods, those that run wait and "
        "hold their nodes; -cfg queue=NAME (Kueue) starts all together"
    )
    return None


def _list_pod_group_versions(resources: Objects) -> Iterator[str]:
    """Yield the cluster's versions of PodGroup, Kubernetes' own first."""
    for group, versions in kube.POD_GROUP_VERSIONS.items():
        if resources.list_group_versions(group):
            kinds = (kube.Kind(api_version=version, kind="PodGroup") for version in versions)
            kind = next(filter(resources.has_kind, kinds), None)
            if kind is not None:
                yield kind.api_version


def _may_create(resources: Objects, document: Mapping[str, Any]) -> bool:
    """Return whether the account may create the document. Its creation will report other errors."""
    try:
        resources.create(document, dry_run=True)
    except ForbiddenError:
        return False
    except (ApiError, RequestError):
        pass
    return True
