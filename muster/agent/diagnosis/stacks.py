"""Collects Python stacks of live workers without disturbing them.

Workers register faulthandler on `workers.program.get_stack_signal()`. This handler in C writes all threads' stacks to
the rank's stack file even if the main thread is stuck in native code. A process that has not registered it (a
`--no-python` program, a worker that is still starting) never gets the signal, which would kill it.
"""

import os
from collections.abc import Callable, Iterable, Mapping

from muster._shared import processes
from muster._shared.foreign_files import read_regular
from muster._shared.records import record
from muster._shared.reports import Stack, remove_thread_ids
from muster.agent.diagnosis.tracebacks import clean_stacks
from muster.agent.runtime.loop import Loop
from muster.agent.workers.program import get_stack_signal

LIMIT_S = 2.0
"""The longest time that stacks may delay a kill."""

_TICK_S = 0.002
_QUIET_S = 0.004
"""A dump is complete when its file has not grown for this long, because faulthandler writes without pauses."""


@record
class StackTarget:
    """A live worker and the file that gets its stacks."""

    pid: int
    stack_file: str


class _Dump:
    """The stacks of one worker: requested when this is made, and complete when `is_complete` is true."""

    def __init__(self, target: StackTarget, now_s: float) -> None:
        self.target = target
        self.is_complete = False
        self._start_bytes = self._size_bytes = _size_bytes(target.stack_file)
        self._changed_s = now_s

    @property
    def has_text(self) -> bool:
        return self._size_bytes > self._start_bytes

    def update(self, now_s: float) -> None:
        """Check the file. A complete dump does not change, because what is written later belongs to another dump."""
        if self.is_complete:
            return
        size = _size_bytes(self.target.stack_file)
        if size != self._size_bytes:
            self._size_bytes, self._changed_s = size, now_s
        if self.has_text:
            self.is_complete = now_s - self._changed_s >= _QUIET_S
        else:
            self.is_complete = processes.read_stat(self.target.pid) is None

    def read_text(self) -> str:
        """Read what the worker has written; "" if it cannot be read."""
        try:
            data = read_regular(self.target.stack_file, self._size_bytes - self._start_bytes, self._start_bytes)
        except OSError:
            return ""
        return clean_stacks(data.decode(errors="replace"))


@record
class _Request:
    """One call of `StackCollector.collect`."""

    dumps: dict[int, _Dump]
    limit_s: float
    on_done: Callable[[dict[int, str]], None]


def can_dump(pid: int) -> bool:
    """Return whether the process catches the stack signal and can run its handler now."""
    number = get_stack_signal()
    if number is None:
        return False
    fields = processes.read_status(pid)
    caught = int(fields.get("SigCgt", "0"), 16) >> (number - 1) & 1
    return bool(caught) and fields.get("State", "Z")[0] not in "TtZX"


def find_python(targets: Mapping[int, StackTarget]) -> dict[int, StackTarget]:
    """Find the program that writes stacks below each worker that is a shell or another command.

    Args:
        targets: the workers. Those without such a program below them are kept.
    """
    found = dict(targets)
    for local_rank, target in targets.items():
        pids = (target.pid, *sorted(processes.list_descendants(target.pid)))  # children mostly follow
        pid = next((each for each in pids if can_dump(each)), target.pid)
        found[local_rank] = StackTarget(pid=pid, stack_file=target.stack_file)
    return found


class StackCollector:
    """Collects the stacks of several workers at once. Requests may overlap: each has its own answer and its own limit.

    A request for a worker that is still writing a dump shares that dump. With a second signal the worker would write
    another dump right behind the first, and the two could not be separated.
    """

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._requests: list[_Request] = []

    def collect(self, targets: Mapping[int, StackTarget], on_done: Callable[[dict[int, str]], None]) -> None:
        """Request the stacks of every target. Call back on the loop once, within `LIMIT_S`.

        Args:
            targets: by local rank.
            on_done: gets the texts by local rank, without ranks that gave none.
        """
        now_s = self._loop.clock.now_s()
        unfinished = {
            dump.target: dump for request in self._requests for dump in request.dumps.values() if not dump.is_complete
        }
        dumps: dict[int, _Dump] = {}
        for local_rank, target in targets.items():
            dump = unfinished.get(target) or _request_dump(target, now_s)
            if dump is not None:
                dumps[local_rank] = dump
        if not self._requests:
            self._loop.call_later(_TICK_S, self._poll)
        self._requests.append(_Request(dumps=dumps, limit_s=now_s + LIMIT_S, on_done=on_done))

    def _poll(self) -> None:
        now_s = self._loop.clock.now_s()
        for request in self._requests:
            for dump in request.dumps.values():
                dump.update(now_s)
        done = [request for request in self._requests if _is_done(request, now_s)]
        self._requests = [request for request in self._requests if not _is_done(request, now_s)]
        if self._requests:
            self._loop.call_later(_TICK_S, self._poll)
        for request in done:
            texts = {rank: dump.read_text() for rank, dump in request.dumps.items() if dump.has_text}
            request.on_done({rank: text for rank, text in texts.items() if text})


def _request_dump(target: StackTarget, now_s: float) -> _Dump | None:
    """Send the signal; return None if the process does not catch it."""
    number = get_stack_signal()
    if number is None or not can_dump(target.pid):
        return None
    dump = _Dump(target, now_s)
    processes.send_signal([target.pid], number)
    return dump


def _is_done(request: _Request, now_s: float) -> bool:
    return now_s >= request.limit_s or all(dump.is_complete for dump in request.dumps.values())


def _size_bytes(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def group_stacks(stacks: Iterable[Stack]) -> list[tuple[tuple[int, ...], str]]:
    """Group ranks with equal stacks, in order of their first rank. Thread ids are ignored."""
    texts = {stack.global_rank: stack.text for stack in stacks if stack.text}
    groups: dict[str, list[int]] = {}
    first: dict[str, str] = {}
    for rank in sorted(texts):
        key = remove_thread_ids(texts[rank])
        groups.setdefault(key, []).append(rank)
        first.setdefault(key, texts[rank])
    return [(tuple(ranks), first[key]) for key, ranks in groups.items()]
