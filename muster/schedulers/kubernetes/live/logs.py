"""Reads the log of one node: all its pods in turn, each line exactly once, even if connections break.

The API server sends whole lines with the time at which the node wrote them. A broken stream is resumed shortly before
the last line read, and lines with a known time and content are dropped. So no line is lost or repeated, even if stdout
and stderr were written slightly out of order.

Agents cannot know two things that are known here: that files end with their pod, and who has stopped the app. Lines of
a report that name such files are left out, and a guess about the sender of SIGTERM is replaced by what is known.
"""

import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Final, Protocol

from muster._shared.contract import Env
from muster.schedulers.adapter.log_position import Position
from muster.schedulers.errors import EngineError
from muster.schedulers.kubernetes.api.client import Client, Clock, SystemClock
from muster.schedulers.kubernetes.api.errors import ApiError, RequestError, Unreachable
from muster.schedulers.kubernetes.live.pod_status import PodFact
from muster.schedulers.kubernetes.names import CONTAINER
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


_PATH_LINES: Final = ("  log       : ", "  error file: ")
"""How the lines of a job's report begin that name files of a pod. They are left out if the files end with the pod.

Source: `muster/agent/diagnosis/report_text.py`.
"""
_GUESS: Final = re.compile(r"(\[muster\] received SIGTERM: .*) \(usually sent by [^()]*\)(\n?)")
"""What an agent says of SIGTERM, and who usually sends it. Source: `muster/agent/node/state.py`."""
_AT_SUCCESS: Final = " when the job succeeded"
_RETRY_S: Final = 0.5

_ANSWER_LIMIT_S: Final = 5.0
"""How long a node may take to begin with a log. One that is gone never does."""

Stamp = Timestamp
"""The time of a line, by its node's clock."""


class PodSource(Protocol):
    """What a reader needs of pods. See `watch.PodWatch` and `watch.PodSnapshot`."""

    def find(self, role: str, index: int) -> list[PodFact]:
        """Return the pods of one node, oldest first."""
        ...

    def get(self, uid: str) -> PodFact | None:
        """Return one pod, or None."""
        ...

    def wait(self) -> None:
        """Wait until a pod may have changed."""
        ...

    def has_app_ended(self) -> bool:
        """Return whether no pod will follow."""
        ...


class ConnectionLimits:
    """Limits the connections of all readers of a scheduler together. Node 0 always gets a stream."""

    def __init__(self, streams: int = STREAM_LIMIT, reads: int = READ_LIMIT) -> None:
        self._streams = threading.BoundedSemaphore(streams - 1)
        self._reads = threading.BoundedSemaphore(reads)

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

    @contextmanager
    def reserve_read(self) -> Iterator[None]:
        """Wait for a free read, and reserve it inside the block."""
        with self._reads:
            yield


@dataclass(frozen=True, kw_only=True)
class PodLogQuery:
    """A node's log and the part of it to read."""

    namespace: str
    role: str
    """The role's label."""
    index: int
    since: Stamp | None = None
    until: Stamp | None = None
    tail: bool = False
    """Follow the log until the app ends."""
    kept: Callable[[], Mapping[str, Iterable[bytes]]] = dict
    """Lines, with times, that were collected when the app was cancelled: those of each pod of the node, by its uid."""
    log_dir: str = ""
    """Where the user wants the files of the role's agents. "": they are lost with the pods."""
    has_succeeded: Callable[[], bool] = lambda: False
    """Whether the role's Job is complete: its controller then deletes the pods that it has not seen end."""
    find_stopper: Callable[[], str] = lambda: ""
    """What has stopped the app: "cancelled by `torchx cancel`". "": nothing that is known."""

    def describe_keeping(self) -> str:
        """Say where the logs may still be, or how to keep those of the next job."""
        if self.log_dir:
            return f"if {self.log_dir} ({Env.LOG_DIR}) is on a volume, the logs of its ranks are still there"
        return f"--env {Env.LOG_DIR}=FOLDER, on a volume, keeps the logs of the next job"


