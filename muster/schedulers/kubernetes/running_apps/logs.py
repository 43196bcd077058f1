"""Reads the log of one node: all its pods in turn, each line exactly once, even if connections break.

The API server sends whole lines with the time at which the node wrote them. A broken stream is resumed shortly before
the last line read, and lines with a known time and content are dropped. So no line is lost or repeated, even if stdout
and stderr were written slightly out of order.

It also keeps the logs of a job that is cancelled: Kubernetes deletes its running pods, and their logs with them. Its
logs are opened first, because a cluster may remove a pod as soon as it has ended. That takes a second at most, and the
job is stopped in any case: neither a node that does not answer nor a Ctrl-C can keep it running. What its pods have
written, and what they write until they end, is collected on the machine that cancels, in the folder for muster's state.
Once the pods are gone, `torchx log` on that machine reads it from there. Of a long log the end is kept, because people
look there.
"""

import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Final

from muster._shared.contract import Env
from muster._shared.foreign_files import read_regular
from muster.schedulers.adapter.log_position import Position
from muster.schedulers.errors import EngineError, SchedulerError, UnsafeFolderError
from muster.schedulers.kubernetes import kube
from muster.schedulers.kubernetes.api.client import Client
from muster.schedulers.kubernetes.api.errors import ApiError, RequestError, Unreachable
from muster.schedulers.kubernetes.running_apps.app import App, AppRef
from muster.schedulers.kubernetes.running_apps.pod_status import PodFact
from muster.schedulers.lines import CHUNK_BYTES, LineSplitter, add_time
from muster.schedulers.supervision.registry import find_state_dir
from muster.schedulers.timestamps import Timestamp, parse_timestamp
from muster.schedulers.wording.words import word

STREAM_LIMIT: Final = 50
"""How many nodes of a role have an open stream, the first ones. Readers of the others poll."""

READ_LIMIT: Final = 16
"""Short reads at once."""

_POLL_INTERVAL_S: Final = 5.0
"""Time between two reads of a reader without a stream."""

_NO_LOG: Final = b"unable to retrieve container logs for "
"""A node sends this, with status 200 and no newline, if the pod still exists but its container does not."""

_LOOK_S: Final = 1.0
"""Between two lists of the pods, and between two attempts of a stream."""

_PODS_PER_S: Final = 1000
"""Of many pods the lists are further apart: by a second for each so many."""

ANSWER_LIMIT_S: Final = 5.0
"""How long a node may take to begin with a log. One that is gone never does."""


class Pods:
    """The pods of an app, for all readers of its logs together.

    A reader looks at them before its pod runs, and when its stream has ended. While all streams are open nothing is
    asked.

    Args:
        app: whose.
        check_ended: reads from the cluster whether the app has ended, so that no pod follows.
    """

    def __init__(self, app: App, check_ended: Callable[[], bool]) -> None:
        self._app = app
        self._check_ended = check_ended
        self._facts: Mapping[str, PodFact] = {}
        """By uid. It is replaced, never changed: any thread may look."""
        self._has_ended = False
        self._next_s = -math.inf
        self._error: EngineError | SchedulerError | None = None
        self._lock = threading.Lock()

    def look(self) -> bool:
        """List them again, unless one reader did a moment ago. Return whether the app has ended.

        Raises:
            EngineError, SchedulerError: the server does not answer, or refuses. All readers that wait get it.
        """
        with self._lock:
            if time.monotonic() >= self._next_s:
                self._error = None
                try:
                    has_ended = self._has_ended or self._check_ended()  # first, or a new pod is missed
                    self._facts = {fact.uid: fact for fact in self._app.list_pods()}
                    self._has_ended = has_ended
                except (EngineError, SchedulerError) as error:
                    self._error = error
                self._next_s = time.monotonic() + _LOOK_S + len(self._facts) / _PODS_PER_S
            if self._error is not None:
                raise self._error
            return self._has_ended

    def find(self, role: str, index: int) -> list[PodFact]:
        """Return the pods of one node, oldest first: those that failed and their replacements."""
        found = (fact for fact in self._facts.values() if (fact.role, fact.index) == (role, index))
        return sorted(found, key=lambda fact: (fact.created, fact.name))

    def runs(self, uid: str) -> bool:
        """Return whether a pod runs."""
        fact = self._facts.get(uid)
        return fact is not None and fact.phase == "Running"


