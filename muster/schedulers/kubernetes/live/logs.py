"""Reads the log of one node: all its pods in turn, each line once, whatever breaks in between.

The API server gives whole lines with the time the node wrote them. A stream that breaks is resumed a little before
the last line seen, and what was seen already is left out by time and content: nothing is lost, nothing comes twice,
even when stdout and stderr were written slightly out of order.
"""

import threading
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Final, Protocol

from muster.schedulers.kubernetes.api.client import Client, Pace, SystemPace
from muster.schedulers.kubernetes.api.errors import ApiError, RequestError, Unreachable
from muster.schedulers.kubernetes.live.pod_status import PodFact
from muster.schedulers.kubernetes.names import CONTAINER

FOLLOW_LIMIT: Final = 50
"""Streams open at once; readers beyond read in turns."""

READ_LIMIT: Final = 16
"""Short reads at once."""

_OVERLAP_S: Final = 2
_TURN_S: Final = 5.0
"""Pause of a reader without a stream of its own between two reads."""

_NO_LOG: Final = b"unable to retrieve container logs for "
"""A node answers so, with status 200 and no newline, while the pod is still known and its container is not."""

_RETRY_S: Final = 0.5

Stamp = tuple[int, int]
"""(seconds since the epoch, nanoseconds) of a line, by its node's clock."""


class PodSource(Protocol):
    """What a reader asks about pods; see `board.PodBoard`."""

    def find(self, role: str, index: int) -> list[PodFact]:
        """The pods of one node, oldest first."""
        ...

    def get(self, uid: str) -> PodFact | None:
        """One pod, or None."""
        ...

    def wait(self) -> None:
        """Until something may have changed."""
        ...

    def app_is_over(self) -> bool:
        """Whether no pod will follow."""
        ...


class Slots:
    """Bounds the connections of all readers of a scheduler together. Node 0 always gets a stream."""

    def __init__(self, follows: int = FOLLOW_LIMIT, reads: int = READ_LIMIT) -> None:
        self._follows = threading.BoundedSemaphore(follows - 1)
        self._reads = threading.BoundedSemaphore(reads)

    @contextmanager
    def following(self, index: int) -> Iterator[bool]:
        """Whether the reader of a node may hold a stream open, for the time inside."""
        if index == 0:
            yield True
            return
        got = self._follows.acquire(blocking=False)
        try:
            yield got
        finally:
            if got:
                self._follows.release()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Waits for its turn."""
        with self._reads:
            yield


@dataclass(frozen=True, kw_only=True)
class PodLogQuery:
    """Which log, which part of it."""

    namespace: str
    role: str
    """The role's label."""
    index: int
    since: Stamp | None = None
    until: Stamp | None = None
    tail: bool = False
    """Go on until the app ends."""


class Position:
    """How far one pod's log has been read."""

    def __init__(self, since: Stamp | None) -> None:
        self._since = since
        self._last: Stamp | None = None
        self._seen: Counter[tuple[Stamp, bytes]] = Counter()
        self._order: deque[tuple[Stamp, bytes]] = deque()
        self._again: Counter[tuple[Stamp, bytes]] = Counter()

    def resume(self) -> str | None:
        """`sinceTime` for the next read; None: from the beginning. What was seen since then is expected again."""
        self._again = self._seen.copy()
        if self._last is not None:
            return format_stamp((self._last[0] - _OVERLAP_S, 0))
        return None if self._since is None else format_stamp(self._since)

    def take(self, stamp: Stamp, line: bytes) -> bool:
        """Whether a line is new."""
        key = (stamp, line)
        if self._again[key] > 0:
            self._again[key] -= 1
            return False
        if self._since is not None and stamp < self._since:
            return False
        self._seen[key] += 1
        self._order.append(key)
        self._last = stamp if self._last is None else max(self._last, stamp)
        self._forget(self._last[0] - _OVERLAP_S)
        return True

    def _forget(self, before_s: int) -> None:
        while self._order and self._order[0][0][0] < before_s:
            key = self._order.popleft()
            self._seen[key] -= 1
            if self._seen[key] <= 0:
                del self._seen[key]


