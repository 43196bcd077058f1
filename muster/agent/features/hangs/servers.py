"""Asks this node's workers for their flight recorders without disturbing them, because torch's server answers.

All of it may block, and runs in a thread. A stopped worker does not answer, so each request has a deadline, and workers
are asked in parallel.
"""

import contextlib
import math
import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from muster._shared import processes
from muster._shared.records import record, replace
from muster._shared.reports import Collective, Group, RankView
from muster.agent.features.hangs.reading import read_groups, read_recorder
from muster.agent.runtime.limits import TORCH_MARGIN_S
from muster.agent.runtime.loop import run_limited

if TYPE_CHECKING:
    from muster.agent.features.hangs.monitor import Monitor

DEADLINE_S = 1.0
"""The longest that one worker's answer may take. 2000 entries take 0.1 s."""
JOIN_S = 0.2
"""How much longer the asking threads may take."""
_STOPPED = ("T", "t")
"""States in which a process answers nothing."""
_SHARE = 0.005
"""Share of the time. One core of many would notice no more."""
_ANSWER_LIMIT_BYTES = 64 << 20
_FILE_LIMIT_BYTES = 1 << 20
GLOO_HANDLERS = ("fr_trace_json",)
"""The recorder of gloo and other backends without device events. torch before 2.10 does not answer it."""
ALL_HANDLERS = (*GLOO_HANDLERS, "dump_nccl_trace_json")
"""And NCCL's, a separate recorder.

It asks CUDA about its events, which may end a capture of a CUDA graph. So it is used only in a hang, or if a person
asks and NCCL's own monitor does not know better.
"""
_GROUPS_LINK = "/memfd:muster-groups"


@record
class WorkerServer:
    """The place of a worker's server, if it has one."""

    pid: int
    state: str
    """The kernel's process state (R, S, D, T, Z) of the worker itself."""
    server_pid: int | None
    """The process that has initialised a process group; None if none of the worker's processes has."""


def find_places(sessions: Mapping[int, Iterable[tuple[int, int]]]) -> dict[int, WorkerServer]:
    """Find the servers of workers.

    Args:
        sessions: id and start time of all processes of a worker's session, by the worker's process id.
    """
    return {pid: _find_place(pid, (each for each, _ in members)) for pid, members in sessions.items()}


def _find_place(pid: int, members: Iterable[int]) -> WorkerServer:
    server_pid = next((each for each in (pid, *sorted(members)) if _has_groups(each)), None)
    stat = processes.read_stat(server_pid or pid)
    return WorkerServer(pid=pid, state="" if stat is None else stat[0], server_pid=server_pid)


def _choose_number(place: int) -> int:
    """Choose the number as `workers.hooks.groups` does, which imports nothing of ours."""
    return min(os.sysconf("SC_OPEN_MAX"), 1024) - 2 - place


