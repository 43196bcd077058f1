"""Reads the log of one node: all its pods in turn, each line exactly once, even if connections break.

The API server sends whole lines with the time at which the node wrote them. A broken stream is resumed shortly before
the last line read, and lines with a known time and content are dropped. So no line is lost or repeated, even if stdout
and stderr were written slightly out of order.

Agents cannot know two things that are known here: that files end with their pod, and who has stopped the app. Lines of
a report that name such files are left out, and a guess about the sender of SIGTERM is replaced by what is known.
"""

import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Final

from muster._shared.contract import Env
from muster.schedulers.adapter.log_position import Position
from muster.schedulers.errors import EngineError
from muster.schedulers.kubernetes.api.client import Client, Clock
from muster.schedulers.kubernetes.api.errors import ApiError, RequestError, Unreachable
from muster.schedulers.kubernetes.kinds import POD
from muster.schedulers.kubernetes.live.app import App, describe_stopper
from muster.schedulers.kubernetes.live.kept_logs import read_kept_logs
from muster.schedulers.kubernetes.live.pod_status import PodFact
from muster.schedulers.kubernetes.live.status import list_ends
from muster.schedulers.kubernetes.live.watch import PodSnapshot
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
_RETRY_S: Final = 0.5

_ANSWER_LIMIT_S: Final = 5.0
"""How long a node may take to begin with a log. One that is gone never does."""

_NO_POD: Final = "it has no pod, or Kubernetes has removed its pods and their logs"


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
        if pod.restarts:  # only with pod_template's restartPolicy
            yield from self._read_once(pod, Position(self.since), previous=True)
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
                yield from self._select_all((raw for raw in lines if raw.endswith(b"\n")), position, pod)
        except Unreachable:
            self.clock.sleep(_RETRY_S)
        except (ApiError, RequestError) as error:
            if error.refusal.status >= 500:  # the pod's state decides
                self.clock.sleep(_RETRY_S)
            elif error.refusal.status not in (400, 404):  # not started, or deleted
                raise

    def _read_once(
        self, pod: PodFact, position: Position, *, previous: bool = False, last: bool = False
    ) -> Iterator[str]:
        """Read what the log holds now. `last`: no more lines will follow, so an unterminated line counts."""
        path, parameters = self._build_request(pod, position)
        if previous:
            parameters["previous"] = "true"
        try:
            with self.limits.reserve_read():
                content = self._read_bytes(pod, path, parameters)
        except Unreachable:
            yield f"[muster] cannot read log of {pod.name}: its node does not answer\n"
            return
        except (ApiError, RequestError) as error:
            if error.refusal.status == 404 and not previous:
                yield from self._read_rest(pod, position)
            elif error.refusal.status >= 500:
                yield f"[muster] {error}\n"
            elif error.refusal.status not in (400, 404):
                raise
            return
        for raw in _split_lines(iter((content,))):
            if raw.startswith(_NO_LOG):
                yield f"[muster] the rest of the log of {pod.name} is lost: its node has removed the container\n"
            elif raw.endswith(b"\n") or last or previous or not self.tail:
                yield from self._select_all([raw], position, pod)

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

    def _select_all(self, lines: Iterable[bytes], position: Position, pod: PodFact | None = None) -> Iterator[str]:
        """Yield the lines that are new and wanted. Without a pod they are of one that the cancel has deleted."""
        for raw in lines:
            stamp, line = split_stamp(raw)
            text = line.decode(errors="replace")
            if stamp is None:
                # The node's message; other replicas' lines follow.
                yield text.removesuffix("\n") + "\n"
                continue
            is_wanted = position.accept(stamp, line) and (self.until is None or stamp <= self.until)
            if is_wanted and not (pod and pod.lost_dir and text.startswith(_PATH_LINES) and pod.lost_dir in text):
                yield add_time(self._name_stopper(text, pod), stamp)

    def _name_stopper(self, text: str, pod: PodFact | None) -> str:
        """Replace an agent's guess about the sender of SIGTERM if it is known what has stopped the app.

        That deletes the pods that run. One that has ended and is still there got the signal before.
        """
        guess = _GUESS.fullmatch(text)
        now = self.pods.get(pod.uid) if pod else None
        if guess is None or (now is not None and now.phase in ("Failed", "Succeeded") and not now.terminating):
            return text
        stopper = describe_stopper(self.app.find_parents())
        return f"{guess[1]} ({stopper}){guess[2]}" if stopper else text

    def _read_rest(self, pod: PodFact, position: Position) -> Iterator[str]:
        """Yield the rest of the log of a pod that is gone, if it was kept, or a line that says that it is lost."""
        kept = self._read_kept().get(pod.uid)
        if kept is not None:
            yield from self._select_all(kept, position)
            return
        why = f"Kubernetes has removed the pod{self._describe_success()}; {self._describe_keeping()}"
        yield f"[muster] the rest of the log of {pod.name} is lost: {why}\n"

    def _describe_absence(self, pod: PodFact | None) -> str:
        where = f"{self.role}/{self.index}"
        if pod is not None:
            why = "" if pod.reason is None else f": {word(pod.reason)}"
            return f"[muster] {where} has no log yet: pod {pod.name} is {pod.phase}{why}\n"
        when = self._describe_success()
        why = f"Kubernetes has removed its pod{when}" if when else _NO_POD
        return f"[muster] {where} has no log: {why}; {self._describe_keeping()}\n"

    def _describe_success(self) -> str:
        """Say that the role's Job is complete: its controller then deletes the pods that it has not seen end."""
        has_succeeded = list_ends(self.app.find_parents()).get(self.role) == "Complete"
        return " when the job succeeded" if has_succeeded else ""

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


def convert_to_stamp(moment: datetime) -> Timestamp:
    """Convert a caller's time. Without a zone it is local time, as in TorchX."""
    aware = moment.astimezone(timezone.utc)
    return int(aware.timestamp()), aware.microsecond * 1000
