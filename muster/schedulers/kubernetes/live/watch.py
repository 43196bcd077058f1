"""The pods of one app, kept current by one watch for all log readers."""

import threading
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Final

from muster.schedulers.errors import EngineError, SchedulerError
from muster.schedulers.kubernetes.api.client import Clock, SystemClock
from muster.schedulers.kubernetes.api.errors import Unreachable
from muster.schedulers.kubernetes.api.objects import WatchEvent, WatchExpired
from muster.schedulers.kubernetes.kinds import POD
from muster.schedulers.kubernetes.labels import LABEL_INSTANCE
from muster.schedulers.kubernetes.live.app import App
from muster.schedulers.kubernetes.live.pod_status import PodFact, read_pod

_CHECK_S: Final = 2.0
"""How often readers check whether the app has ended."""

_RETRY_S: Final = 0.5
"""Between two attempts of a watch that breaks at once."""


class PodSnapshot:
    """The pods of an app at one moment, for a reader that does not wait."""

    def __init__(self, facts: Iterable[PodFact] = ()) -> None:
        self._facts = {fact.uid: fact for fact in facts}
        """By uid. It is replaced, never changed: any thread may look."""

    def find(self, role: str, index: int) -> list[PodFact]:
        """Return the pods of one node, oldest first: those that failed and their replacements."""
        found = (fact for fact in self._facts.values() if (fact.role, fact.index) == (role, index))
        return sorted(found, key=lambda fact: (fact.created, fact.name))

    def get(self, uid: str) -> PodFact | None:
        """Return one pod, or None once it is deleted."""
        return self._facts.get(uid)

    def wait(self) -> None:
        """Wait until a pod may have changed: here none does."""

    def has_app_ended(self) -> bool:
        """Return whether no pod will follow: here none does."""
        return True


class PodWatch(PodSnapshot):
    """Lists, then watches. On 410 it lists again. A context manager: the watch runs while a reader is inside.

    Args:
        app: whose.
        check_ended: reads from the cluster whether the app has ended.
        clock: monotonic time. Default: the machine's.
    """

    def __init__(self, app: App, *, check_ended: Callable[[], bool], clock: Clock | None = None) -> None:
        super().__init__()
        self._app = app
        self._labels = f"{LABEL_INSTANCE}={app.ref.name}"
        self._check_ended = check_ended
        self._clock: Clock = clock or SystemClock()
        self._ended = False
        self._checked_s: float | None = None
        self._changed = threading.Condition()
        self._is_listed = False
        self._readers = 0
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._checking = threading.Lock()
        self._idle = threading.Event()

    def __enter__(self) -> "PodWatch":  # noqa: PYI034 - typing.Self is Python 3.11's
        with self._changed:
            self._readers += 1
            self._idle.clear()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"pods-{self._app.ref.name}", daemon=True)
                self._is_listed = False
                self._error = None
                self._thread.start()
            self._changed.wait_for(lambda: self._is_listed or self._error is not None)
            if self._error is not None:
                self._readers -= 1
                raise self._error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._readers -= 1
            if self._readers == 0:
                self._idle.set()

    def wait(self) -> None:
        """Return when a pod has changed, or after `_CHECK_S` seconds.

        Raises:
            EngineError: the watch has failed.
        """
        with self._changed:
            self._changed.wait(_CHECK_S)
            if self._error is not None:
                raise self._error

    def has_app_ended(self) -> bool:
        """Return whether the app has ended, by a check of the last `_CHECK_S` seconds: pods change far more often.

        One reader at a time checks, the others get its last result.
        """
        if not self._ended and self._checking.acquire(blocking=False):
            try:
                now_s = self._clock.now_s()
                if self._checked_s is None or now_s - self._checked_s >= _CHECK_S:
                    self._checked_s = now_s
                    ended = self._check_ended()
                    if ended:
                        self._list()  # the watch may lag
                    self._ended = ended
            finally:
                self._checking.release()
        return self._ended

    # -- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        version = ""
        try:
            while not self._stop_if_idle():
                version = self._follow(version) if version else self._list()
        except Exception as error:  # noqa: BLE001  # also Unreachable: the client has retried; or a bug: readers wait
            with self._changed:
                self._error = error
                if not isinstance(error, (EngineError, SchedulerError)):
                    self._error = EngineError(f"cannot follow the pods of {self._app.ref.name}: {error!r}")
                    self._error.__cause__ = error
                self._thread = None
                self._changed.notify_all()

    def _stop_if_idle(self) -> bool:
        """Stop if no reader is inside: this thread ends, and the next reader starts another."""
        with self._changed:
            if self._idle.is_set():
                self._thread = None
            return self._idle.is_set()

    def _list(self) -> str:
        items, version = self._app.resources.list_all(POD, self._app.ref.namespace, labels=self._labels)
        facts = {fact.uid: fact for fact in map(read_pod, items)}
        with self._changed:
            self._facts = facts
            self._is_listed = True
            self._changed.notify_all()
        return version

    def _follow(self, version: str) -> str:
        """Watch until the server ends the watch or the connection breaks. Return the version reached, or "" to list."""
        first_version = version
        try:
            events = self._app.resources.watch(POD, self._app.ref.namespace, labels=self._labels, version=version)
            for event in events:
                if isinstance(event, WatchEvent):
                    self._apply(event.type, read_pod(event.item))
                else:
                    version = event
                if self._idle.is_set():
                    return version
        except WatchExpired:
            return ""
        except Unreachable:
            pass  # the caller's next request fails if the server is down
        if version == first_version:
            self._idle.wait(_RETRY_S)
        return version

    def _apply(self, change: str, fact: PodFact) -> None:
        with self._changed:
            known = self._facts.get(fact.uid)
            if change == "DELETED":
                self._facts = {uid: each for uid, each in self._facts.items() if uid != fact.uid}
            elif known is None or known.phase == "Pending" or fact.phase != "Pending":  # not older than a list
                self._facts = {**self._facts, fact.uid: fact}
            self._changed.notify_all()
