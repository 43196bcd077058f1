"""Creates an app's objects: checks first, then all or nothing."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Final

from muster.schedulers.errors import EngineError, SchedulerError
from muster.schedulers.kubernetes.api.errors import ApiError, RequestError, Unreachable
from muster.schedulers.kubernetes.api.objects import SUBMISSION_ANNOTATION, Kind, Objects, kind_of
from muster.schedulers.kubernetes.labels import LABEL_INSTANCE
from muster.schedulers.kubernetes.manifests.pod_group import (
    NATIVE_GROUP,
    NATIVE_VERSIONS,
    VOLCANO_GROUP,
    VOLCANO_VERSION,
    add_pod_group,
)
from muster.schedulers.kubernetes.manifests.request import PARENT_KINDS, Request, with_token
from muster.schedulers.kubernetes.schema import check_version
from muster.schedulers.naming import make_secret

_FLAVOR_KINDS: Final = {
    "jobset": ("jobset.x-k8s.io/v1alpha2", "jobsets", "JobSet is not installed in this cluster"),
    "volcano": ("batch.volcano.sh/v1alpha1", "jobs", "Volcano is not installed in this cluster"),
}


_SEVERAL_ROLES: Final = (
    "each role is a Job of its own: when one fails, the others are stopped by whoever looks next (torchx status, or a "
    "followed log); with flavor=jobset the cluster itself does it"
)


def submit(resources: Objects, request: Request, *, namespace: str, say: Callable[[str], None]) -> str:
    """Creates everything of a request, or nothing.

    Supplies come first, then the parent; what came first is then handed to the parent, so that deleting it deletes
    all. What fails halfway, an interrupt included, is taken back by label.

    Args:
        resources: of the cluster.
        request: from `build_request`.
        namespace: where.
        say: told what the user may want to know, a line at a time.

    Returns:
        The app's name.

    Raises:
        SchedulerError, EngineError: one line that says what to do.
    """
    check_version(resources.read_version(), elastic=request.elastic, source="the server")
    _check_flavor(resources, request)
    _check_queue(resources, request, namespace)
    documents = _choose_gang(resources, request, with_token(request, make_secret(), namespace), say)
    mark = os.urandom(8).hex()
    for document in documents:
        document["metadata"].setdefault("annotations", {})[SUBMISSION_ANNOTATION] = mark
    if request.options.validate_spec:
        for document in documents:
            resources.create(document, dry_run=True)
    attempt = _Attempt(name=request.name, namespace=namespace, mark=mark, documents=documents)
    with ExitStack() as undo:
        undo.callback(_roll_back, resources, attempt, say)
        _create_all(resources, attempt)
        undo.pop_all()
    if [document["kind"] for document in documents].count("Job") > 1 and request.options.flavor == "job":
        say(_SEVERAL_ROLES)
    return request.name


@dataclass(kw_only=True)
class _Attempt:
    """One submission under way."""

    name: str
    namespace: str
    mark: str
    documents: Sequence[dict[str, Any]]
    begun: list[dict[str, Any]] = field(default_factory=list)
    """Those of the documents that exist and are ours, or may: their creation was begun and not refused."""


def _create_all(resources: Objects, attempt: _Attempt) -> None:
    documents = attempt.documents
    owner: dict[str, Any] | None = None
    supplies: list[dict[str, Any]] = []
    for document in documents:
        if owner is not None:
            document["metadata"]["ownerReferences"] = [build_owner_reference(owner)]
        is_parent = owner is None and document["kind"] in PARENT_KINDS
        created = _create(resources, attempt, document, needs_uid=is_parent)
        if is_parent:
            owner = {**document, "metadata": {**document["metadata"], "uid": created["metadata"]["uid"]}}
        elif owner is None:
            supplies.append(document)
    if owner is None:
        return
    change = {"metadata": {"ownerReferences": [build_owner_reference(owner)]}}
    for document in supplies:
        metadata = document["metadata"]
        resources.patch(kind_of(document), metadata["namespace"], metadata["name"], change)


def _create(resources: Objects, attempt: _Attempt, document: dict[str, Any], *, needs_uid: bool) -> dict[str, Any]:
    """Creates one document. It is to be taken back from before the first attempt on, whose answer may be lost."""
    attempt.begun.append(document)
    try:
        return resources.create(document, needs_uid=needs_uid)
    except (ApiError, RequestError) as fault:
        if not fault.refusal.maybe_done:
            attempt.begun.pop()
        raise


def build_owner_reference(owner: Mapping[str, Any]) -> dict[str, Any]:
    """A reference that makes garbage collection follow the owner. Does not block: that needs a right of its own."""
    metadata = owner["metadata"]
    return {
        "apiVersion": owner["apiVersion"],
        "kind": owner["kind"],
        "name": metadata["name"],
        "uid": metadata["uid"],
        "controller": False,
        "blockOwnerDeletion": False,
    }


def _roll_back(resources: Objects, attempt: _Attempt, say: Callable[[str], None]) -> None:
    """Deletes what this submission created, also what it does not know to exist. What went wrong is told elsewhere."""
    kinds = list(dict.fromkeys(kind_of(document) for document in reversed(attempt.documents)))
    errors: list[EngineError | SchedulerError] = []
    for kind in kinds:
        error = _delete_own(resources, kind, attempt)
        errors += [error] if error is not None else []
        if isinstance(error, Unreachable):
            break  # each further kind would only wait as long again
    if errors:
        names = ",".join(kind.kind.lower() for kind in kinds)
        by_hand = f"kubectl -n {attempt.namespace} delete {names} -l {LABEL_INSTANCE}={attempt.name}"
        say(f"what was created could not all be taken back ({errors[0]}); to do so: {by_hand}")


def _delete_own(resources: Objects, kind: Kind, attempt: _Attempt) -> EngineError | SchedulerError | None:
    """Deletes this submission's objects of a kind. What fails is returned: it must not keep the other kinds."""
    try:
        for name in _find_own(resources, kind, attempt):
            resources.delete(kind, attempt.namespace, name)
    except (EngineError, SchedulerError) as error:
        return error
    return None