def _has_groups(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/{pid}/fd/{_choose_number(1)}").startswith(_GROUPS_LINK)
    return False


@record
class Answer:
    """What a worker's server and its file of groups have answered."""

    groups: tuple[Group, ...] = ()
    has_begun: bool = False
    """Whether it has called `init_process_group`."""
    is_initialising: bool = False
    is_answering: bool = False
    took_s: float = 0.0
    """How long the server has taken; 0 if it has not answered."""
    device_timeout_s: float = 0.0
    """See `KnownGroups`."""


def read_workers(places: Mapping[int, WorkerServer], handlers: tuple[str, ...] = ALL_HANDLERS) -> dict[int, Answer]:
    """Read all workers in parallel within `DEADLINE_S`, by the keys of `places`.

    Args:
        places: by any key.
        handlers: those of the server, each of which returns the groups of one recorder.

    Raises:
        RuntimeError: no thread is left.
    """
    answers = {key: Answer() for key in places}
    now_ns = time.time_ns()  # ages of one collective are compared

    def read(key: int, pid: int) -> None:
        answers[key] = _read_worker(pid, handlers, now_ns)

    reads = [
        partial(read, key, place.server_pid)
        for key, place in places.items()
        if place.server_pid is not None and place.state not in _STOPPED
    ]
    run_limited(reads, DEADLINE_S + JOIN_S)
    return dict(answers)


@record
class Progress:
    """A worker's progress in its collectives."""

    collectives: tuple[int, ...] | None = None
    """Changes whenever it enters or completes one; None if it is not known to have entered any."""
    has_answered: bool = True
    """See `Activity`."""
    timeout_s: float = 0.0
    """The timeout of a collective in which it waits, once torch is about to end it because of that; otherwise 0."""
    is_waiting: bool = False
    """Whether it waits in a collective, or in `init_process_group`."""
    launches: tuple[int, ...] | None = None
    """See `Activity`."""


class WorkerReader:
    """Reads the workers' progress in their collectives again and again, at a bounded cost.

    The recorder cannot be asked only for its counters, and 2000 entries take a worker's threads 0.1 s of CPU time. So
    the longer the workers need, the less often they are asked, to take at most `_SHARE` of the time.
    """

    def __init__(
        self, limit_s: float, monitor: "Monitor | None" = None, on_death: Callable[[str], None] = lambda _: None
    ) -> None:
        """Keep the settings.

        Args:
            limit_s: the time after which workers count as idle. They are asked several times within it, whatever it
                costs.
            monitor: NCCL's. It is asked while the workers show only CPU time, which NCCL uses while it waits.
            on_death: called by the reading thread with a process that NCCL's monitors have given up.
        """
        self._longest_s = limit_s / 4
        self._monitor = monitor
        self._on_death = on_death
        self._monitor_due_s = 0.0
        self._launches: dict[int, tuple[int, ...] | None] = {}
        """Launches by the worker's process id, while the workers show nothing else."""
        self._progress: dict[int, tuple[int, ...]] = {}
        """Counters by the worker's process id."""
        self._waits: dict[int, _Wait] = {}
        """Waits by the worker's process id."""
        self._waiting: set[int] = set()
        """The process ids of workers that wait, as far as their last answers say."""
        self._unanswered: set[int] = set()
        """The process ids of workers whose servers have not answered the last time."""
        self.answers: Mapping[int, Answer] = {}
        """The workers' last answers by process id, as a new mapping at each look. Any thread may read it."""
        self.answered_s = -math.inf
        """The time of these answers, by the monotonic clock."""
        self._due_s = 0.0
        self._device_limit_s = math.inf
        """How long a worker is idle before NCCL's recorder is read as well."""
        self._offset_s = time.time() - time.monotonic()

    def read_progress(
        self, sessions: Mapping[int, Iterable[tuple[int, int]]], idle_s: float, silent_s: float = 0.0
    ) -> dict[int, Progress]:
        """Read the workers' progress by process id. A worker that does not answer now keeps its last progress.

        Args:
            sessions: see `find_places`.
            idle_s: how many seconds the longest idle worker has been idle.
            silent_s: for how many seconds no worker has shown anything but CPU time.
        """
        if self._monitor is not None:
            self._ask_monitor(self._monitor, sessions, silent_s)
        began_s = time.monotonic()
        if began_s >= self._due_s or self._list_ending(began_s):
            places = find_places(sessions)
            answers = read_workers(places, GLOO_HANDLERS)
            self.answers, self.answered_s = answers, began_s
            for pid, answer in answers.items():
                progress = RankView(global_rank=0, node=0, host="", groups=answer.groups).progress
                if progress is not None:
                    self._progress[pid] = progress
                elif answer.is_initialising:  # the store's host uses some CPU time
                    self._progress.setdefault(pid, ())
                elif answer.has_begun and self._progress.get(pid) == ():
                    del self._progress[pid]  # returned; an older torch shows no more
            took_s = max((answer.took_s for answer in answers.values()), default=0.0)
            self._due_s = time.monotonic() + min(took_s / _SHARE, self._longest_s)
            timeouts = [answer.device_timeout_s for answer in answers.values() if answer.device_timeout_s]
            self._device_limit_s = min(timeouts, default=math.inf) - TORCH_MARGIN_S
            self._waiting = {
                pid
                for pid, answer in answers.items()
                if _is_waiting(answer) or (not answer.is_answering and pid in self._waiting & self._progress.keys())
            }
            self._unanswered = {
                pid
                for pid, answer in answers.items()
                if (answer.has_begun or pid in self._unanswered) and not answer.is_answering
            }
            self._find_waits(read_workers(places) if idle_s >= self._device_limit_s else answers)
        ending = self._list_ending(time.monotonic())
        return {
            pid: Progress(
                collectives=self._progress.get(pid),
                has_answered=pid in self._progress or pid not in self._unanswered,
                timeout_s=self._waits[pid].timeout_s if pid in ending else 0.0,
                is_waiting=pid in self._waiting,
                launches=self._launches.get(pid),
            )
            for pid in sessions
        }

    def have_begun(self, pids: Iterable[int]) -> bool:
        """Return whether all these workers have called `init_process_group`, at the last look."""
        answers = self.answers
        return all(pid in answers and answers[pid].has_begun for pid in pids)

    def _ask_monitor(
        self, monitor: "Monitor", sessions: Mapping[int, Iterable[tuple[int, int]]], silent_s: float
    ) -> None:
        """Ask the monitor, but not before a quarter of the limit has passed, so that a moving job is not asked."""
        from muster.agent.features.hangs.monitor import count_launches

        if silent_s < self._longest_s:
            self._launches = {}
            monitor.stop_listening()
            return
        for death in monitor.read_deaths():
            self._on_death(death)
        if time.monotonic() >= self._monitor_due_s:
            found = monitor.look(sessions, min(DEADLINE_S, self._longest_s / 5))
            if found:
                self._launches = {pid: count_launches(each) for pid, each in found.items()}
            self._monitor_due_s = time.monotonic() + self._longest_s / 2

    def _list_ending(self, now_s: float) -> set[int]:
        return {pid for pid, wait in self._waits.items() if wait.ends_s - TORCH_MARGIN_S <= now_s}

    def _find_waits(self, answers: Mapping[int, Answer]) -> None:
        now_s = time.monotonic()
        # Ages by the wall clock are less certain after it is set or the machine was suspended.
        since_s = now_s + abs(time.time() - now_s - self._offset_s)
        self._waits = {pid: wait for pid, wait in self._waits.items() if pid in answers}
        for pid, answer in answers.items():
            if not answer.is_answering:
                continue
            waits = [
                _Wait(ends_s=since_s + entry.timeout_s - entry.age_s, timeout_s=entry.timeout_s)
                for group in answer.groups
                for entry in list_open(group)
                if entry.timeout_s
            ]
            if waits:
                self._waits[pid] = min(waits, key=lambda wait: wait.ends_s)
            else:
                self._waits.pop(pid, None)


@record
class _Wait:
    """A worker's wait in a collective."""

    ends_s: float
    """When torch ends it, by the monotonic clock."""
    timeout_s: float


def _is_waiting(answer: Answer) -> bool:
    return answer.is_initialising or any(map(list_open, answer.groups))


def list_open(group: Group) -> list[Collective]:
    """Return what is not done, except if a later call is done: what a CUDA graph has captured is never done."""
    found: list[Collective] = []
    passed: set[bool] = set()
    for entry in reversed(group.entries):
        if entry.is_done:
            passed.add(entry.is_p2p)
        elif entry.is_p2p not in passed:
            found.append(entry)
    return found


def find_open(answer: Answer) -> tuple[str, float] | None:
    """Return the collective in which the worker has waited longest, and how long; None if it reports none."""
    if answer.is_initialising:
        return "init_process_group", 0.0
    waits = [(entry.age_s, entry, group) for group in answer.groups for entry in list_open(group)]
    if not waits:
        return None
    age_s, entry, group = max(waits, key=lambda wait: wait[0])
    return f"{entry.operation} #{entry.number} of {group.description or f'group {group.name}'}", age_s


def find_arrivals(answers: Mapping[int, Answer]) -> dict[int, float]:
    """Return how many seconds after the first worker each has entered a collective that all have entered.

    The result is by process id, at the collective where this was most, because at many others of a step all wait for
    one another. It is empty if there is none. All ages are of one moment and machine.
    """
    ages = [_list_ages(answer) for answer in answers.values()]
    common = set(ages[0]).intersection(*ages[1:]) if len(ages) > 1 else set()
    if not common:
        return {}
    first = {call: max(each[call] for each in ages) for call in common}
    return {pid: max(first[call] - own[call] for call in common) for pid, own in zip(answers, ages, strict=True)}


def _list_ages(answer: Answer) -> dict[tuple[str, int], float]:
    return {
        (group.name, entry.number): entry.age_s
        for group in answer.groups
        for entry in group.entries
        if not entry.is_p2p
    }


def _read_worker(pid: int, handlers: tuple[str, ...], now_ns: int) -> Answer:
    try:
        with open(f"/proc/{pid}/fd/{_choose_number(1)}", "rb") as file:
            known = read_groups(file.read(_FILE_LIMIT_BYTES))
    except OSError:
        return Answer()
    began_s = time.monotonic()
    texts = {handler: ask(pid, handler, began_s + DEADLINE_S - time.monotonic()) for handler in handlers}
    is_answering = any(text is not None for text in texts.values())
    took_s = time.monotonic() - began_s if is_answering else 0.0
    groups: list[Group] = []
    for handler, text in texts.items():
        if text is None and handler not in GLOO_HANDLERS:
            continue
        found = read_recorder(text or b"{}", now_ns, known.ranks)
        # Each of a group's two backends may count by itself.
        groups += found if handler in GLOO_HANDLERS else [replace(each, name=f"{each.name} nccl") for each in found]
    return Answer(
        groups=tuple(groups),
        has_begun=True,
        is_initialising=known.is_initialising,
        is_answering=is_answering,
        took_s=took_s,
        device_timeout_s=known.device_timeout_s,
    )


def ask(pid: int, handler: str, deadline_s: float) -> bytes | None:
    """Call a handler of the worker's server; return the body of its answer, or None if none comes by the deadline."""
    until_s = time.monotonic() + deadline_s
    request = f"POST /handler/{handler} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    received = bytearray()
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(max(0.001, deadline_s))
            connection.connect(f"/proc/{pid}/fd/{_choose_number(0)}")
            connection.sendall(request.encode())
            while len(received) < _ANSWER_LIMIT_BYTES:
                connection.settimeout(max(0.001, until_s - time.monotonic()))
                part = connection.recv(1 << 20)
                if not part:
                    break
                received += part
    except OSError:
        return None
    head, _, body = bytes(received).partition(b"\r\n\r\n")
    return body if head.startswith(b"HTTP/1.1 200") else None


def build_view(place: WorkerServer, answer: Answer, *, global_rank: int, node: int, host: str) -> RankView:
    """Combine what is known of one rank."""
    return RankView(
        global_rank=global_rank,
        node=node,
        host=host,
        state=place.state,
        is_answering=answer.is_answering,
        has_server=place.server_pid is not None,
        is_initialising=answer.is_initialising,
        groups=answer.groups,
    )
