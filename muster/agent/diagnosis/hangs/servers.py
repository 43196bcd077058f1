"""Asks the workers of this node for their flight recorders, without disturbing them: torch's server answers by itself.

All of it may block, and runs in a thread. A worker that is stopped does not answer: each request has a deadline, and
workers are asked side by side.
"""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterable, Mapping

from muster import _processes
from muster.agent.diagnosis.hangs.reading import read_groups, read_recorder
from muster.agent.diagnosis.report import Group, RankView
from muster.agent.runtime.records import record, replace

DEADLINE_S = 1.0
"""The longest that one worker's answer may take. 2000 entries take 0.1 s."""
JOIN_S = 0.2
"""How much longer the threads that ask them may take."""
_STOPPED = ("T", "t")
"""States in which a process answers nothing."""
_SHARE = 0.005
"""Of the time: one core of many would notice no more."""
_ANSWER_LIMIT_BYTES = 64 << 20
_FILE_LIMIT_BYTES = 1 << 20
_LOOK = ("fr_trace_json",)
"""The recorder of gloo and other backends without events of a device. torch before 2.10 does not answer it."""
_DIAGNOSIS = (*_LOOK, "dump_nccl_trace_json")
"""And NCCL's, which is another one. It asks CUDA about its events, which may end a capture of a CUDA graph: only in a
hang, or where a person asks."""
_GROUPS_LINK = "/memfd:muster-groups"


@record
class Place:
    """Where a worker's server is, if it has one."""

    pid: int
    state: str
    """The kernel's process state (R, S, D, T, Z) of the worker itself."""
    server_pid: int | None
    """The process that has initialised a process group; None: none of the worker's processes has."""


def find_places(sessions: Mapping[int, Iterable[tuple[int, int]]]) -> dict[int, Place]:
    """Find the servers of workers.

    Args:
        sessions: by the worker's process id, id and start time of all processes of its session.
    """
    return {pid: _find_place(pid, (each for each, _ in members)) for pid, members in sessions.items()}


def _find_place(pid: int, members: Iterable[int]) -> Place:
    server_pid = next((each for each in (pid, *sorted(members)) if _has_groups(each)), None)
    stat = _processes.read_stat(server_pid or pid)
    return Place(pid=pid, state="" if stat is None else stat[0], server_pid=server_pid)


def _choose_number(place: int) -> int:
    """As `workers.torch_hook`, which imports nothing of ours, has it."""
    return min(os.sysconf("SC_OPEN_MAX"), 1024) - 2 - place


def _has_groups(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/{pid}/fd/{_choose_number(1)}").startswith(_GROUPS_LINK)
    return False


@record
class Answer:
    """What a worker's server and its file of groups have said."""

    groups: tuple[Group, ...] = ()
    has_begun: bool = False
    """It has called `init_process_group`."""
    is_initialising: bool = False
    is_answering: bool = False
    took_s: float = 0.0
    """How long the server has taken; 0: it has not answered."""


def read_workers(places: Mapping[int, Place], handlers: tuple[str, ...] = _DIAGNOSIS) -> dict[int, Answer]:
    """Read all workers, side by side, within `DEADLINE_S`; the keys of `places` are kept.

    Args:
        places: by any key.
        handlers: of the server; each gives the groups of one recorder.
    """
    answers = {key: Answer() for key in places}

    def read(key: int, pid: int) -> None:
        answers[key] = _read_worker(pid, handlers)

    threads = [
        threading.Thread(target=read, args=(key, place.server_pid), daemon=True)
        for key, place in places.items()
        if place.server_pid is not None and place.state not in _STOPPED
    ]
    for thread in threads:
        thread.start()
    until_s = time.monotonic() + DEADLINE_S + JOIN_S
    for thread in threads:
        thread.join(max(0.0, until_s - time.monotonic()))
    return dict(answers)


class WorkerReader:
    """Reads again and again how far the workers are in their collectives, at a bounded cost.

    The recorder cannot be asked for its counters alone, and 2000 entries take a worker's threads 0.1 s of CPU time. So
    the workers are asked the less often the longer they need: for at most `_SHARE` of the time.
    """

    def __init__(self, limit_s: float) -> None:
        """Make one.

        Args:
            limit_s: after which workers count as idle: they are asked several times in it, whatever it costs.
        """
        self._longest_s = limit_s / 4
        self._progress: dict[int, tuple[int, ...]] = {}
        """By the worker's process id."""
        self._due_s = 0.0

    def read_progress(self, sessions: Mapping[int, Iterable[tuple[int, int]]]) -> dict[int, tuple[int, ...]]:
        """Read what changes whenever a worker enters or completes a collective, by the worker's process id.

        Workers that do not answer now keep what they said last; those that have never entered one are left out.
        """
        began_s = time.monotonic()
        if began_s >= self._due_s:
            places = find_places(sessions)
            answers = read_workers(places, _LOOK)
            for pid, answer in answers.items():
                progress = RankView(global_rank=0, node=0, host="", groups=answer.groups).progress
                if progress is not None:
                    self._progress[pid] = progress
                elif answer.is_initialising:  # a rank that hosts the store uses some CPU time while it waits in there
                    self._progress.setdefault(pid, ())
                elif answer.has_begun and self._progress.get(pid) == ():
                    del self._progress[pid]  # it has come back; an older torch shows no collectives after it
            took_s = max((answer.took_s for answer in answers.values()), default=0.0)
            self._due_s = time.monotonic() + min(took_s / _SHARE, self._longest_s)
        return {pid: self._progress[pid] for pid in sessions if pid in self._progress}


def _read_worker(pid: int, handlers: tuple[str, ...]) -> Answer:
    try:
        with open(f"/proc/{pid}/fd/{_choose_number(1)}", "rb") as file:
            is_initialising, members = read_groups(file.read(_FILE_LIMIT_BYTES))
    except OSError:
        return Answer()
    began_s = time.monotonic()
    texts = {handler: ask(pid, handler, began_s + DEADLINE_S - time.monotonic()) for handler in handlers}
    is_answering = any(text is not None for text in texts.values())
    took_s = time.monotonic() - began_s if is_answering else 0.0
    groups: list[Group] = []
    for handler, text in texts.items():
        if text is None and handler not in _LOOK:
            continue
        found = read_recorder(text or b"{}", time.time_ns(), members)
        # A group may have two backends, each of which counts by itself.
        groups += found if handler in _LOOK else [replace(each, name=f"{each.name} nccl") for each in found]
    return Answer(
        groups=tuple(groups),
        has_begun=True,
        is_initialising=is_initialising,
        is_answering=is_answering,
        took_s=took_s,
    )


def ask(pid: int, handler: str, deadline_s: float) -> bytes | None:
    """Call a handler of the worker's server; the body of its answer, None when there is none by the deadline."""
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


def build_view(place: Place, answer: Answer, *, global_rank: int, node: int, host: str) -> RankView:
    """Put together what is known of one rank."""
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