class LogReader:
    """Reads logs of one cluster. Safe to use from several threads."""

    def __init__(self, client: Client, limits: ConnectionLimits, clock: Clock | None = None) -> None:
        self._client = client
        self._limits = limits
        self._clock: Clock = clock or SystemClock()

    def read(self, query: PodLogQuery, pods: PodSource) -> Iterator[str]:
        """Yield the log of one node, a line at a time, with newlines.

        Lines that begin with "[muster]" are ours: they report a log that does not exist or that Kubernetes removed.
        """
        done: set[str] = set()
        while True:
            ended = pods.has_app_ended()  # first, or a new pod is missed
            pod = next((fact for fact in pods.find(query.role, query.index) if fact.uid not in done), None)
            if pod is not None and pod.phase != "Pending":
                done.add(pod.uid)
                yield from self._read_pod(query, pod, pods)
            elif not query.tail or ended:
                kept = [lines for uid, lines in query.kept().items() if uid not in done]
                for lines in kept:  # of pods that the cancel has deleted: they were the last
                    yield from _select_kept(lines, Position(query.since), query)
                if not done and not kept:
                    yield _describe_absence(query, pod)
                return
            else:
                pods.wait()

    def _read_pod(self, query: PodLogQuery, pod: PodFact, pods: PodSource) -> Iterator[str]:
        position = Position(query.since)
        if pod.restarts:  # only with pod_template's restartPolicy
            yield from self._read_once(query, pod, pods, Position(query.since), previous=True)
        while query.tail and pod.phase == "Running":
            with self._limits.reserve_stream(query.index) as has_stream:
                read = self._follow if has_stream else self._read_once
                yield from read(query, pod, pods, position)
            pods.has_app_ended()  # raises after too long an absence
            current = pods.get(pod.uid)
            if current is None or current.phase != "Running":
                break
            if not has_stream:
                self._clock.sleep(_POLL_INTERVAL_S)
            pods.wait()
        yield from self._read_once(query, pod, pods, position, last=True)

    def _follow(self, query: PodLogQuery, pod: PodFact, pods: PodSource, position: Position) -> Iterator[str]:
        """Read one stream until it ends or breaks. Skips an incomplete last line: the next read returns it whole."""
        path, parameters = _build_request(query, pod, position)
        try:
            with self._client.stream(
                path,
                what=f"log of {pod.name}",
                verb="read",
                query=parameters | {"follow": "true"},
                budget_s=_ANSWER_LIMIT_S,
            ) as stream:
                for raw in _split_lines(stream.read_chunks()):
                    if raw.endswith(b"\n"):
                        yield from _select(raw, position, query, pod, pods)
        except Unreachable:
            self._clock.sleep(_RETRY_S)
        except (ApiError, RequestError) as error:
            if error.refusal.status >= 500:  # the pod's state decides
                self._clock.sleep(_RETRY_S)
            elif error.refusal.status not in (400, 404):  # not started, or deleted
                raise

    def _read_once(
        self,
        query: PodLogQuery,
        pod: PodFact,
        pods: PodSource,
        position: Position,
        *,
        previous: bool = False,
        last: bool = False,
    ) -> Iterator[str]:
        """Read what the log holds now. `last`: no more lines will follow, so an unterminated line counts."""
        path, parameters = _build_request(query, pod, position)
        if previous:
            parameters["previous"] = "true"
        try:
            with self._limits.reserve_read():
                content = self._read_bytes(pod, path, parameters, tail=query.tail)
        except Unreachable:
            yield f"[muster] cannot read log of {pod.name}: its node does not answer\n"
            return
        except (ApiError, RequestError) as error:
            if error.refusal.status == 404 and not previous:
                yield from _read_rest(query, pod, position)
            elif error.refusal.status >= 500:
                yield f"[muster] {error}\n"
            elif error.refusal.status not in (400, 404):
                raise
            return
        for raw in _split_lines(iter((content,))):
            if raw.startswith(_NO_LOG):
                yield f"[muster] the rest of the log of {pod.name} is lost: its node has removed the container\n"
            elif raw.endswith(b"\n") or last or previous or not query.tail:
                yield from _select(raw, position, query, pod, pods)

    def _read_bytes(self, pod: PodFact, path: str, parameters: Mapping[str, str], *, tail: bool) -> bytes:
        """Read a log from a node that may be gone: if the server itself answers, it is the node that does not.

        Raises:
            ApiError, RequestError: the server refuses, or its node does not answer.
            Unreachable: the node does not answer.
            EngineError: the server was away for too long.
        """
        what = f"log of {pod.name}"
        try:
            return self._client.read_bytes(path, what=what, query=parameters, limit_s=_ANSWER_LIMIT_S)
        except (ApiError, Unreachable) as error:
            if isinstance(error, ApiError) and error.refusal.status < 500:
                raise
            self._check_server()
            if not tail:
                raise
        return self._client.read_bytes(path, what=what, query=parameters, limit_s=_ANSWER_LIMIT_S)

    def _check_server(self) -> None:
        """Wait for the server: whatever it answers, it is there.

        Raises:
            EngineError: it was away for too long.
        """
        try:
            self._client.request("GET", "/version", what="the version", verb="read")
        except (ApiError, Unreachable) as error:
            if isinstance(error, Unreachable) or error.refusal.status >= 500:
                raise EngineError(str(error)) from error