@dataclass(frozen=True, kw_only=True)
class NodeLog:
    """The log of one node, over all its pods, and the part of it to read."""

    app: App
    pods: Pods
    reads: threading.BoundedSemaphore
    """Limits the short reads of all readers together."""
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
            ended = self.pods.look()
            pod = next((fact for fact in self.pods.find(self.role, self.index) if fact.uid not in done), None)
            if pod is not None and pod.phase != "Pending":
                done.add(pod.uid)
                yield from self._read_pod(pod)
            elif ended:
                found = read_kept_logs(self.app.ref, self.role, self.index)
                kept = [lines for uid, lines in found.items() if uid not in done]
                for lines in kept:  # of pods that the cancel has deleted: they were the last
                    yield from self._select_all(lines, Position(self.since))
                if not done and not kept:
                    yield self._describe_absence(pod)
                return
            else:
                time.sleep(_LOOK_S)

    def _read_pod(self, pod: PodFact) -> Iterator[str]:
        position, runs = Position(self.since), self.tail and pod.phase == "Running"
        while runs:
            if self.index < STREAM_LIMIT:
                yield from self._follow(pod, position)
                time.sleep(_LOOK_S)
            else:
                yield from self._read_once(pod, position)
                time.sleep(_POLL_INTERVAL_S)
            self.pods.look()
            runs = self.pods.runs(pod.uid)
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
                budget_s=ANSWER_LIMIT_S,
            ) as chunks:
                lines = _split_lines(chunks)
                yield from self._select_all((raw for raw in lines if raw.endswith(b"\n")), position)
        except Unreachable:
            pass  # it is opened again, if the pod still runs
        except (ApiError, RequestError) as error:
            if error.refusal.status < 500 and error.refusal.status not in (400, 404):  # not started, or deleted
                raise

    def _read_once(self, pod: PodFact, position: Position, *, last: bool = False) -> Iterator[str]:
        """Read what the log holds now. `last`: no more lines will follow, so an unterminated line counts."""
        path, parameters = self._build_request(pod, position)
        try:
            with self.reads:
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
            return client.read_bytes(path, what=what, query=parameters, limit_s=ANSWER_LIMIT_S)
        except (ApiError, Unreachable) as error:
            if isinstance(error, ApiError) and error.refusal.status < 500:
                raise
            _check_server(client)
            if not self.tail:
                raise
        return client.read_bytes(path, what=what, query=parameters, limit_s=ANSWER_LIMIT_S)

    def _build_request(self, pod: PodFact, position: Position) -> tuple[str, dict[str, str]]:
        parameters = {"container": kube.CONTAINER, "timestamps": "true"}
        since = position.resume()
        if since is not None:
            parameters["sinceTime"] = format_stamp(since)
        return f"{kube.POD.build_path(self.app.ref.namespace, pod.name)}/log", parameters

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
        kept = read_kept_logs(self.app.ref, self.role, self.index).get(pod.uid)
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


# -- the logs of a job that is cancelled ------------------------------------------------------------------------------

POD_LIMIT: Final = 64
"""How many pods' logs are kept, those of the first nodes. A cancel must not take minutes."""

LOG_LIMIT_BYTES: Final = 16 << 20
"""How much of the log of one pod is kept: its end."""

_LINE_LIMIT: Final = 100_000
"""Lines of one pod: the server can begin a log at a line, not at a byte."""

