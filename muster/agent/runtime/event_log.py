"""Every transition of an agent as one frozen record, and the sinks that write the records.

`muster/cli/history/events.schema.json` declares what a record can report and what its detail has. A test of every
file that an agent writes fails on anything that is not declared there. The records of one node show a recovery:
`worker_failed` (detected), `round_broken`, `workers_stopped`, `round_formed`, `workers_started`.
"""

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Protocol

from muster._shared.contract import FORMAT, is_resize
from muster._shared.records import NO_ITEMS, record, replace
from muster.agent.runtime.loop import Clock

if TYPE_CHECKING:
    from muster._shared.job_view import JobStatus, NodeStatus, RankStatus

    OnLook = Callable[[NodeStatus, tuple[RankStatus, ...], JobStatus | None], None]
    """Gets a look at this node, at its ranks, and at the job if this agent leads."""

EVENT_LOG_HANDLERS = ("null", "console", "dynamic_rendezvous")
"""Values of `--event-log-handler`, by torchrun's names. Only `console` has a sink."""

_KEPT_RECORDS = 32
"""Records kept for a sink that is added later, because the log folder is known only after the first round has formed.
"""


_WAITING_RECORDS = 1000
"""Records kept in memory for a disk that does not answer."""


@record
class EventRecord:
    """One transition."""

    format: int = FORMAT
    """The number of the records' format. A reader refuses another one."""
    agent: str = ""
    """Names the process that wrote the record, because agents of one machine may share a file."""
    time_s: float
    """Wall clock, in seconds since the epoch; for people, never compared across hosts."""
    monotonic_s: float
    """Monotonic clock of this node, for durations between records of one agent."""
    node: int | None
    """Group rank in the round; None before the first."""
    node_index: int | None
    """This node's index, from its scheduler or `--node-rank`. Without either, it equals `node`."""
    round: int
    """Number of the round; 0 before the first."""
    attempt: int
    """How often workers were restarted because one failed."""
    what: str
    """The name of the transition."""
    ranks: tuple[int, ...] = ()
    """The global ranks that the transition concerns."""
    duration_s: float | None = None
    """For workers_started, the time since round_formed; for workers_stopped, since round_broken."""
    detail: Mapping[str, object] = NO_ITEMS
    """More fields, which depend on the transition."""

    def to_json(self) -> dict[str, object]:
        """Return JSON types, provided that the detail's values are of such types."""
        return {**self.__dict__, "detail": dict(self.detail)}


class EventSink(Protocol):
    """Writes records. It must not raise for outside failures (a full disk), and must not block."""

    def write(self, record: EventRecord) -> None:
        """Write one record."""
        ...

    def close(self) -> None:
        """Release its resources. Idempotent."""
        ...


