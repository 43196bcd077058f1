"""Reads the log of one node: all its pods in turn, each line exactly once, even if connections break.

The API server sends whole lines with the time at which the node wrote them. A broken stream is resumed shortly before
the last line read, and lines with a known time and content are dropped. So no line is lost or repeated, even if stdout
and stderr were written slightly out of order.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from types import TracebackType
from typing import Final

from muster._shared.contract import Env
from muster.schedulers.adapter.log_position import Position
from muster.schedulers.errors import EngineError, SchedulerError
from muster.schedulers.kubernetes.api.client import Client, Clock
from muster.schedulers.kubernetes.api.errors import ApiError, RequestError, Unreachable
from muster.schedulers.kubernetes.api.objects import WatchExpired
from muster.schedulers.kubernetes.kinds import POD
from muster.schedulers.kubernetes.labels import LABEL_INSTANCE
from muster.schedulers.kubernetes.names import CONTAINER
from muster.schedulers.kubernetes.running_apps.app import App
from muster.schedulers.kubernetes.running_apps.kept_logs import read_kept_logs
from muster.schedulers.kubernetes.running_apps.pod_status import PodFact, read_pod
from muster.schedulers.lines import LineSplitter, add_time
from muster.schedulers.timestamps import Timestamp, parse_timestamp
from muster.schedulers.wording.words import word

STREAM_LIMIT: Final = 50
"""How many streams are open at once. Further readers poll."""

READ_LIMIT: Final = 16
"""Short reads at once."""

_POLL_INTERVAL_S: Final = 5.0
"""Time between two reads of a reader without a stream."""

_NO_LOG: Final = b"unable to retrieve container logs for "
"""A node sends this, with status 200 and no newline, if the pod still exists but its container does not."""

_RETRY_S: Final = 0.5
"""Between two attempts of a watch or a stream that breaks at once."""

_CHECK_S: Final = 2.0
"""How often readers check whether the app has ended."""

_ANSWER_LIMIT_S: Final = 5.0
"""How long a node may take to begin with a log. One that is gone never does."""


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
    """

    def __init__(self, app: App, *, check_ended: Callable[[], bool]) -> None:
        super().__init__()
        self._app = app
        self._labels = f"{LABEL_INSTANCE}={app.ref.name}"
        self._check_ended = check_ended
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
                now_s = time.monotonic()
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
                if event["type"] != "BOOKMARK":
                    self._apply(event["type"], read_pod(event["object"]))
                version = event["object"]["metadata"]["resourceVersion"]
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


class ConnectionLimits:
    """Limits the connections of all readers of a scheduler together. Node 0 always gets a stream."""

    def __init__(self, streams: int = STREAM_LIMIT, reads: int = READ_LIMIT) -> None:
        self._streams = threading.BoundedSemaphore(streams - 1)
        self.reads = threading.BoundedSemaphore(reads)

    @contextmanager
    def reserve_stream(self, index: int) -> Iterator[bool]:
        """Return whether the reader of a node may hold a stream open inside the block. Does not wait."""
        if index == 0:
            yield True
            return
        reserved = self._streams.acquire(blocking=False)
        try:
            yield reserved
        finally:
            if reserved:
                self._streams.release()


