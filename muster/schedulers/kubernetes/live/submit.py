"""Creates an app's objects: checks first, then creates all of them or none."""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Final

from muster.schedulers.errors import EngineError, SchedulerError
from muster.schedulers.interrupts import raise_dropped_interrupts
from muster.schedulers.kubernetes.api.errors import ApiError, ForbiddenError, RequestError, Unreachable
from muster.schedulers.kubernetes.api.objects import Objects
from muster.schedulers.kubernetes.kinds import (
    JOB,
    JOBSET,
    PARENT_KINDS,
    POD,
    POD_GROUP_VERSIONS,
    VOLCANO_GROUP,
    VOLCANO_QUEUE,
    Kind,
    build_owner_reference,
    parse_kind,
)
from muster.schedulers.kubernetes.labels import SUBMISSION_ANNOTATION
from muster.schedulers.kubernetes.manifests.features import ABSENCES
from muster.schedulers.kubernetes.manifests.pod_group import add_pod_group
from muster.schedulers.kubernetes.manifests.request import Additions, Request, complete_documents
from muster.schedulers.kubernetes.schema import check_version
from muster.schedulers.naming import make_secret

_SEVERAL_ROLES: Final = (
    "each role is its own Job: when one fails, this process stops the others as long as it lives (--wait, --log), and "
    "after that `torchx cancel` does; with flavor=jobset the cluster does"
)

_ABSENCES: Final = {
    JOBSET.kind: f"JobSet is not installed in this cluster ({JOBSET.api_version}); install it, or use flavor=job, "
    "which does not need it",
    **ABSENCES,
}
"""What is said if the cluster does not have a kind that a request needs."""


def submit(resources: Objects, request: Request, *, namespace: str, notify: Callable[[str], None]) -> str:
    """Create all objects of a request, or none.

    Creates the prerequisites first, then the parents, and then makes these their owners, so that they go with the last
    of them. After a failure or an interrupt, deletes the objects created so far, found by label.

    Args:
        resources: of the cluster.
        request: from `build_request`.
        namespace: of the objects.
        notify: called with each line that the user should see.

    Returns:
        The app's name.

    Raises:
        SchedulerError, EngineError: one line that says what to do.
    """
    with raise_dropped_interrupts():
        submission = _prepare(resources, request, namespace, notify)
    with ExitStack() as undo:
        undo.callback(_roll_back, resources, submission, notify)
        with raise_dropped_interrupts():
            _create_all(resources, submission)
        undo.pop_all()
    if request.has_several_jobs:
        notify(_SEVERAL_ROLES)
    return request.name


def _prepare(resources: Objects, request: Request, namespace: str, notify: Callable[[str], None]) -> "_Submission":
    """Check whether the cluster can run the request, and complete its documents. This changes nothing."""
    check_version(resources.read_version(), elastic=request.elastic, source="the server")
    for kind in (JOB, POD):  # or nothing created could be seen
        resources.list_app(kind, namespace, request.name)
    _check_kinds(resources, request)
    _check_queue(resources, request, namespace)
    submission_id = os.urandom(8).hex()
    additions = Additions(
        namespace=namespace,
        secret=make_secret(),
        submission_id=submission_id,
        pod_group_version=_find_pod_group_version(resources, request, namespace, notify),
    )
    documents = complete_documents(request, additions)
    if request.options.validate_spec:
        for document in documents:
            resources.create(document, dry_run=True)
    return _Submission(name=request.name, namespace=namespace, submission_id=submission_id, documents=documents)


@dataclass(kw_only=True)
class _Submission:
    """A submission in progress."""

    name: str
    namespace: str
    submission_id: str
    documents: Sequence[dict[str, Any]]
    attempted: list[dict[str, Any]] = field(default_factory=list)
    """Documents that this submission created or may have created: the server did not refuse them."""


def _create_all(resources: Objects, submission: _Submission) -> None:
    """Create all documents. What the Jobs share belongs to all of them: the cluster deletes it with the last one.

    No Job owns another: each can be deleted after its own end (`ttl_s`) while others run.
    """
    owners: list[dict[str, Any]] = []
    shared: list[dict[str, Any]] = []
    for document in submission.documents:
        is_owner = document["kind"] in PARENT_KINDS
        created = _create(resources, submission, document, needs_uid=is_owner)
        if is_owner:
            owner = {**document, "metadata": {**document["metadata"], "uid": created["metadata"]["uid"]}}
            owners.append(build_owner_reference(owner))
        else:
            shared.append(document)
    for document in shared:
        metadata = document["metadata"]
        change = {"metadata": {"ownerReferences": owners}}
        resources.patch(parse_kind(document), metadata["namespace"], metadata["name"], change)


def _create(
    resources: Objects, submission: _Submission, document: dict[str, Any], *, needs_uid: bool
) -> dict[str, Any]:
    """Create one document. Records it before the first request, whose response may be lost."""
    submission.attempted.append(document)
    try:
        return resources.create(document, needs_uid=needs_uid)
    except (ApiError, RequestError) as error:
        if not error.refusal.maybe_done:
            submission.attempted.pop()
        raise