def _build_request(query: PodLogQuery, pod: PodFact, position: Position) -> tuple[str, dict[str, str]]:
    parameters = {"container": CONTAINER, "timestamps": "true"}
    since = position.resume()
    if since is not None:
        parameters["sinceTime"] = format_stamp(since)
    return f"/api/v1/namespaces/{query.namespace}/pods/{pod.name}/log", parameters


def _select(
    raw: bytes, position: Position, query: PodLogQuery, pod: PodFact | None, pods: PodSource | None
) -> Iterator[str]:
    stamp, line = split_stamp(raw)
    if stamp is None:
        # The node's message; other replicas' lines follow.
        yield line.decode(errors="replace").removesuffix("\n") + "\n"
        return
    if position.accept(stamp, line) and (query.until is None or stamp <= query.until):
        text = line.decode(errors="replace")
        if text.startswith(_PATH_LINES) and pod is not None and pod.lost_dir and pod.lost_dir in text:
            return
        yield add_time(_name_stopper(text, query, pod, pods), stamp)


def _name_stopper(text: str, query: PodLogQuery, pod: PodFact | None, pods: PodSource | None) -> str:
    """Replace an agent's guess about the sender of SIGTERM if it is known what has stopped the app.

    That deletes the pods that run. One that has ended and is still there got the signal before.
    """
    guess = _GUESS.fullmatch(text)
    now = pods.get(pod.uid) if pod and pods else None
    if guess is None or (now is not None and now.phase in ("Failed", "Succeeded") and not now.terminating):
        return text
    stopper = query.find_stopper()
    return f"{guess[1]} ({stopper}){guess[2]}" if stopper else text


def _read_rest(query: PodLogQuery, pod: PodFact, position: Position) -> Iterator[str]:
    """Yield the rest of the log of a pod that is gone, if it was kept, or a line that says that the rest is lost."""
    kept = query.kept().get(pod.uid)
    if kept is not None:
        yield from _select_kept(kept, position, query)
        return
    when = _AT_SUCCESS if query.has_succeeded() else ""
    why = f"Kubernetes has removed the pod{when}; {query.describe_keeping()}"
    yield f"[muster] the rest of the log of {pod.name} is lost: {why}\n"


def _select_kept(lines: Iterable[bytes], position: Position, query: PodLogQuery) -> Iterator[str]:
    for raw in lines:
        yield from _select(raw, position, query, None, None)


def _describe_absence(query: PodLogQuery, pod: PodFact | None) -> str:
    where = f"{query.role}/{query.index}"
    if pod is not None:
        why = "" if pod.reason is None else f": {word(pod.reason)}"
        return f"[muster] {where} has no log yet: pod {pod.name} is {pod.phase}{why}\n"
    why = "it has no pod, or Kubernetes has removed its pods and their logs"
    if query.has_succeeded():
        why = f"Kubernetes has removed its pod{_AT_SUCCESS}"
    return f"[muster] {where} has no log: {why}; {query.describe_keeping()}\n"


def _split_lines(read_chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Yield lines with their newline. The last one may lack it."""
    lines = LineSplitter()
    for chunk in read_chunks:
        yield from lines.feed(chunk)
    if lines.has_rest():
        yield lines.take_rest()


# -- times ------------------------------------------------------------------------------------------------------------


def split_stamp(raw: bytes) -> tuple[Stamp | None, bytes]:
    """Split `2026-11-21T02:20:49.123456789Z text` into time and text. Return (None, raw) without a time."""
    stamp, space, line = raw.partition(b" ")
    if not space:
        stamp, line = raw.rstrip(b"\n"), raw[len(raw.rstrip(b"\n")) :]
    try:
        return parse_timestamp(stamp.decode("ascii")), line
    except ValueError:
        return None, raw


def format_stamp(stamp: Stamp) -> str:
    """Format a time for `sinceTime`, which takes whole seconds."""
    return datetime.fromtimestamp(stamp[0], tz=timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def convert_to_stamp(moment: datetime) -> Stamp:
    """Convert a caller's time. Without a zone it is local time, as in TorchX."""
    aware = moment.astimezone(timezone.utc)
    return int(aware.timestamp()), aware.microsecond * 1000
