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


@dataclass
class _Dump:
    target: StackTarget
    began_bytes: int
    size_bytes: int
    changed_s: float

    @property
    def text(self) -> str:
        with open(self.target.stack_file, "rb") as file:
            file.seek(self.began_bytes)
            lines = file.read().decode(errors="replace").strip().splitlines()
        return "\n".join(line for line in lines if _OWN_FRAMES not in line)


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
    """Takes the stacks of several workers at once; one collection at a time."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._dumps: dict[int, _Dump] = {}
        self._limit_s = 0.0
        self._on_done: Callable[[dict[int, str]], None] | None = None

    def take(self, targets: Mapping[int, StackTarget], on_done: Callable[[dict[int, str]], None]) -> None:
        """Ask every target for its stacks; calls back on the loop once, within `LIMIT_S`.

        Args:
            targets: by local rank.
            on_done: gets the texts by local rank, without ranks that gave none.
        """
        number = stack_signal()
        now_s = self._loop.clock.now_s()
        self._dumps = {}
        self._limit_s = now_s + LIMIT_S
        self._on_done = on_done
        for local_rank, target in targets.items():
            if number is not None and can_dump(target.pid):
                size = _size_bytes(target.stack_file)
                self._dumps[local_rank] = _Dump(target, size, size, now_s)
                _processes.send([target.pid], number)
        self._loop.call_later(_TICK_S, self._look)

    def _look(self) -> None:
        now_s = self._loop.clock.now_s()
        for dump in self._dumps.values():
            size = _size_bytes(dump.target.stack_file)
            if size != dump.size_bytes:
                dump.size_bytes, dump.changed_s = size, now_s
        waiting = any(not _is_whole(dump, now_s) for dump in self._dumps.values())
        if waiting and now_s < self._limit_s:
            self._loop.call_later(_TICK_S, self._look)
            return
        done, self._on_done = self._on_done, None
        if done is not None:
            done({rank: dump.text for rank, dump in self._dumps.items() if dump.size_bytes > dump.began_bytes})


def _is_whole(dump: _Dump, now_s: float) -> bool:
    if dump.size_bytes > dump.began_bytes:
        return now_s - dump.changed_s >= _QUIET_S
    return _processes.read_stat(dump.target.pid) is None


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
