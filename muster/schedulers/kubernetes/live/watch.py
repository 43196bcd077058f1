"""The pods of one app, kept current by one watch for however many log readers."""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Final

from muster.schedulers.errors import EngineError, SchedulerError
from muster.schedulers.kubernetes.api.objects import POD, Objects, WatchEvent, WatchExpired
from muster.schedulers.kubernetes.app_id import AppRef
from muster.schedulers.kubernetes.labels import LABEL_INSTANCE
from muster.schedulers.kubernetes.live.pod_status import PodFact, read_pod

_CHECK_S: Final = 2.0
"""Age at which the app's own state is asked for again while readers wait."""

_PAUSE_S: Final = 0.5
"""Between two attempts of a watch that breaks at once."""


class PodSnapshot:
    """The pods of an app as they are now, for a reader that does not wait."""

    def __init__(self, facts: Sequence[PodFact]) -> None:
        self._facts = facts

    def find(self, role: str, index: int) -> list[PodFact]:
        """The pods of one node, oldest first."""
        return sort_pods(fact for fact in self._facts if (fact.role, fact.index) == (role, index))

    def get(self, uid: str) -> PodFact | None:
        """One pod, as it was."""
        return next((fact for fact in self._facts if fact.uid == uid), None)

    def wait(self) -> None:
        """Nothing changes any more."""

    def app_is_over(self) -> bool:
        """No pod will follow."""
        return True


def sort_pods(facts: Iterable[PodFact]) -> list[PodFact]:
    """Oldest first."""
    return sorted(facts, key=lambda fact: (fact.created, fact.name))


class PodWatch:
    """Lists, then watches; on 410 lists again. A context manager: the watch runs while somebody is inside.

    Args:
        resources: of the cluster.
        ref: the app.
        lead: see `pods.read_pod`.
        is_over: asks the cluster whether the app has ended; called at most every `_CHECK_S` seconds.
    """

    def __init__(self, resources: Objects, ref: AppRef, *, lead: str, is_over: Callable[[], bool]) -> None:
        self._resources = resources
        self._ref = ref
        self._lead = lead
        self._is_over = is_over
        self._over = False
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
        """The pods of one node, oldest first: what failed and what replaced it."""
        with self._changed:
            return sort_pods(fact for fact in self._facts.values() if (fact.role, fact.index) == (role, index))

    def get(self, uid: str) -> PodFact | None:
        """One pod; None when it is gone."""
        with self._changed:
            return self._facts.get(uid)

    def wait(self) -> None:
        """Returns when a pod has changed, at the latest after `_CHECK_S` seconds.

        Raises:
            EngineError: the watch cannot go on.
        """
        with self._changed:
            self._changed.wait(_CHECK_S)
            if self._error is not None:
                raise self._error

    def app_is_over(self) -> bool:
        """Whether the app has ended, as asked not long ago. One reader asks for all."""
        if not self._over and self._checking.acquire(blocking=False):
            try:
                self._over = self._is_over()
            finally:
                self._checking.release()
        return self._over

    # -- the watch --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            version = ""
            while not self._leave():
                version = self._turn(version)
        except (EngineError, SchedulerError) as error:  # Unreachable, too: the client has tried long enough
            self._fail(error)

    def _turn(self, version: str) -> str:
        try:
            return self._follow(version) if version else self._list()
        except WatchExpired:
            return ""

    def _leave(self) -> bool:
        """Whether nobody is inside any more; then the next reader starts another thread."""
        with self._changed:
            if self._idle.is_set():
                self._thread = None
            return self._idle.is_set()

    def _list(self) -> str:
        labels = f"{LABEL_INSTANCE}={self._ref.name}"
        items, version = self._resources.list_all(POD, self._ref.namespace, labels=labels)
        facts = [read_pod(item, lead=self._lead) for item in items]
        with self._changed:
            self._facts = {fact.uid: fact for fact in facts}
            self._version = version
            self._changed.notify_all()
        return version

    def _follow(self, version: str) -> str:
        """Watches until the server ends it or the connection breaks; the version reached."""
        from muster.schedulers.kubernetes.api.errors import Unreachable

        labels = f"{LABEL_INSTANCE}={self._ref.name}"
        begun = version
        try:
            for event in self._resources.watch(POD, self._ref.namespace, labels=labels, version=version):
                if isinstance(event, WatchEvent):
                    self._apply(event.type, event.item)
                else:
                    version = event
                if self._idle.is_set():
                    return version
        except Unreachable:
            # A stream that broke is resumed; a server that is gone is the next request's to find out.
            pass
        if version == begun:
            self._idle.wait(_PAUSE_S)
        return version

    def _apply(self, change: str, item: Mapping[str, Any]) -> None:
        fact = read_pod(item, lead=self._lead)
        with self._changed:
            if change == "DELETED":
                self._facts.pop(fact.uid, None)
            else:
                self._facts[fact.uid] = fact
            self._changed.notify_all()

    def _fail(self, error: EngineError | SchedulerError) -> None:
        with self._changed:
            self._error = error
            self._thread = None
            self._changed.notify_all()
