"""Creates an app's objects: checks first, then all or nothing."""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Final

from muster.schedulers.errors import EngineError, SchedulerError
from muster.schedulers.kubernetes.gang import (
    NATIVE_GROUP,
    NATIVE_VERSIONS,
    VOLCANO_GROUP,
    VOLCANO_VERSION,
    add_pod_group,
)
from muster.schedulers.kubernetes.pod import LABEL_INSTANCE
from muster.schedulers.kubernetes.request import PARENT_KINDS, Request, with_token
from muster.schedulers.kubernetes.resources import SUBMISSION_ANNOTATION, Kind, Resources, kind_of
from muster.schedulers.kubernetes.schema import check_version
from muster.schedulers.naming import make_secret

_FLAVOR_KINDS: Final = {
    "jobset": ("jobset.x-k8s.io/v1alpha2", "jobsets", "JobSet is not installed in this cluster"),
    "volcano": ("batch.volcano.sh/v1alpha1", "jobs", "Volcano is not installed in this cluster"),
}


def submit(resources: Resources, request: Request, *, namespace: str, say: Callable[[str], None]) -> str:
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
    with ExitStack() as undo:
        undo.callback(_roll_back, resources, documents, request.name, namespace, mark)
        _create_all(resources, documents)
        undo.pop_all()
    return request.name


def _create_all(resources: Resources, documents: Sequence[dict[str, Any]]) -> None:
    owner: dict[str, Any] | None = None
    supplies: list[dict[str, Any]] = []
    for document in documents:
        if owner is not None:
            document["metadata"]["ownerReferences"] = [build_owner_reference(owner)]
        created = resources.create(document)
        if owner is None and document["kind"] in PARENT_KINDS:
            owner = {**document, "metadata": {**document["metadata"], "uid": created["metadata"]["uid"]}}
        elif owner is None:
            supplies.append(document)
    if owner is None:
        return
    change = {"metadata": {"ownerReferences": [build_owner_reference(owner)]}}
    for document in supplies:
        metadata = document["metadata"]
        resources.patch(kind_of(document), metadata["namespace"], metadata["name"], change)


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


def _roll_back(
    resources: Resources, documents: Sequence[Mapping[str, Any]], name: str, namespace: str, mark: str
) -> None:
    """Deletes what this submission created, also what it does not know to exist: found by label and mark."""
    kinds: list[Kind] = []
    for document in reversed(documents):
        if kind_of(document) not in kinds:
            kinds.append(kind_of(document))
    for kind in kinds:
        items, _ = resources.list_all(kind, namespace, labels=f"{LABEL_INSTANCE}={name}")
        for item in items:
            if item["metadata"].get("annotations", {}).get(SUBMISSION_ANNOTATION) == mark:
                resources.delete(kind, namespace, item["metadata"]["name"])


def _check_flavor(resources: Resources, request: Request) -> None:
    needed = _FLAVOR_KINDS.get(request.options.flavor)
    if needed and not resources.has_kind(needed[0], needed[1]):
        raise EngineError(f"{needed[2]} ({needed[0]}); install it, or use flavor=job, which needs nothing installed")


def _check_queue(resources: Resources, request: Request, namespace: str) -> None:
    options = request.options
    if options.resolved_gang == "kueue" and options.queue:
        versions = resources.find_group("kueue.x-k8s.io")
        if not versions:
            raise EngineError(
                f"queue={options.queue}: Kueue is not installed in this cluster; leave queue out, or install it"
            )
        kind = Kind(api_version=versions[0], kind="LocalQueue")
        if resources.read(kind, namespace, options.queue) is None:
            there = _name_queues(resources, kind, namespace)
            raise SchedulerError(f"namespace {namespace!r} has no LocalQueue {options.queue!r}; {there}")
    elif options.resolved_gang == "volcano" and options.queue:
        kind = Kind(api_version="scheduling.volcano.sh/v1beta1", kind="Queue", namespaced=False)
        if resources.read(kind, "", options.queue) is None:
            raise SchedulerError(f"Volcano has no queue {options.queue!r}; {_name_queues(resources, kind, '')}")


def _name_queues(resources: Resources, kind: Kind, namespace: str) -> str:
    items, _ = resources.list_all(kind, namespace)
    names = sorted(item["metadata"]["name"] for item in items)
    return f"there are: {', '.join(names)}" if names else "there is none"


def _choose_gang(
    resources: Resources, request: Request, documents: list[dict[str, Any]], say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """gang=auto without a queue: what the cluster offers. One pod needs no gang."""
    if request.options.flavor != "job" or request.options.resolved_gang != "auto" or request.minimum < 2:
        return documents
    if resources.find_group(NATIVE_GROUP):
        for version in NATIVE_VERSIONS:
            if resources.has_kind(version, "podgroups"):
                say(f"pods start together: PodGroup of {version}")
                return add_pod_group(documents, api_version=version, minimum=request.minimum)
    if resources.find_group(VOLCANO_GROUP) and resources.has_kind(VOLCANO_VERSION, "podgroups"):
        say("pods start together: Volcano's PodGroup")
        return add_pod_group(documents, api_version=VOLCANO_VERSION, minimum=request.minimum)
    say("this cluster schedules no gangs (no Kueue queue given, no PodGroups): pods start one by one, as room allows")
    return documents
