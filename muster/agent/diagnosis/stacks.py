"""Python stacks of live workers, without disturbing them.

Workers register faulthandler on `base.stack_signal()` (see `workers.program`): a handler in C that writes all threads'
stacks to the rank's stack file even when the main thread is stuck in native code. A process that has not registered
one (a `--no-python` program, a worker still starting) is never sent the signal: its default would kill it.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from muster import _processes
from muster.agent.runtime.loop import Loop
from muster.agent.workers.spec import stack_signal

LIMIT_S = 2.0
"""The longest a kill is put off for the sake of stacks."""

_TICK_S = 0.002
_QUIET_S = 0.004
"""A dump is taken for whole when its file has not grown for this long: faulthandler writes without pausing."""

_OWN_FRAMES = "muster/agent/workers/"
"""Frames below the user's program, which say nothing to the user."""


@dataclass(frozen=True, kw_only=True)
class StackTarget:
    """A live worker and where its stacks go."""

    pid: int
    stack_file: str


class _Dump:
    """The stacks of one worker: asked for when this is made, whole when `is_whole` says so."""

    def __init__(self, target: StackTarget, now_s: float) -> None:
        self.target = target
        self.is_whole = False
        self._began_bytes = self._size_bytes = _size_bytes(target.stack_file)
        self._changed_s = now_s

    @property
    def has_text(self) -> bool:
        return self._size_bytes > self._began_bytes

    def look(self, now_s: float) -> None:
        """See how far it is. A whole one stays as it is: what the file gets later belongs to another dump."""
        if self.is_whole:
            return
        size = _size_bytes(self.target.stack_file)
        if size != self._size_bytes:
            self._size_bytes, self._changed_s = size, now_s
        if self.has_text:
            self.is_whole = now_s - self._changed_s >= _QUIET_S
        else:
            self.is_whole = _processes.read_stat(self.target.pid) is None

    def read_text(self) -> str:
        """What the worker has written, "" when it cannot be read."""
        try:
            with open(self.target.stack_file, "rb") as file:
                file.seek(self._began_bytes)
                data = file.read(self._size_bytes - self._began_bytes)
        except OSError:
            return ""
        lines = data.decode(errors="replace").strip().splitlines()
        return "\n".join(line for line in lines if _OWN_FRAMES not in line)


@dataclass(frozen=True, kw_only=True)
class _Request:
    """One call of `StackCollector.take`."""

    dumps: dict[int, _Dump]
    limit_s: float
    on_done: Callable[[dict[int, str]], None]


def can_dump(pid: int) -> bool:
    """True when the process catches the stack signal and is in a state to run its handler."""
    number = stack_signal()
    if number is None or not _processes.LINUX:
        return False
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
            fields = dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)
    except OSError:
        return False
    caught = int(fields.get("SigCgt", "0"), 16) >> (number - 1) & 1
    return bool(caught) and fields.get("State", "Z")[0] not in "TtZX"


class StackCollector:
    """Takes the stacks of several workers at once. Requests may overlap: each gets its own answer, within its limit.

    A request for a worker that has been asked already and has not finished shares its dump: asked again, it would
    write a second one right behind the first, and neither could be told from the other.
    """

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._requests: list[_Request] = []

    def take(self, targets: Mapping[int, StackTarget], on_done: Callable[[dict[int, str]], None]) -> None:
        """Ask every target for its stacks; calls back on the loop once, within `LIMIT_S`.

        Args:
            targets: by local rank.
            on_done: gets the texts by local rank, without ranks that gave none.
        """
        now_s = self._loop.clock.now_s()
        unfinished = {
            dump.target: dump for request in self._requests for dump in request.dumps.values() if not dump.is_whole
        }
        dumps: dict[int, _Dump] = {}
        for local_rank, target in targets.items():
            dump = unfinished.get(target) or _ask(target, now_s)
            if dump is not None:
                dumps[local_rank] = dump
        if not self._requests:
            self._loop.call_later(_TICK_S, self._look)
        self._requests.append(_Request(dumps=dumps, limit_s=now_s + LIMIT_S, on_done=on_done))

    def _look(self) -> None:
        now_s = self._loop.clock.now_s()
        for request in self._requests:
            for dump in request.dumps.values():
                dump.look(now_s)
        done = [request for request in self._requests if _is_done(request, now_s)]
        self._requests = [request for request in self._requests if not _is_done(request, now_s)]
        if self._requests:
            self._loop.call_later(_TICK_S, self._look)
        for request in done:
            texts = {rank: dump.read_text() for rank, dump in request.dumps.items() if dump.has_text}
            request.on_done({rank: text for rank, text in texts.items() if text})


def _ask(target: StackTarget, now_s: float) -> _Dump | None:
    """Send the signal; None when the process does not catch it."""
    number = stack_signal()
    if number is None or not can_dump(target.pid):
        return None
    dump = _Dump(target, now_s)
    _processes.send_signal([target.pid], number)
    return dump


def _is_done(request: _Request, now_s: float) -> bool:
    return now_s >= request.limit_s or all(dump.is_whole for dump in request.dumps.values())


def _size_bytes(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def group_stacks(texts: Mapping[int, str]) -> list[tuple[tuple[int, ...], str]]:
    """Ranks with equal stacks together, in order of their first rank; thread ids do not make a difference."""
    groups: dict[str, list[int]] = {}
    first: dict[str, str] = {}
    for rank in sorted(texts):
        key = _without_ids(texts[rank])
        groups.setdefault(key, []).append(rank)
        first.setdefault(key, texts[rank])
    return [(tuple(ranks), first[key]) for key, ranks in groups.items()]


def _without_ids(text: str) -> str:
    """Stack lines with what differs between equal processes taken out: the ids of threads."""
    return "\n".join(_name_thread(line) for line in text.splitlines())


def _name_thread(line: str) -> str:
    head, sign, _ = line.partition("hread 0x")
    return f"{head}hread" if sign else line