OPEN_LIMIT_S: Final = 1.0
"""How long the stop waits for the logs to be opened."""

COLLECT_LIMIT_S: Final = 20.0
"""How long pods may go on writing after the stop. Most end within a second or two."""

_SUFFIX: Final = ".log"

_NAMES_LIMIT: Final = 5
"""Pods that the line for the user names."""


def stop_and_keep_logs(
    app: App, list_pods: Callable[[], Sequence[PodFact]], stop: Callable[[], None], notify: Callable[[str], None]
) -> None:
    """Open the logs of the app's pods that run, stop it, collect the logs until the pods end, and say where they are.

    Args:
        app: which.
        list_pods: lists those that will be stopped.
        stop: stops the app. Its errors are raised, and nothing is collected. Errors of logs are reported, not raised.
        notify: called with the line for the user.
    """
    collection = _Collection(app)
    try:
        with suppress(EngineError, SchedulerError):  # said below if it is still so
            collection.open(list_pods())
        collection.wait_open(OPEN_LIMIT_S)
    finally:  # also after a Ctrl-C
        try:
            stop()
        except BaseException:
            collection.is_closed.set()
            raise
    error = ""
    try:
        collection.open(list_pods())  # those that have started since
    except (EngineError, SchedulerError) as refusal:
        error = str(refusal)
    try:
        collection.wait_ended()
    finally:  # also after a Ctrl-C
        error = collection.write() or error
    if collection.logs or error:
        notify(collection.describe(error))


class _Collection:
    """The logs of an app's pods that run."""

    def __init__(self, app: App) -> None:
        self._app = app
        self.logs: list[_PodLog] = []
        self.others = 0
        """How many pods more there are than logs are kept of."""
        self.is_closed = threading.Event()
        """Read no more: the app was not stopped."""

    def open(self, facts: Sequence[PodFact]) -> None:
        """Begin to read the logs of the pods that run, those of the first nodes, and are not read yet."""
        known = {log.fact.name for log in self.logs}
        running = [fact for fact in facts if fact.phase == "Running" and fact.name not in known]
        running.sort(key=lambda fact: (fact.index, fact.role))
        new = [_PodLog(fact) for fact in running[: max(0, POD_LIMIT - len(self.logs))]]
        self.others = len(running) - len(new)
        self.logs += new
        for log in new:
            arguments, name = (self._app, self.is_closed), f"muster-read-log-{log.fact.name}"
            threading.Thread(target=log.read, args=arguments, name=name, daemon=True).start()

    def wait_open(self, limit_s: float) -> None:
        """Wait for the nodes to begin with the logs."""
        until_s = time.monotonic() + limit_s
        for log in self.logs:
            log.answered.wait(max(0.0, until_s - time.monotonic()))

    def wait_ended(self) -> None:
        """Wait until the pods have ended or a limit is over. Threads that hang are left behind."""
        until_s = time.monotonic() + COLLECT_LIMIT_S
        self.wait_open(ANSWER_LIMIT_S)
        for log in self.logs:
            if log.answered.is_set():
                log.ended.wait(max(0.0, until_s - time.monotonic()))
                log.error = log.error or ("" if log.ended.is_set() else "it still runs")
            else:
                log.error = f"cannot read log of {log.fact.name}: its node does not answer"

    def write(self) -> str:
        """Write what was read. Return the error of a disk that refuses."""
        try:
            for log in self.logs:
                log.write(find_folder(self._app.ref))
        except (OSError, UnsafeFolderError) as error:
            return str(error)
        return ""

    def describe(self, error: str) -> str:
        """Say where the logs are, and which are lost."""
        text = "Kubernetes deletes the pods and their logs; what they have written "
        is_kept = any(log.is_kept for log in self.logs)
        text += f"is kept in {find_folder(self._app.ref)}" if is_kept else "could not be kept"
        failed = [log for log in self.logs if log.error]
        if failed:
            named = ", ".join(log.fact.name for log in failed[:_NAMES_LIMIT])
            named += f" and {len(failed) - _NAMES_LIMIT} more" if len(failed) > _NAMES_LIMIT else ""
            text += f"; the logs of {named} are lost or incomplete: {failed[0].error}"
        elif error:
            text += f": {error}"
        return text + (f"; those of {self.others} other nodes are lost" if self.others else "")


