"""Ends an app whatever its queue does, and keeps a record of it.

A deadline of 1 s ends a Job. Its pods get SIGTERM, and it stays with the pods that have ended. While a Job is
suspended, Kubernetes ignores its deadline, and a queue such as Kueue would start it later. Kueue also starts a JobSet
again that another program has suspended. So these are deleted, and what stands for them in the queue is deleted with
them. If nothing else of the app is left, a Job without pods keeps its record until the app is deleted.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from muster.schedulers.errors import EngineError
from muster.schedulers.kubernetes.api.client import Clock
from muster.schedulers.kubernetes.api.errors import ApiError, ForbiddenError, RequestError
from muster.schedulers.kubernetes.app_id import AppRef
from muster.schedulers.kubernetes.kinds import JOB, JOBSET, build_document, parse_kind
from muster.schedulers.kubernetes.labels import (
    APPDEF_ANNOTATION,
    CANCEL_ANNOTATION,
    KUEUE_PRIORITY,
    KUEUE_QUEUE,
    LABEL_COMPONENT,
    SUBMITTED_ANNOTATION,
)
from muster.schedulers.kubernetes.live.app import App, is_cancelled, is_suspended, read_job_end
from muster.schedulers.kubernetes.live.kept_logs import stop_and_keep_logs
from muster.schedulers.kubernetes.names import CONTAINER

_STOP_JOB: Final = {"activeDeadlineSeconds": 1}

_LOOKS: Final = 20
_LOOK_S: Final = 0.1
"""How often `_confirm` looks, and between two looks. The deadline itself takes up to 1 s."""


def cancel(app: App, by: str, clock: Clock, notify: Callable[[str], None]) -> None:
    """Stop an app with SIGTERM, then SIGKILL after the grace period. Its state is CANCELLED from then on.

    What its pods have written is kept. Jobs that have ended are left alone: an app that had failed before stays FAILED.

    Args:
        app: which.
        by: the command that the status names.
        clock: for the wait for the Job controller.
        notify: called with each line for the user.
    """
    if any(read_job_end(parent) is None for parent in app.find_parents()):
        stop_and_keep_logs(app.resources.client, app.ref, app.list_pods, lambda: _stop(app, by), notify)
        _confirm(app, by, clock, notify)


def _stop(app: App, by: str) -> None:
    parents = app.find_parents()
    marked = [_mark(app, parent, by) for parent in parents if read_job_end(parent) is None]
    queued = [parent for parent in marked if _is_queued(parent)]
    names = [parent["metadata"]["name"] for parent in queued]
    others = [parent for parent in parents if parent["metadata"]["name"] not in names]
    if queued:
        _remove(app, queued, by, keep_record=not others)
        if others and all(read_job_end(other) == "Complete" for other in others):  # or nothing would tell of the cancel
            app.patch(others[0], {"metadata": {"annotations": {CANCEL_ANNOTATION: by}}})


def _confirm(app: App, by: str, clock: Clock, notify: Callable[[str], None]) -> None:
    """Wait a moment for the Job controller, and cancel again if a queue has suspended a Job before it has ended it."""
    for _ in range(_LOOKS):
        running = [job for job in app.find_parents() if parse_kind(job) == JOB and read_job_end(job) is None]
        if any(map(_is_queued, running)):
            _stop(app, by)
        if not running:
            return
        clock.sleep(_LOOK_S)
    names = ", ".join(job["metadata"]["name"] for job in running)
    notify(f"the cancel is recorded, and {names} has not ended within {_LOOKS * _LOOK_S:.0f} s: see `torchx status`")


def stop_job(app: App, job: Mapping[str, Any]) -> None:
    """Stop one Job of an app that is not cancelled: the Job fails, or is deleted if it waits in a queue.

    Args:
        app: it has other Jobs.
        job: which.
    """
    if _is_queued(app.patch(job, {"spec": _STOP_JOB})):
        app.delete(job)


def _mark(app: App, parent: Mapping[str, Any], by: str) -> Mapping[str, Any]:
    """Record the cancel, and end what can be ended in one request. Return a Job as it is after it.

    A JobSet that is deleted instead has no need of a mark: its record has it.
    """
    is_job = parse_kind(parent) == JOB
    if not is_job and _is_queued(parent):
        return parent
    spec = _STOP_JOB if is_job else {"suspend": True}
    marked = app.patch(parent, {"metadata": {"annotations": {CANCEL_ANNOTATION: by}}, "spec": spec})
    return marked if is_job else parent


def _is_queued(parent: Mapping[str, Any]) -> bool:
    """Return whether something else decides when it runs, so that what `_mark` has done does not end it."""
    if parse_kind(parent) == JOBSET:
        in_queue = KUEUE_QUEUE in (parent["metadata"].get("labels") or {})
        return in_queue or (is_suspended(parent) and not is_cancelled(parent))
    return is_suspended(parent) and read_job_end(parent) is None


def _remove(app: App, parents: Sequence[Mapping[str, Any]], by: str, *, keep_record: bool) -> None:
    """Delete these, and keep a record: after them, so that it never stands beside what still runs.

    Raises:
        RightError: the account may not delete a JobSet. Nothing was changed.
        EngineError: some are not deleted, or all are and the record could not be created.
    """
    left = list(parents)
    try:
        while left:
            app.delete(left[0])
            left.pop(0)
    except ForbiddenError as error:
        if parse_kind(left[0]) == JOBSET:
            raise
        names = ", ".join(parent["metadata"]["name"] for parent in left)
        raise EngineError(f"the cancel is recorded, and its queue may still start {names}: {error}") from error
    record = _build_record(app.ref, parents[0], by) if keep_record else None
    if record is None:
        return
    try:
        app.resources.create(record)
    except (ApiError, RequestError) as error:
        if error.refusal.reason != "AlreadyExists":  # another shell has cancelled it, too
            line = f"{app.ref.name} is cancelled and deleted, and no record of it is kept: {error}"
            raise EngineError(line) from error


def _build_record(ref: AppRef, parent: Mapping[str, Any], by: str) -> dict[str, Any] | None:
    """Return a Job of no pods, which Kubernetes completes at once. Return None without an AppDef to keep.

    It has no label of a queue, and its name is that of no role's Job.
    """
    labels, annotations = (parent["metadata"].get(name) or {} for name in ("labels", "annotations"))
    if APPDEF_ANNOTATION not in annotations:
        return None
    queue = (KUEUE_QUEUE, KUEUE_PRIORITY, LABEL_COMPONENT)
    kept = {key: value for key, value in labels.items() if key not in queue}
    inner = parent["spec"] if parse_kind(parent) == JOB else parent["spec"]["replicatedJobs"][0]["template"]["spec"]
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
