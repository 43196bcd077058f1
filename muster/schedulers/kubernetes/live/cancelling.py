"""Ends an app whatever its queue does, and keeps a record of it.

A deadline of 1 s ends a Job. Its pods get SIGTERM, and it stays with the pods that have ended. While a Job is
suspended, Kubernetes ignores its deadline, and a queue such as Kueue would start it later. Kueue also starts a JobSet
again that another program has suspended. So these are deleted, and what stands for them in the queue is deleted with
them. If nothing else of the app is left, a Job without pods keeps its record until the app is deleted.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from muster.schedulers.errors import EngineError
from muster.schedulers.kubernetes.api.client import Clock
from muster.schedulers.kubernetes.api.errors import ApiError, ForbiddenError, RequestError
from muster.schedulers.kubernetes.api.objects import Objects
from muster.schedulers.kubernetes.app_id import AppRef
from muster.schedulers.kubernetes.kinds import JOB, JOBSET, build_document, parse_kind
from muster.schedulers.kubernetes.labels import (
    APPDEF_ANNOTATION,
    BY_CANCEL,
    CANCEL_ANNOTATION,
    KUEUE_PRIORITY,
    KUEUE_QUEUE,
    LABEL_COMPONENT,
    SUBMITTED_ANNOTATION,
)
from muster.schedulers.kubernetes.live.operations import find_parents, is_cancelled, read_job_end
from muster.schedulers.kubernetes.names import CONTAINER

_STOP_JOB: Final = {"activeDeadlineSeconds": 1}

_LOOKS: Final = 20
_LOOK_S: Final = 0.1
"""How often `confirm_cancel` looks, and between two looks. The deadline itself takes up to 1 s."""


def cancel(resources: Objects, ref: AppRef, by: str = BY_CANCEL) -> None:
    """Stop an app with SIGTERM, then SIGKILL after the grace period. Its state is CANCELLED from then on.

    Jobs that have ended are left alone: an app that had failed before stays FAILED.

    Args:
        resources: of the cluster.
        ref: the app.
        by: the command that the status names.
    """
    parents = find_parents(resources, ref)
    marked = [_mark(resources, ref, parent, by) for parent in parents if read_job_end(parent) is None]
    queued = [parent for parent in marked if _is_queued(parent)]
    names = [parent["metadata"]["name"] for parent in queued]
    others = [parent for parent in parents if parent["metadata"]["name"] not in names]
    if queued:
        _remove(resources, ref, queued, by, keep_record=not others)
        if others and all(read_job_end(other) == "Complete" for other in others):  # or nothing would tell of the cancel
            _patch(resources, ref, others[0], {"metadata": {"annotations": {CANCEL_ANNOTATION: by}}})


def confirm_cancel(
    resources: Objects, ref: AppRef, clock: Clock, notify: Callable[[str], None], by: str = BY_CANCEL
) -> None:
    """Wait a moment for the Job controller, and cancel again if a queue has suspended a Job before it has ended it.

    Args:
        resources: of the cluster.
        ref: the app.
        clock: for the wait.
        notify: called with a line for the user if a Job has not ended by then.
        by: see `cancel`.
    """
    for _ in range(_LOOKS):
        jobs = [parent for parent in find_parents(resources, ref) if parse_kind(parent) == JOB]
        running = [job for job in jobs if read_job_end(job) is None]
        if any(map(_is_queued, running)):
            cancel(resources, ref, by)
        if not running:
            return
        clock.sleep(_LOOK_S)
    names = ", ".join(job["metadata"]["name"] for job in running)
    notify(f"the cancel is recorded, and {names} has not ended within {_LOOKS * _LOOK_S:.0f} s: see `torchx status`")


def stop_job(resources: Objects, ref: AppRef, job: Mapping[str, Any]) -> None:
    """Stop one Job of an app that is not cancelled: the Job fails, or is deleted if it waits in a queue.

    Args:
        resources: of the cluster.
        ref: the app.
        job: which. It is not the last one that the app has.
    """
    stopped = _patch(resources, ref, job, {"spec": _STOP_JOB})
    if _is_queued(stopped):
        resources.delete(JOB, ref.namespace, job["metadata"]["name"])


def _mark(resources: Objects, ref: AppRef, parent: Mapping[str, Any], by: str) -> dict[str, Any]:
    """Record the cancel, and end what can be ended in one request. Return a Job as it is after it.

    A JobSet that is deleted instead has no need of a mark: its record has it.
    """
    kind = parse_kind(parent)
    if kind == JOBSET and _is_queued(parent):
        return dict(parent)
    spec = _STOP_JOB if kind == JOB else {"suspend": True}
    change = {"metadata": {"annotations": {CANCEL_ANNOTATION: by}}, "spec": spec}
    marked = _patch(resources, ref, parent, change)
    return dict(parent) if kind == JOBSET else marked


def _patch(resources: Objects, ref: AppRef, parent: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    return resources.patch(parse_kind(parent), ref.namespace, parent["metadata"]["name"], change)


def _is_queued(parent: Mapping[str, Any]) -> bool:
    """Return whether something else decides when it runs, so that what `_mark` has done does not end it."""
    kind, suspended = parse_kind(parent), bool(parent["spec"].get("suspend"))
    if kind == JOBSET:
        in_queue = KUEUE_QUEUE in (parent["metadata"].get("labels") or {})
        return in_queue or (suspended and not is_cancelled(parent))
    return kind == JOB and suspended and read_job_end(parent) is None


def _remove(
    resources: Objects, ref: AppRef, parents: Sequence[Mapping[str, Any]], by: str, *, keep_record: bool
) -> None:
    """Create the record, and delete these. After an interruption in between `find_parents` finds both.

    Raises:
        RightError: the account may not delete them. Nothing was changed.
        EngineError: some are not deleted, or all are and the record could not be created.
    """
    record = _build_record(ref, parents[0], by) if keep_record else None
    refused = False
    if record is not None:
        try:
            _create_if_missing(resources, record)
        except (ApiError, RequestError):
            refused = True
    left = list(parents)
    try:
        while left:
            resources.delete(parse_kind(left[0]), ref.namespace, left[0]["metadata"]["name"])
            left.pop(0)
    except ForbiddenError as error:
        if record is not None and not refused and len(left) == len(parents):
            with suppress(ForbiddenError):
                resources.delete(JOB, ref.namespace, ref.name)  # or the app would read CANCELLED
        if parse_kind(left[0]) == JOBSET:
            raise
        names = ", ".join(parent["metadata"]["name"] for parent in left)
        raise EngineError(f"the cancel is recorded, and its queue may still start {names}: {error}") from error
    if record is not None and refused:  # now a quota has room
        try:
            resources.create(record)
        except (ApiError, RequestError) as error:
            raise EngineError(f"{ref.name} is cancelled and deleted, and no record of it is kept: {error}") from error


def _create_if_missing(resources: Objects, document: Mapping[str, Any]) -> None:
    try:
        resources.create(document)
    except RequestError as error:
        if error.refusal.reason != "AlreadyExists":
            raise


def _build_record(ref: AppRef, parent: Mapping[str, Any], by: str) -> dict[str, Any] | None:
    """Return a Job of no pods, which Kubernetes completes at once. Return None without an AppDef to keep.

    It has no label of a queue, and its name is that of no role's Job.
    """
    labels, annotations = (parent["metadata"].get(name) or {} for name in ("labels", "annotations"))
    if APPDEF_ANNOTATION not in annotations:
        return None
    queue = (KUEUE_QUEUE, KUEUE_PRIORITY, LABEL_COMPONENT)
    kept = {key: value for key, value in labels.items() if key not in queue}
    inner = parent["spec"] if parent["kind"] == JOB.kind else parent["spec"]["replicatedJobs"][0]["template"]["spec"]
    container = {"name": CONTAINER, "image": inner["template"]["spec"]["containers"][0]["image"]}
    spec: dict[str, Any] = {
        "parallelism": 0,
        "completions": 0,
        "template": {"spec": {"restartPolicy": "Never", "containers": [container]}},
    }
    if parent["spec"].get("ttlSecondsAfterFinished") is not None:
        spec["ttlSecondsAfterFinished"] = parent["spec"]["ttlSecondsAfterFinished"]
    metadata = {
        "name": ref.name,
        "namespace": ref.namespace,
        "labels": kept,
        "annotations": {
            APPDEF_ANNOTATION: annotations[APPDEF_ANNOTATION],
            CANCEL_ANNOTATION: by,
            SUBMITTED_ANNOTATION: str(parent["metadata"].get("creationTimestamp") or ""),
        },
    }
    return build_document(JOB, metadata, spec=spec)