class _PodLog:
    """The log of one pod while it is collected. A thread of its own reads it."""

    def __init__(self, fact: PodFact) -> None:
        self.fact = fact
        self.error = ""
        self.is_kept = False
        self.answered = threading.Event()
        self.ended = threading.Event()
        self._content = bytearray()
        self._lock = threading.Lock()

    def read(self, app: App, is_closed: threading.Event) -> None:
        """Read until the pod ends."""
        path = f"{kube.POD.build_path(app.ref.namespace, self.fact.name)}/log"
        query = {"container": kube.CONTAINER, "timestamps": "true", "follow": "true", "tailLines": str(_LINE_LIMIT)}
        what = f"log of {self.fact.name}"
        try:
            with app.resources.client.stream(path, what=what, verb="read", query=query, budget_s=0) as chunks:
                self.answered.set()
                for chunk in chunks:
                    if is_closed.is_set():
                        break
                    with self._lock:
                        self._content += chunk
                        if len(self._content) > 2 * LOG_LIMIT_BYTES:
                            self._trim()
        except (EngineError, SchedulerError) as error:
            self.error = str(error)
        finally:
            self.ended.set()
            self.answered.set()

    def _trim(self) -> None:
        """Remove whole lines at the beginning."""
        excess = len(self._content) - LOG_LIMIT_BYTES
        if excess > 0:
            del self._content[: self._content.find(b"\n", excess - 1) + 1]

    def write(self, folder: Path) -> None:
        """Write the end of what was read. Nothing, if nothing was read.

        Raises:
            OSError: the disk refuses.
        """
        with self._lock:
            self._trim()
            content = bytes(self._content)
        if content:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            target = folder / f"{_begin_name(self.fact.role, self.fact.index)}{self.fact.uid}{_SUFFIX}"
            temporary = target.with_suffix(f".{os.getpid()}")
            temporary.write_bytes(content)
            temporary.replace(target)
            self.is_kept = True


def find_folder(ref: AppRef) -> Path:
    """Return where the logs of a cancelled app are kept."""
    return find_state_dir(os.environ) / "kubernetes-logs" / ref.namespace / ref.name


def _begin_name(role: str, index: int) -> str:
    """Return how the names of a node's files begin. No role's label has a dot."""
    return f"{role}-{index}."


def read_kept_logs(ref: AppRef, role: str, index: int) -> dict[str, Iterator[bytes]]:
    """Return the kept lines of each pod of one node, with their times, by the pod's uid. {}: none were kept here."""
    beginning = _begin_name(role, index)
    try:
        found = sorted(find_folder(ref).glob(f"{beginning}*{_SUFFIX}"), key=lambda path: path.stat().st_mtime_ns)
    except (FileNotFoundError, UnsafeFolderError):
        return {}
    return {path.name[len(beginning) : -len(_SUFFIX)]: _read_lines(path) for path in found}


def _read_lines(path: Path) -> Iterator[bytes]:
    def read() -> Iterator[bytes]:
        position = 0
        with suppress(FileNotFoundError):  # deleted since it was listed
            while piece := read_regular(path, CHUNK_BYTES, position):
                position += len(piece)
                yield piece

    return _split_lines(read())


def forget_logs(ref: AppRef) -> None:
    """Remove what was kept of a deleted app."""
    try:
        folder = find_folder(ref)
    except UnsafeFolderError:  # then none were kept
        return
    if folder.is_dir():
        for path in folder.iterdir():
            path.unlink(missing_ok=True)
        folder.rmdir()
