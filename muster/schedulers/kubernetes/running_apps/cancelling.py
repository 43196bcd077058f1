"""Ends an app whatever its queue does, and keeps a record of it.

A deadline of 1 s ends a Job. Its pods get SIGTERM, and it stays with the pods that have ended. While a Job is
suspended, Kubernetes ignores its deadline, and a queue such as Kueue would start it later. Kueue also starts a JobSet
again that another program has suspended. So these are deleted, and what stands for them in the queue is deleted with
them. If nothing else of the app is left, a Job without pods keeps its record until the app is deleted.

`RoleStop` stops the other roles of an app of flavour `job` that has failed, and those that serve one that has ended, as
long as the process that submitted it lives. Each role is a Job of its own, and no controller of Kubernetes ends a Job
because another one has. Owner references act on deletion, which would take the record and the logs with it, and failure
and success policies know the pods of one Job only. A pod that watches the others needs an account with rights that
users do not have by default. And looking at an app must not change it. So the process that submitted the app does it:
`torchx run --wait` or a pipeline. With `flavor=jobset` the cluster does it by itself.
"""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from muster.schedulers.errors import EngineError, SchedulerError
from muster.schedulers.kubernetes import kube
from muster.schedulers.kubernetes.api.client import Clock
from muster.schedulers.kubernetes.api.errors import ApiError, ForbiddenError, RequestError
from muster.schedulers.kubernetes.manifests.bundles import decode_roles
from muster.schedulers.kubernetes.running_apps.app import (
    App,
    AppRef,
    is_cancelled,
    is_extra,
    is_suspended,
    read_job_end,
)
from muster.schedulers.kubernetes.running_apps.logs import stop_and_keep_logs
from muster.schedulers.kubernetes.running_apps.pod_status import PodFact
from muster.schedulers.runner.roles import read_policy

_STOP_JOB: Final = {"activeDeadlineSeconds": 1}

_LOOKS: Final = 20
_LOOK_S: Final = 0.1
"""How often `_confirm` looks, and between two looks. The deadline itself takes up to 1 s."""

_ROLES_LOOK_S: Final = 2.0
"""Between two looks at the Jobs. Each look takes one request. A watch would need a further right."""

_CLOSE_LIMIT_S: Final = 10.0
"""How long a command that ends waits for a look in progress."""

logger = logging.getLogger(__name__)


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
        stop_and_keep_logs(app, app.list_pods, lambda: _stop(app, by), notify)
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
            app.patch(others[0], {"metadata": {"annotations": {kube.CANCEL_ANNOTATION: by}}})


def _confirm(app: App, by: str, clock: Clock, notify: Callable[[str], None]) -> None:
    """Wait a moment for the Job controller, and cancel again if a queue has suspended a Job before it has ended it."""
    for _ in range(_LOOKS):
        running = [job for job in app.find_parents() if kube.parse_kind(job) == kube.JOB and read_job_end(job) is None]
        if any(map(_is_queued, running)):
            _stop(app, by)
        if not running:
            return
        clock.sleep(_LOOK_S)
    names = ", ".join(job["metadata"]["name"] for job in running)
    notify(f"the cancel is recorded, and {names} has not ended within {_LOOKS * _LOOK_S:.0f} s: see `torchx status`")


def _mark(app: App, parent: Mapping[str, Any], by: str) -> Mapping[str, Any]:
    """Record the cancel, and end what can be ended in one request. Return a Job as it is after it.

    A JobSet that is deleted instead has no need of a mark: its record has it.
    """
    is_job = kube.parse_kind(parent) == kube.JOB
    if not is_job and _is_queued(parent):
        return parent
    spec = _STOP_JOB if is_job else {"suspend": True}
    marked = app.patch(parent, {"metadata": {"annotations": {kube.CANCEL_ANNOTATION: by}}, "spec": spec})
    return marked if is_job else parent


