"""The pods of one app, kept current by one watch for all log readers."""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Final

from muster.schedulers.errors import EngineError, SchedulerError
from muster.schedulers.kubernetes.api.client import Clock, SystemClock
from muster.schedulers.kubernetes.api.objects import Objects, WatchEvent, WatchExpired
from muster.schedulers.kubernetes.app_id import AppRef
from muster.schedulers.kubernetes.kinds import POD
from muster.schedulers.kubernetes.labels import LABEL_INSTANCE
from muster.schedulers.kubernetes.live.pod_status import PodFact, read_pod

_CHECK_S: Final = 2.0
"""How often readers check whether the app has ended."""

_RETRY_S: Final = 0.5
"""Between two attempts of a watch that breaks at once."""


class PodSnapshot:
    """The pods of an app at one moment, for a reader that does not wait."""

    def __init__(self, facts: Sequence[PodFact]) -> None:
        self._facts = facts

    def find(self, role: str, index: int) -> list[PodFact]:
        """Return the pods of one node, oldest first."""
        return sort_pods(fact for fact in self._facts if (fact.role, fact.index) == (role, index))

    def get(self, uid: str) -> PodFact | None:
        """Return one pod, or None."""
        return next((fact for fact in self._facts if fact.uid == uid), None)

    def wait(self) -> None:
        """Return at once: nothing changes."""

    def has_app_ended(self) -> bool:
        """Return True: no pod will follow."""
        return True


def sort_pods(facts: Iterable[PodFact]) -> list[PodFact]:
    """Return the pods, oldest first."""
    return sorted(facts, key=lambda fact: (fact.created, fact.name))


class PodWatch:
    """Lists, then watches. On 410 it lists again. A context manager: the watch runs while a reader is inside.

    Args:
        resources: of the cluster.
        ref: the app.
        check_ended: reads from the cluster whether the app has ended.
        clock: monotonic time. Default: the machine's.
    """

    def __init__(
        self,
        resources: Objects,
        ref: AppRef,
        *,
        check_ended: Callable[[], bool],
        clock: Clock | None = None,
    ) -> None:
        self._resources = resources
        self._ref = ref
        self._check_ended = check_ended
        self._clock: Clock = clock or SystemClock()
        self._ended = False
        self._checked_s: float | None = None
        self._changed = threading.Condition()
        self._facts: dict[str, PodFact] = {}
        self._version: str | None = None
        self._readers = 0
        self._thread: threading.Thread | None = None
        self._error: EngineError | SchedulerError | None = None
        self._checking = threading.Lock()
        self._idle = threading.Event()

    def __enter__(self) -> "PodWatch":  # noqa: PYI034 - typing.Self is Python 3.11's
        with self._changed:
            self._readers += 1
            self._idle.clear()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"pods-{self._ref.name}", daemon=True)
                self._version = None
                self._error = None
                self._thread.start()
            self._wait_for_list()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._readers -= 1
            if self._readers == 0:
                self._idle.set()

    def _wait_for_list(self) -> None:
        self._changed.wait_for(lambda: self._version is not None or self._error is not None)
        if self._error is not None:
            self._readers -= 1
            raise self._error

    def find(self, role: str, index: int) -> list[PodFact]:
        """Return the pods of one node, oldest first: those that failed and their replacements."""
        with self._changed:
            return sort_pods(fact for fact in self._facts.values() if (fact.role, fact.index) == (role, index))

    def get(self, uid: str) -> PodFact | None:
        """Return one pod, or None once it is deleted."""
        with self._changed:
            return self._facts.get(uid)

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
        try:
            version = ""
            while not self._stop_if_idle():
                version = self._watch_once(version)
        except (EngineError, SchedulerError) as error:  # also Unreachable: the client has retried
            self._record_error(error)
        except Exception as error:  # noqa: BLE001  # a bug, or a pod of an odd form: readers would wait for ever
            told = EngineError(f"cannot follow the pods of {self._ref.name}: {error!r}")
            told.__cause__ = error
            self._record_error(told)

    def _watch_once(self, version: str) -> str:
        try:
            return self._follow(version) if version else self._list()
        except WatchExpired:
            return ""

    def _stop_if_idle(self) -> bool:
        """Stop if no reader is inside: this thread ends, and the next reader starts another."""
        with self._changed:
            if self._idle.is_set():
                self._thread = None
            return self._idle.is_set()

    def _list(self) -> str:
        labels = f"{LABEL_INSTANCE}={self._ref.name}"
        items, version = self._resources.list_all(POD, self._ref.namespace, labels=labels)
        facts = [read_pod(item) for item in items]
        with self._changed:
            self._facts = {fact.uid: fact for fact in facts}
            self._version = version
            self._changed.notify_all()
        return version

    def _follow(self, version: str) -> str:
        """Watch until the server ends the watch or the connection breaks, and return the version reached."""
        from muster.schedulers.kubernetes.api.errors import Unreachable

        labels = f"{LABEL_INSTANCE}={self._ref.name}"
        first_version = version
        try:
            for event in self._resources.watch(POD, self._ref.namespace, labels=labels, version=version):
                if isinstance(event, WatchEvent):
                    self._apply(event.type, event.item)
                else:
                    version = event
                if self._idle.is_set():
                    return version
        except Unreachable:
            pass  # the caller's next request fails if the server is down
        if version == first_version:
            self._idle.wait(_RETRY_S)
        return version

    def _apply(self, change: str, item: Mapping[str, Any]) -> None:
        fact = read_pod(item)
        with self._changed:
            known = self._facts.get(fact.uid)
            if change == "DELETED":
                self._facts.pop(fact.uid, None)
            elif known is None or known.phase == "Pending" or fact.phase != "Pending":  # not older than a list
                self._facts[fact.uid] = fact
            self._changed.notify_all()

    def _record_error(self, error: EngineError | SchedulerError) -> None:
        with self._changed:
            self._error = error
            self._thread = None
            self._changed.notify_all()
