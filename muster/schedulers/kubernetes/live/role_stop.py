"""Flavour `job`: stops the other roles of an app that has failed, as long as the process that submitted it lives.

Each role is a Job of its own, and no controller of Kubernetes ends a Job because another one has failed. Owner
references act on deletion, which would take the record and the logs with it, and failure and success policies know the
pods of one Job only. A pod that watches the others needs an account with rights that users do not have by default. And
looking at an app must not change it. So the process that submitted the app does it: `torchx run --wait` or a pipeline.
With `flavor=jobset` the cluster does it by itself.
"""

import logging
import threading
from collections.abc import Callable
from typing import Final

from muster.schedulers.errors import EngineError, SchedulerError
from muster.schedulers.kubernetes.labels import read_role
from muster.schedulers.kubernetes.live.app import App, is_cancelled, read_job_end
from muster.schedulers.kubernetes.live.cancelling import stop_job
from muster.schedulers.kubernetes.live.kept_logs import stop_and_keep_logs
from muster.schedulers.kubernetes.live.pod_status import PodFact

_LOOK_S: Final = 2.0
"""Between two looks at the Jobs. Each look takes one request. A watch would need a further right."""

_CLOSE_LIMIT_S: Final = 10.0
"""How long a command that ends waits for a look in progress."""

logger = logging.getLogger(__name__)


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
        while not self._is_over and not self._closed.wait(_LOOK_S):
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
    failed = [job for job in jobs if read_job_end(job) == "Failed"]
    if not running or any(map(is_cancelled, jobs)):
        return True
    if not failed:
        return False
    roles = sorted(map(read_role, running))

    def stop() -> None:
        for job in running:
            stop_job(app, job)

    def list_pods() -> list[PodFact]:
        return [fact for fact in app.list_pods() if fact.role in roles]

    stop_and_keep_logs(app.resources.client, app.ref, list_pods, stop, notify)
    notify(
        f"{app.ref.name}: role {', '.join(sorted(map(read_role, failed)))} has failed: stopped role {', '.join(roles)}"
    )
    return True