def _is_queued(parent: Mapping[str, Any]) -> bool:
    """Return whether something else decides when it runs, so that what `_mark` has done does not end it."""
    if kube.parse_kind(parent) == kube.JOBSET:
        in_queue = kube.KUEUE_QUEUE in (parent["metadata"].get("labels") or {})
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
        if kube.parse_kind(left[0]) == kube.JOBSET:
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
    if kube.APPDEF_ANNOTATION not in annotations:
        return None
    queue = (kube.KUEUE_QUEUE, kube.KUEUE_PRIORITY, kube.LABEL_COMPONENT)
    kept = {key: value for key, value in labels.items() if key not in queue}
    inner = (
        parent["spec"]
        if kube.parse_kind(parent) == kube.JOB
        else parent["spec"]["replicatedJobs"][0]["template"]["spec"]
    )
    container = {"name": kube.CONTAINER, "image": inner["template"]["spec"]["containers"][0]["image"]}
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
            kube.APPDEF_ANNOTATION: annotations[kube.APPDEF_ANNOTATION],
            kube.CANCEL_ANNOTATION: by,
            kube.SUBMITTED_ANNOTATION: str(parent["metadata"].get("creationTimestamp") or ""),
        },
    }
    return kube.build_document(kube.JOB, metadata, spec=spec)


# -- the other roles of an app that has failed -------------------------------------------------------------------------


class RoleStop:
    """Follows one app in a thread until all its Jobs have ended. Close it before the process ends.

    Args:
        app: it has several Jobs.
        notify: called with the line for the user.
    """

    def __init__(self, app: App, *, notify: Callable[[str], None]) -> None:
        self._app = app
        self._notify = notify
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._is_over = False
        self._is_reachable = True
        threading.Thread(target=self._follow, name=f"muster-role-stop-{app.ref.name}", daemon=True).start()

    def close(self) -> None:
        """Look a last time: a command that ends because a role has failed must not leave the others. Idempotent."""
        if self._closed.is_set():
            return
        self._closed.set()
        # It would hold up the command's end.
        if self._is_reachable and self._lock.acquire(timeout=_CLOSE_LIMIT_S):
            try:
                self._look()
            finally:
                self._lock.release()

    def _follow(self) -> None:
        while not self._is_over and not self._closed.wait(_ROLES_LOOK_S):
            with self._lock:
                self._look()

    def _look(self) -> None:
        if self._is_over:
            return
        try:
            self._is_over = _stop_other_roles(self._app, self._notify)
            self._is_reachable = True
        except (EngineError, SchedulerError) as error:
            self._is_reachable = False
            logger.debug("%s: %s", self._app.ref.name, error)


def _stop_other_roles(app: App, notify: Callable[[str], None]) -> bool:
    """Stop the Jobs that run if one has failed, and keep what their pods have written.

    Returns:
        Whether there is nothing more to do: all have ended or are stopped, or the app was cancelled or deleted.

    Raises:
        EngineError, SchedulerError: the server does not answer, or refuses.
    """
    jobs = app.find_parents()
    running = [job for job in jobs if read_job_end(job) is None]
    failed = [job for job in jobs if read_job_end(job) == "Failed" and not is_extra(job)]
    if not running or any(map(is_cancelled, jobs)):
        return True
    if failed:
        _stop_jobs(app, running, {}, notify)
        names = ", ".join(sorted(map(kube.read_role, failed)))
        roles = ", ".join(sorted(map(kube.read_role, running)))
        notify(f"{app.ref.name}: role {names} has failed: stopped role {roles}")
        return True
    served = _find_served(jobs)
    ended = {kube.read_role(job) for job in jobs if read_job_end(job) is not None}
    for job in running:
        other = served.get(kube.read_role(job))
        if other in ended and kube.SERVED_ANNOTATION not in (job["metadata"].get("annotations") or {}):
            _stop_jobs(app, [job], {kube.SERVED_ANNOTATION: other}, notify)
    return False


def _find_served(jobs: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return which role each role serves that serves one, by their labels."""
    roles = decode_roles(jobs[0])
    labels = {role.name: label for label, role in roles.items()}
    served = {label: read_policy(role).ends_with for label, role in roles.items()}
    return {label: labels[name] for label, name in served.items() if name}


def _stop_jobs(
    app: App, jobs: Sequence[Mapping[str, Any]], annotations: Mapping[str, str], notify: Callable[[str], None]
) -> None:
    """Stop Jobs that run, and keep what their pods have written."""
    roles = set(map(kube.read_role, jobs))

    def stop() -> None:
        for job in jobs:
            stopped = app.patch(job, {"metadata": {"annotations": annotations}, "spec": _STOP_JOB})
            if _is_queued(stopped) and not annotations:  # they would say that it is over
                app.delete(job)

    def list_pods() -> list[PodFact]:
        return [fact for fact in app.list_pods() if fact.role in roles]

    stop_and_keep_logs(app, list_pods, stop, notify)