class LogReader:
    """Reads logs of one cluster. Safe to use from several threads."""

    def __init__(self, client: Client, slots: Slots, pace: Pace | None = None) -> None:
        self._client = client
        self._slots = slots
        self._pace: Pace = pace or SystemPace()

    def read(self, query: PodLogQuery, board: PodSource) -> Iterator[str]:
        """The log of one node, a line at a time, newlines kept.

        A line that begins with "[muster]" is ours: it says that Kubernetes has removed a log.
        """
        done: set[str] = set()
        while True:
            over = board.app_is_over()  # before looking for pods: one that comes after is not missed
            pod = next((fact for fact in board.find(query.role, query.index) if fact.uid not in done), None)
            if pod is not None and pod.phase != "Pending":
                done.add(pod.uid)
                yield from self._read_pod(query, pod, board)
            elif not query.tail or over:
                if not done:
                    yield _describe_absence(query, pod)
                return
            else:
                board.wait()

    def _read_pod(self, query: PodLogQuery, pod: PodFact, board: PodSource) -> Iterator[str]:
        position = Position(query.since)
        if pod.restarts:  # only a pod_template can make a container start again
            yield from self._read_once(query, pod, Position(query.since), previous=True)
        while query.tail and pod.phase == "Running":
            with self._slots.following(query.index) as follows:
                yield from self._follow(query, pod, position) if follows else self._read_once(query, pod, position)
            current = board.get(pod.uid)
            if current is None or current.phase != "Running":
                break
            if not follows:
                self._pace.pause(_TURN_S)
            board.wait()
        yield from self._read_once(query, pod, position, last=True)

    def _follow(self, query: PodLogQuery, pod: PodFact, position: Position) -> Iterator[str]:
        """One stream, until it ends or breaks. Says nothing of a line that is not complete: it will come again."""
        path, parameters = _build_request(query, pod, position)
        try:
            with self._client.stream(
                path, what=f"log of {pod.name}", verb="read", query=parameters | {"follow": "true"}
            ) as stream:
                for raw in _split_lines(stream.chunks()):
                    if raw.endswith(b"\n"):
                        yield from _select(raw, position, query)
        except Unreachable:
            self._pace.pause(_RETRY_S)
        except (ApiError, RequestError) as fault:
            if fault.refusal.status not in (400, 404):  # not started yet, or gone: the caller looks
                raise

    def _read_once(
        self, query: PodLogQuery, pod: PodFact, position: Position, *, previous: bool = False, last: bool = False
    ) -> Iterator[str]:
        """What there is now. `last`: nothing more will come, so an unterminated line counts."""
        path, parameters = _build_request(query, pod, position)
        if previous:
            parameters["previous"] = "true"
        try:
            with self._slots.reading():
                content = self._client.read_bytes(path, what=f"log of {pod.name}", query=parameters)
        except (ApiError, RequestError) as fault:
            if fault.refusal.status == 404 and not previous:
                yield f"[muster] the rest of the log of {pod.name} is gone: Kubernetes has removed the pod\n"
            elif fault.refusal.status not in (400, 404):
                raise
            return
        for raw in _split_lines(iter((content,))):
            if raw.startswith(_NO_LOG):
                yield f"[muster] the rest of the log of {pod.name} is gone: its node has removed the container\n"
            elif raw.endswith(b"\n") or last or previous or not query.tail:
                yield from _select(raw, position, query)


def _build_request(query: PodLogQuery, pod: PodFact, position: Position) -> tuple[str, dict[str, str]]:
    parameters = {"container": CONTAINER, "timestamps": "true"}
    since = position.resume()
    if since is not None:
        parameters["sinceTime"] = since
    return f"/api/v1/namespaces/{query.namespace}/pods/{pod.name}/log", parameters


def _select(raw: bytes, position: Position, query: PodLogQuery) -> Iterator[str]:
    stamp, line = split_stamp(raw)
    if stamp is None:
        yield line.decode(errors="replace")  # not from a container's log: a message of the node, shown as it is
        return
    if position.take(stamp, line) and (query.until is None or stamp <= query.until):
        yield line.decode(errors="replace")


def _describe_absence(query: PodLogQuery, pod: PodFact | None) -> str:
    where = f"{query.role}/{query.index}"
    if pod is not None:
        return f"[muster] {where} has no log yet: pod {pod.name} is {pod.phase}{': ' + pod.why if pod.why else ''}\n"
    return f"[muster] the log of {where} is not there: it has no pod, or Kubernetes has removed it with its log\n"


def _split_lines(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Lines with their newline; the last one may lack it."""
    rest: list[bytes] = []
    for chunk in chunks:
        first, *more = chunk.split(b"\n")
        rest.append(first)
        for line in more:
            yield b"".join(rest) + b"\n"
            rest = [line]
    if any(rest):
        yield b"".join(rest)


# -- times ------------------------------------------------------------------------------------------------------------


def split_stamp(raw: bytes) -> tuple[Stamp | None, bytes]:
    """`2026-11-21T02:20:49.123456789Z text`: the time and the text. (None, raw) without a time."""
    word, space, line = raw.partition(b" ")
    if not space:
        word, line = raw.rstrip(b"\n"), raw[len(raw.rstrip(b"\n")) :]
    try:
        return parse_stamp(word.decode("ascii")), line
    except ValueError:
        return None, raw


def parse_stamp(text: str) -> Stamp:
    """RFC 3339 with up to nine digits of a second, in any zone.

    Raises:
        ValueError: not a time.
    """
    if len(text) < 20 or text[10] != "T":
        raise ValueError(text)
    whole, zone_and_fraction = text[:19], text[19:]
    fraction, zone = "", zone_and_fraction
    if zone_and_fraction.startswith("."):
        digits = len(zone_and_fraction[1:]) - len(zone_and_fraction[1:].lstrip("0123456789"))
        fraction, zone = zone_and_fraction[1 : 1 + digits], zone_and_fraction[1 + digits :]
    moment = datetime.fromisoformat(whole + ("+00:00" if zone == "Z" else zone))
    if moment.tzinfo is None:
        raise ValueError(text)
    return int(moment.timestamp()), int(fraction.ljust(9, "0")[:9] or 0)


def format_stamp(stamp: Stamp) -> str:
    """For `sinceTime`, which knows whole seconds."""
    return datetime.fromtimestamp(stamp[0], tz=timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def to_stamp(moment: datetime) -> Stamp:
    """A caller's time; without a zone it is local, as TorchX means it."""
    aware = moment.astimezone(timezone.utc)
    return int(aware.timestamp()), aware.microsecond * 1000