def _roll_back(resources: Objects, submission: _Submission, notify: Callable[[str], None]) -> None:
    """Delete what this submission created, also where responses were lost. Reports errors, does not raise them."""
    kinds = list(dict.fromkeys(parse_kind(document) for document in reversed(submission.documents)))
    removed: set[Kind] = set()
    first: EngineError | SchedulerError | None = None
    for kind in kinds:
        error = _delete_own(resources, kind, submission)
        if error is None:
            removed.add(kind)
        first = first or error
        if isinstance(error, Unreachable):
            break  # each further kind would wait as long
    left = [document for document in submission.attempted if parse_kind(document) not in removed]
    if left:
        names = " ".join(f"{parse_kind(document).resource}/{document['metadata']['name']}" for document in left)
        command = f"kubectl -n {submission.namespace} delete {names}"
        notify(f"some created objects could not be removed ({first}); to remove them, run: {command}")


def _delete_own(resources: Objects, kind: Kind, submission: _Submission) -> EngineError | SchedulerError | None:
    """Delete this submission's objects of a kind. Returns the error, so that the caller goes on with other kinds."""
    try:
        for name in _list_own(resources, kind, submission):
            resources.delete(kind, submission.namespace, name)
    except (EngineError, SchedulerError) as error:
        return error
    return None


def _list_own(resources: Objects, kind: Kind, submission: _Submission) -> list[str]:
    """Return the names of this submission's objects of a kind.

    If it may not list the kind, return the names of the objects that it attempted to create.
    """
    try:
        items = resources.list_app(kind, submission.namespace, submission.name)
    except ForbiddenError:
        return [document["metadata"]["name"] for document in submission.attempted if parse_kind(document) == kind]
    return [
        item["metadata"]["name"]
        for item in items
        if item["metadata"].get("annotations", {}).get(SUBMISSION_ANNOTATION) == submission.submission_id
    ]


def _check_kinds(resources: Objects, request: Request) -> None:
    for kind in map(parse_kind, request.documents):
        if kind.kind in _ABSENCES and not resources.has_kind(kind):
            raise EngineError(_ABSENCES[kind.kind])


def _check_queue(resources: Objects, request: Request, namespace: str) -> None:
    options = request.options
    if options.resolved_gang == "kueue" and options.queue:
        versions = resources.list_group_versions("kueue.x-k8s.io")
        if not versions:
            has_volcano = bool(resources.list_group_versions(VOLCANO_GROUP))
            advice = "for a queue of Volcano give gang=volcano, too" if has_volcano else "install it or remove queue"
            raise EngineError(f"queue={options.queue}: Kueue is not installed in this cluster; {advice}")
        kind = Kind(api_version=versions[0], kind="LocalQueue")
        _check_queue_exists(resources, kind, namespace, options.queue, f"namespace {namespace!r} has no LocalQueue")
    elif options.resolved_gang == "volcano" and options.queue:
        _check_queue_exists(resources, VOLCANO_QUEUE, "", options.queue, "Volcano has no queue")


def _check_queue_exists(resources: Objects, kind: Kind, namespace: str, name: str, problem: str) -> None:
    """Refuse a queue that does not exist. An account that may not read queues: no check."""
    with contextlib.suppress(ForbiddenError):
        if resources.read(kind, namespace, name) is None:
            raise SchedulerError(f"{problem} {name!r}; {_describe_queues(resources, kind, namespace)}")


def _describe_queues(resources: Objects, kind: Kind, namespace: str) -> str:
    items, _ = resources.list_all(kind, namespace)
    names = sorted(item["metadata"]["name"] for item in items)
    return f"existing queues: {', '.join(names)}" if names else "there are no queues"


def _find_pod_group_version(
    resources: Objects, request: Request, namespace: str, notify: Callable[[str], None]
) -> str | None:
    """Find the cluster's version of PodGroup, if the account may create one (gang=auto without a queue)."""
    if not request.may_add_pod_group:
        return None
    problem = "no queue is given and the cluster has no PodGroups"
    for version in _list_pod_group_versions(resources):
        grouped = add_pod_group(request.documents, version, minimum=request.minimum, options=request.options)
        group = next(document for document in grouped if document["kind"] == "PodGroup")
        if _may_create(resources, {**group, "metadata": {**group["metadata"], "namespace": namespace}}):
            notify(f"pods start together: PodGroup of {version}")
            return version
        problem = f"this account is not allowed to create podgroups.{version.partition('/')[0]}"
    notify(
        f"{problem}: pods start one by one; without room for {request.minimum} pods, those that run wait and hold "
        "their nodes; -cfg queue=NAME (Kueue) starts all together"
    )
    return None


def _list_pod_group_versions(resources: Objects) -> Iterator[str]:
    """Yield the cluster's versions of PodGroup, Kubernetes' own first."""
    for group, versions in POD_GROUP_VERSIONS.items():
        if resources.list_group_versions(group):
            kinds = (Kind(api_version=version, kind="PodGroup") for version in versions)
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
        return True
    return True