class JsonlSink:
    """One JSON object per line, appended soon: after a kill the file lacks only the last moments.

    Everything that touches the file runs in another thread, because its disk may hang.
    """

    def __init__(
        self,
        path: str,
        submit: Callable[[Callable[[], None]], None],
        open_file: Callable[[str, int], int],
        on_trouble: Callable[[str], None] | None = None,
    ) -> None:
        """Write to `path` from now on; it is opened for appending with the first record.

        Args:
            path: the file.
            submit: runs a call in that thread, in order.
            open_file: opens the file with flags of `os.open`; raises OSError.
            on_trouble: gets one line, in any thread, when the file cannot be written any more.
        """
        self._path = path
        self._submit = submit
        self._open_file = open_file
        self._on_trouble = on_trouble
        self._is_open = True
        self._waiting = 0
        """Records that the thread has not written. Both threads change it, so it is only roughly right."""
        self._fd: int | None = None
        """Belongs to the thread."""

    def write(self, record: EventRecord) -> None:
        """See `EventSink`. A full disk ends the file but not the job; so does a disk that has hung for too long."""
        if not self._is_open:
            return
        if self._waiting >= _WAITING_RECORDS:
            self._stop("the disk does not answer")
            return
        data = json.dumps(record.to_json(), default=str).encode() + b"\n"
        self._waiting += 1
        self._submit(lambda: self._append(data))

    def _append(self, data: bytes) -> None:
        self._waiting -= 1
        if not self._is_open:
            return
        try:
            if self._fd is None:
                self._fd = self._open_file(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            # One write per record, because agents append to the same file.
            _append(self._fd, data)
        except OSError as error:
            self._stop(error.strerror or str(error))

    def _stop(self, reason: str) -> None:
        self._is_open = False
        self._submit(self._close_file)
        if self._on_trouble is not None:
            self._on_trouble(f"cannot write {self._path}: {reason}")

    def close(self) -> None:
        """See `EventSink`. What was written before is still appended."""
        self._submit(self._close_file)

    def _close_file(self) -> None:
        self._is_open = False
        fd, self._fd = self._fd, None
        if fd is not None:
            with contextlib.suppress(OSError):
                os.close(fd)


def _append(fd: int, data: bytes) -> None:
    """Write all data, in one write if there is room. A second write only finds the reason for a short one.

    Raises:
        OSError: not all of it was written.
    """
    while data:
        data = data[os.write(fd, data) :]


class ConsoleSink:
    """One JSON object per record and line, printed like the agent's other lines."""

    def __init__(self, print_text: Callable[[str], None]) -> None:
        """Keep `print_text`, which prints one line unchanged and must not block."""
        self._print_text = print_text

    def write(self, record: EventRecord) -> None:
        """See `EventSink`."""
        self._print_text(json.dumps(record.to_json(), default=str))

    def close(self) -> None:
        """See `EventSink`. The console is not ours to close."""


class StampedRound(Protocol):
    """What records say about their round."""

    @property
    def number(self) -> int:
        """The round's number, which grows until the job ends."""
        ...

    @property
    def attempt(self) -> int:
        """How often workers were restarted because one failed."""
        ...

    @property
    def group_rank(self) -> int:
        """This node's group rank."""
        ...

    @property
    def node_index(self) -> int:
        """This node's index."""
        ...


class RunTimes:
    """What the job's last line needs of all records, however many there were."""

    def __init__(self) -> None:
        self.restarts = 0
        """How often workers were started again, but not because a node joined, or left as it was told to."""
        self.without_workers_s = 0.0
        """Time from the ends of their rounds to the starts of the next ones."""
        self._began_s: float | None = None
        self._last_s = 0.0
        self._broken_s: float | None = None
        self._is_resize = False

    @property
    def duration_s(self) -> float:
        """Time from the first record to the last."""
        return self._last_s - (self._began_s or 0.0)

    def add(self, what: str, now_s: float, *, is_resize: bool = False) -> None:
        """Count one record."""
        self._began_s = now_s if self._began_s is None else self._began_s
        self._last_s = now_s
        if what in ("round_broken", "fenced"):
            self._is_resize = is_resize and (self._broken_s is None or self._is_resize)
            self._broken_s = now_s if self._broken_s is None else self._broken_s
        elif what == "workers_started" and self._broken_s is not None:
            if not self._is_resize:
                self.restarts += 1
                self.without_workers_s += now_s - self._broken_s
            self._broken_s = None


class EventLog:
    """Builds records and passes each to every sink."""

    def __init__(self, clock: Clock, sinks: Iterable[EventSink] = ()) -> None:
        self._clock = clock
        self._sinks = list(sinks)
        self._agent = os.urandom(4).hex()
        self._since: dict[str, float] = {}
        self._kept: list[EventRecord] = []
        self._held: list[EventRecord] | None = None
        """Records that wait for `release`; None if nothing waits."""
        self.times = RunTimes()
        self.find_round: Callable[[], StampedRound | None] = lambda: None
        """Returns the current round, for every record; None before the first."""
        self.status_readers: list[Callable[[JobStatus], None]] = []
        """Get the content of the status file whenever that changes; must not block."""
        self.on_look: OnLook | None = None
        """Gets each look at the workers; must not block."""
        self.node_facts: dict[str, str] = {}
        """What sinks know of this node, by the names of fields of `NodeStatus`."""

    def add_sink(self, sink: EventSink, *, replay: bool = False) -> None:
        """Pass every record from now on to `sink`; with `replay`, also this agent's first ones. `close` closes it."""
        self._sinks.append(sink)
        if replay:
            for record in self._kept:
                sink.write(record)

    def tell_status(self, status: "JobStatus") -> None:
        """Pass on the content of the status file."""
        for read in self.status_readers:
            read(status)

    def mark(self, name: str) -> None:
        """Start a measurement that a later record ends."""
        self._since[name] = self._clock.now_s()

    @property
    def is_holding(self) -> bool:
        """Whether records wait for `release`."""
        return self._held is not None

    def hold(self) -> None:
        """Hold back the next record and all after it until `release`, because some of its detail is not known yet."""
        self._held = []

    def release(self, **detail: object) -> None:
        """Pass on the records that were held back; the first one gets this detail."""
        held, self._held = self._held or [], None
        for number, each in enumerate(held):
            self._pass_on(each if number else replace(each, detail={**each.detail, **detail}))

    def write(self, what: str, *, ranks: Iterable[int] = (), since: str | None = None, **detail: object) -> None:
        """Write one record; `since` names the mark that its duration is measured from."""
        now_s = self._clock.now_s()
        self.times.add(what, now_s, is_resize=is_resize(detail))
        began_s = self._since.get(since) if since else None
        current = self.find_round()
        record = EventRecord(
            agent=self._agent,
            time_s=self._clock.wall_s(),
            monotonic_s=now_s,
            node=current.group_rank if current else None,
            node_index=current.node_index if current else None,
            round=current.number if current else 0,
            attempt=current.attempt if current else 0,
            what=what,
            ranks=tuple(ranks),
            duration_s=None if began_s is None else now_s - began_s,
            detail=detail,
        )
        if self._held is None:
            self._pass_on(record)
        else:
            self._held.append(record)

    def _pass_on(self, record: EventRecord) -> None:
        if len(self._kept) < _KEPT_RECORDS and record.what != "worker_released":
            self._kept.append(record)
        for sink in self._sinks:
            sink.write(record)

    def close(self) -> None:
        """Pass on the records that are held back, and close every sink."""
        self.release()
        for sink in self._sinks:
            sink.close()