@dataclass(frozen=True, kw_only=True)
class NodeLog:
    """The log of one node, over all its pods, and the part of it to read."""

    app: App
    pods: PodSnapshot
    limits: ConnectionLimits
    clock: Clock
    role: str
    """The role's label."""
    index: int
    since: Timestamp | None = None
    until: Timestamp | None = None
    tail: bool = False
    """Follow the log until the app ends."""
    log_dir: str = ""
    """Where the user wants the files of the role's agents. "": they are lost with the pods."""

    def read(self) -> Iterator[str]:
        """Yield the log, a line at a time, with newlines.

        Lines that begin with "[muster]" are ours: they report a log that does not exist or that Kubernetes removed.
        """
        done: set[str] = set()
        while True:
            ended = self.pods.has_app_ended()  # first, or a new pod is missed
            pod = next((fact for fact in self.pods.find(self.role, self.index) if fact.uid not in done), None)
            if pod is not None and pod.phase != "Pending":
                done.add(pod.uid)
                yield from self._read_pod(pod)
            elif not self.tail or ended:
                kept = [lines for uid, lines in self._read_kept().items() if uid not in done]
                for lines in kept:  # of pods that the cancel has deleted: they were the last
                    yield from self._select_all(lines, Position(self.since))
                if not done and not kept:
                    yield self._describe_absence(pod)
                return
            else:
                self.pods.wait()

    def _read_kept(self) -> Mapping[str, Iterable[bytes]]:
        return read_kept_logs(self.app.ref, self.role, self.index)

    def _read_pod(self, pod: PodFact) -> Iterator[str]:
        position = Position(self.since)
        while self.tail and pod.phase == "Running":
            with self.limits.reserve_stream(self.index) as has_stream:
                yield from self._follow(pod, position) if has_stream else self._read_once(pod, position)
            self.pods.has_app_ended()  # raises after too long an absence
            current = self.pods.get(pod.uid)
            if current is None or current.phase != "Running":
                break
            if not has_stream:
                self.clock.sleep(_POLL_INTERVAL_S)
            self.pods.wait()
        yield from self._read_once(pod, position, last=True)

    def _follow(self, pod: PodFact, position: Position) -> Iterator[str]:
        """Read one stream until it ends or breaks. Skips an incomplete last line: the next read returns it whole."""
        path, parameters = self._build_request(pod, position)
        try:
            with self.app.resources.client.stream(
                path,
                what=f"log of {pod.name}",
                verb="read",
                query=parameters | {"follow": "true"},
                budget_s=_ANSWER_LIMIT_S,
            ) as stream:
                lines = _split_lines(stream.read_chunks())
                yield from self._select_all((raw for raw in lines if raw.endswith(b"\n")), position)
        except Unreachable:
            self.clock.sleep(_RETRY_S)
        except (ApiError, RequestError) as error:
            if error.refusal.status >= 500:  # the pod's state decides
                self.clock.sleep(_RETRY_S)
            elif error.refusal.status not in (400, 404):  # not started, or deleted
                raise

    def _read_once(self, pod: PodFact, position: Position, *, last: bool = False) -> Iterator[str]:
        """Read what the log holds now. `last`: no more lines will follow, so an unterminated line counts."""
        path, parameters = self._build_request(pod, position)
        try:
            with self.limits.reads:
                content = self._read_bytes(pod, path, parameters)
        except Unreachable:
            yield f"[muster] cannot read log of {pod.name}: its node does not answer\n"
            return
        except (ApiError, RequestError) as error:
            if error.refusal.status == 404:
                yield from self._read_rest(pod, position)
            elif error.refusal.status >= 500:
                yield f"[muster] {error}\n"
            elif error.refusal.status != 400:
                raise
            return
        for raw in _split_lines(iter((content,))):
            if raw.startswith(_NO_LOG):
                yield f"[muster] the rest of the log of {pod.name} is lost: its node has removed the container\n"
            elif raw.endswith(b"\n") or last or not self.tail:
                yield from self._select_all([raw], position)

    def _read_bytes(self, pod: PodFact, path: str, parameters: Mapping[str, str]) -> bytes:
        """Read a log from a node that may be gone: if the server itself answers, it is the node that does not.

        Raises:
            ApiError, RequestError: the server refuses, or its node does not answer.
            Unreachable: the node does not answer.
            EngineError: the server was away for too long.
        """
        client, what = self.app.resources.client, f"log of {pod.name}"
        try:
            return client.read_bytes(path, what=what, query=parameters, limit_s=_ANSWER_LIMIT_S)
        except (ApiError, Unreachable) as error:
            if isinstance(error, ApiError) and error.refusal.status < 500:
                raise
            _check_server(client)
            if not self.tail:
                raise
        return client.read_bytes(path, what=what, query=parameters, limit_s=_ANSWER_LIMIT_S)

    def _build_request(self, pod: PodFact, position: Position) -> tuple[str, dict[str, str]]:
        parameters = {"container": CONTAINER, "timestamps": "true"}
        since = position.resume()
        if since is not None:
            parameters["sinceTime"] = format_stamp(since)
        return f"{POD.build_path(self.app.ref.namespace, pod.name)}/log", parameters

    def _select_all(self, lines: Iterable[bytes], position: Position) -> Iterator[str]:
        """Yield the lines that are new and wanted."""
        for raw in lines:
            stamp, line = split_stamp(raw)
            text = line.decode(errors="replace")
            if stamp is None:
                # The node's message; other replicas' lines follow.
                yield text.removesuffix("\n") + "\n"
            elif position.accept(stamp, line) and (self.until is None or stamp <= self.until):
                yield add_time(text, stamp)

    def _read_rest(self, pod: PodFact, position: Position) -> Iterator[str]:
        """Yield the rest of the log of a pod that is gone, if it was kept, or a line that says that it is lost."""
        kept = self._read_kept().get(pod.uid)
        if kept is not None:
            yield from self._select_all(kept, position)
            return
        why = f"Kubernetes has removed the pod; {self._describe_keeping()}"
        yield f"[muster] the rest of the log of {pod.name} is lost: {why}\n"

    def _describe_absence(self, pod: PodFact | None) -> str:
        where = f"{self.role}/{self.index}"
        if pod is not None:
            why = "" if pod.reason is None else f": {word(pod.reason)}"
            return f"[muster] {where} has no log yet: pod {pod.name} is {pod.phase}{why}\n"
        why = "it has no pod, or Kubernetes has removed its pods and their logs"
        return f"[muster] {where} has no log: {why}; {self._describe_keeping()}\n"

    def _describe_keeping(self) -> str:
        """Say where the logs may still be, or how to keep those of the next job."""
        if self.log_dir:
            return f"if {self.log_dir} ({Env.LOG_DIR}) is on a volume, the logs of its ranks are still there"
        return f"--env {Env.LOG_DIR}=FOLDER, on a volume, keeps the logs of the next job"


def _check_server(client: Client) -> None:
    """Wait for the server: whatever it answers, it is there.

    Raises:
        EngineError: it was away for too long.
    """
    try:
        client.request("GET", "/version", what="the version", verb="read")
    except (ApiError, Unreachable) as error:
        if isinstance(error, Unreachable) or error.refusal.status >= 500:
            raise EngineError(str(error)) from error


def _split_lines(read_chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Yield lines with their newline. The last one may lack it."""
    lines = LineSplitter()
    for chunk in read_chunks:
        yield from lines.feed(chunk)
    if lines.has_rest():
        yield lines.take_rest()


# -- times ------------------------------------------------------------------------------------------------------------


def split_stamp(raw: bytes) -> tuple[Timestamp | None, bytes]:
    """Split `2026-11-21T02:20:49.123456789Z text` into time and text. Return (None, raw) without a time."""
    stamp, space, line = raw.partition(b" ")
    if not space:
        stamp, line = raw.rstrip(b"\n"), raw[len(raw.rstrip(b"\n")) :]
    try:
        return parse_timestamp(stamp.decode("ascii")), line
    except ValueError:
        return None, raw


def format_stamp(stamp: Timestamp) -> str:
    """Format a time for `sinceTime`, which takes whole seconds."""
    return datetime.fromtimestamp(stamp[0], tz=timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