def _find_own(resources: Objects, kind: Kind, attempt: _Attempt) -> list[str]:
    """Names of the objects of a kind that bear this submission's mark; those begun, where listing is forbidden."""
    try:
        items, _ = resources.list_all(kind, attempt.namespace, labels=f"{LABEL_INSTANCE}={attempt.name}")
    except ApiError as fault:
        if fault.refusal.status != 403:
            raise
        return [document["metadata"]["name"] for document in attempt.begun if kind_of(document) == kind]
    return [
        item["metadata"]["name"]
        for item in items
        if item["metadata"].get("annotations", {}).get(SUBMISSION_ANNOTATION) == attempt.mark
    ]


def _check_flavor(resources: Objects, request: Request) -> None:
    needed = _FLAVOR_KINDS.get(request.options.flavor)
    if needed and not resources.has_kind(needed[0], needed[1]):
        raise EngineError(f"{needed[2]} ({needed[0]}); install it, or use flavor=job, which needs nothing installed")


def _check_queue(resources: Objects, request: Request, namespace: str) -> None:
    options = request.options
    if options.resolved_gang == "kueue" and options.queue:
        versions = resources.find_group("kueue.x-k8s.io")
        if not versions:
            raise EngineError(
                f"queue={options.queue}: Kueue is not installed in this cluster; leave queue out, or install it"
            )
        kind = Kind(api_version=versions[0], kind="LocalQueue")
        _expect_queue(resources, kind, namespace, options.queue, f"namespace {namespace!r} has no LocalQueue")
    elif options.resolved_gang == "volcano" and options.queue:
        kind = Kind(api_version="scheduling.volcano.sh/v1beta1", kind="Queue", namespaced=False)
        _expect_queue(resources, kind, "", options.queue, "Volcano has no queue")


def _expect_queue(resources: Objects, kind: Kind, namespace: str, name: str, lack: str) -> None:
    """Refuses a queue that is not there; who may not look has to trust the name."""
    try:
        if resources.read(kind, namespace, name) is None:
            raise SchedulerError(f"{lack} {name!r}; {_name_queues(resources, kind, namespace)}")
    except ApiError as fault:
        if fault.refusal.status != 403:
            raise


def _name_queues(resources: Objects, kind: Kind, namespace: str) -> str:
    items, _ = resources.list_all(kind, namespace)
    names = sorted(item["metadata"]["name"] for item in items)
    return f"there are: {', '.join(names)}" if names else "there is none"


def _choose_gang(
    resources: Objects, request: Request, documents: list[dict[str, Any]], say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """gang=auto without a queue: what the cluster offers and the account may use. One pod needs no gang."""
    if request.options.flavor != "job" or request.options.resolved_gang != "auto" or request.minimum < 2:
        return documents
    why = "this cluster schedules no gangs (no Kueue queue given, no PodGroups)"
    for version in _list_gangs(resources):
        grouped = add_pod_group(documents, api_version=version, minimum=request.minimum)
        if _may_create(resources, next(document for document in grouped if document["kind"] == "PodGroup")):
            say(f"pods start together: PodGroup of {version}")
            return grouped
        why = f"this account may not create podgroups.{version.partition('/')[0]}"
    say(f"{why}: pods start one by one, as room allows")
    return documents


def _list_gangs(resources: Objects) -> Iterator[str]:
    """Versions of PodGroup that the cluster has, Kubernetes' own first."""
    for group, versions in ((NATIVE_GROUP, NATIVE_VERSIONS), (VOLCANO_GROUP, (VOLCANO_VERSION,))):
        if resources.find_group(group):
            version = next((version for version in versions if resources.has_kind(version, "podgroups")), None)
            if version is not None:
                yield version


def _may_create(resources: Objects, document: Mapping[str, Any]) -> bool:
    """Whether the account has the right; what else may be wrong with the document is found when it is created."""
    try:
        resources.create(document, dry_run=True)
    except ApiError as fault:
        return fault.refusal.status != 403
    except RequestError:
        return True
    return True
