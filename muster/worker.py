"""What a training script reports to muster about its progress, and what it asks: where am I, must I stop, must I save.

    from muster import worker

    start = load(worker.resume_path()) if worker.resume_path() else 0
    for i in range(start, total):
        loss = train(i)
        worker.step(i, total=total, loss=loss)       # shown as progress; loss is a number, not a tensor
        if worker.should_checkpoint(i) or worker.should_stop(i):
            save(i, path)                            # all ranks are here at the same i
            worker.saved(i, path)
        if worker.should_stop(i):
            break

Every call is a few stores into shared memory: no system call, no thread, no collective. Without muster (plain python,
torchrun) every call but `breakpoint`, `give_up` and `leave_node` does nothing, and `should_stop` and
`should_checkpoint` are False, so that a script runs unchanged.

`should_stop` and `should_checkpoint` answer True at one step for all ranks of the job. While the agents agree on that
step, which takes some milliseconds, the call of a rank that is ahead waits. For that, `i` must rise within an attempt,
and every rank must ask about the same steps.

The first process of a rank that calls a function here speaks for the rank. In its forks, and in other processes of the
rank while it lives (DataLoader workers), every call does nothing.

This module uses the standard library only. It is one file of over 400 lines, because it travels with every job. The
state that is shared with the agent is one object of this process, so that scripts need not pass it to every call.
"""

import contextlib
import fcntl
import mmap
import os
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from typing import NoReturn, ParamSpec, SupportsFloat, TypeVar

from muster._shared.contract import FORMAT, Env, check_format, has_controls
from muster._shared.layouts import StatusPageLayout as Layout

__all__ = [
    "breakpoint",
    "deadline_s",
    "give_up",
    "in_place",
    "is_managed",
    "leave_node",
    "phase",
    "resume_path",
    "saved",
    "should_checkpoint",
    "should_pause",
    "should_stop",
    "step",
    "uninterrupted",
    "wait_while_paused",
]

_STEP, _TOTAL, _CHANGED_NS, _ASKED = Layout.STEP, Layout.TOTAL, Layout.CHANGED_NS, Layout.ASKED
_COMMAND, _STOP = Layout.COMMAND, Layout.STOP
"""Looked up once: a script calls `step` and `should_stop` at every step."""

_P = ParamSpec("_P")
_R = TypeVar("_R")

_FIRST_WAIT_S = 0.0002
_LONGEST_WAIT_S = 0.005
"""How long a rank that waits for an agreement sleeps between two looks."""


def step(i: int, *, total: int | None = None, **numbers: float) -> None:
    """Report that step `i` is done. Call it once per step, in every rank.

    Args:
        i: the step as the script counts it, 0 or more.
        total: how many steps there will be. None: not known.
        numbers: at most 8 values that are shown with the progress, such as `loss=0.31`. A name has at most 64 bytes.

    Raises:
        TypeError: `i` is not an int, or a value is not a number. A tensor is refused, because reading it would make
            the script wait for the device at every step. Pass `.item()` where the script reads the value anyway.
        ValueError: `i` is negative.
    """
    slot = _state.slot if _state.has_stepped else _begin_steps(i)
    if slot is None:
        return
    if numbers:
        for name, value in numbers.items():
            slot.doubles[slot.value_words.get(name) or slot.add_value(name)] = (
                value if type(value) is float else _to_float(name, value)
            )
    words = slot.words
    words[_STEP] = (i if type(i) is int and i >= 0 else _to_step(i)) + 1
    if total is not None:
        words[_TOTAL] = total if type(total) is int else _to_step(total)
    words[_CHANGED_NS] = time.monotonic_ns()


def should_stop(i: int) -> bool:
    """Return whether all ranks stop at step `i`. If so, save, call `saved`, and leave the loop.

    The job ends, or goes on with other nodes. All ranks get True at the same step. Call it once per step, at the same
    steps on every rank, after the work of step `i`.

    Args:
        i: the step. It must rise within an attempt.

    Raises:
        TypeError: `i` is not an int.
        ValueError: `i` is negative.
    """
    slot = _state.slot if _state.is_open else _open()
    return False if slot is None else slot.ask(_STOP, i)


def should_checkpoint(i: int) -> bool:
    """Return whether a checkpoint of step `i` is wanted. If so, save, call `saved`, and go on.

    Arguments, errors and rules are those of `should_stop`.
    """
    slot = _state.slot if _state.is_open else _open()
    return False if slot is None else slot.ask(Layout.CHECKPOINT, i)


def ask_once(i: int, stride: int | None = None) -> bool:
    """Ask `should_stop` once and end: `muster-agent ask stop` is one process per step.

    This process speaks for the rank, unless another process that does so still runs. It continues the questions of the
    process before it.

    Args:
        i: as `should_stop` has it.
        stride: the rank asks about each step at this distance. None: the distance of its last two questions.
    """
    slot = _open(_share)
    if slot is None:
        return False
    if stride is not None and slot.words[_ASKED + _STOP] == 0:
        slot.words[Layout.STRIDE + _STOP] = stride
    return slot.ask(_STOP, i)


def wait_while_paused() -> None:
    """Wait while the job is paused. If it is not, return at once. Call it once per step, after `step`.

    All ranks wait at the same step. The timeout of torch's collectives goes on during a pause.
    """
    slot = _state.slot if _state.is_open else _open()
    if slot is None or (last := slot.words[_STEP]) == 0:
        return
    while slot.ask(Layout.PAUSE, last - 1):
        time.sleep(_LONGEST_WAIT_S)


def should_pause(i: int) -> bool:
    """Return whether the job is paused at step `i`, for scripts that wait in their own way.

    All ranks get True at the same step, until the job goes on. Ask again about the same step. Arguments, errors and
    rules are those of `should_stop`.
    """
    slot = _state.slot if _state.is_open else _open()
    return False if slot is None else slot.ask(Layout.PAUSE, i)


def wait_for_join(i: int, complete: Callable[[], bool]) -> None:
    """Wait if all ranks wait at step `i` for nodes that join. `snapshots.save` calls it.

    Args:
        i: the step of the snapshot. Rules are those of `should_stop`.
        complete: makes the snapshot complete, and returns whether it is. It is called until it returns True.
    """
    slot = _state.slot if _state.is_open else _open()
    is_complete = False
    while slot is not None and slot.ask(Layout.JOIN, i):
        is_complete = is_complete or complete()
        if is_complete:
            slot.words[Layout.WAITING] = i + 1
        time.sleep(_LONGEST_WAIT_S)


def saved(i: int, path: str | os.PathLike[str] | None = None) -> None:
    """Report that this rank's checkpoint of step `i` is complete and durable.

    The agent looks four times a second. If its node is lost sooner, the checkpoint before this one counts.

    Args:
        i: the step.
        path: where the checkpoint of all ranks is: a file or folder that every node can read. Once every rank of the
            job has reported the step, `resume_path()` of workers that are started later returns the path that the
            lowest rank has named. At most 2,536 bytes of UTF-8. None: this rank names no
            path. If no rank names one, the job cannot resume from this checkpoint.

    Raises:
        TypeError: `i` is not an int.
        ValueError: `i` is negative, or the path is too long, is not UTF-8 or has control characters.
    """
    number = _to_step(i)
    slot = _state.slot if _state.is_open else _open()
    if slot is None:
        return
    text = b"" if path is None else _encode_path(path)
    slot.write_text(Layout.SAVED_PATH, (number + 1).to_bytes(8, sys.byteorder) + text)
    slot.words[Layout.SAVED] = number + 1


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Name what the rank does inside a `with`, such as `phase("eval")`.

    The limits for hangs are learned separately for each phase.

    Args:
        name: at most 64 bytes. Only the first 8 names of a process are kept.
    """
    slot = _state.slot if _state.is_open else _open()
    if slot is None:
        yield
        return
    words = slot.words
    before = words[Layout.PHASE]
    words[Layout.PHASE] = slot.phases.get(name) or slot.add_phase(name)
    words[_CHANGED_NS] = time.monotonic_ns()
    try:
        yield
    finally:
        words[Layout.PHASE] = before
        words[_CHANGED_NS] = time.monotonic_ns()


def give_up(reason: str) -> NoReturn:
    """End this rank and the job for good, because a restart could not help.

    Args:
        reason: why, in one clause, for the report. The first 115 bytes of it are kept.

    Raises:
        SystemExit: always, with code 1. It ends the process if the main thread calls this function.
    """
    _end_with(Layout.VERDICT_STOP, reason)


def leave_node(reason: str) -> NoReturn:
    """End this rank because its node is at fault. The ranks go on elsewhere if another node can take its place.

    Args:
        reason: why, in one clause, for the report. The first 110 bytes of it are kept.

    Raises:
        SystemExit: see `give_up`.
    """
    _end_with(Layout.VERDICT_ELSEWHERE, reason)


def _end_with(verdict: bytes, reason: str) -> NoReturn:
    slot = _state.slot if _state.is_open else _open()
    text = " ".join(str(reason).split())
    if slot is not None:
        encoded = verdict + text.encode(errors="replace")
        slot.write_text(Layout.VERDICT, encoded[: Layout.VERDICT_BYTES].decode(errors="ignore").encode())
    raise SystemExit(f"muster.worker: {'give_up' if verdict == Layout.VERDICT_STOP else 'leave_node'}: {text}")


def deadline_s() -> float | None:
    """Return the seconds until the job is ended, saved or not. None: no such limit is set."""
    slot = _state.slot if _state.is_open else _open()
    if slot is None or (deadline_ns := slot.header[Layout.DEADLINE_NS]) == 0:
        return None
    return max(0.0, (deadline_ns - time.monotonic_ns()) / 1e9)


def is_managed() -> bool:
    """Return whether this process speaks for a rank of a muster job."""
    return (_state.slot if _state.is_open else _open()) is not None


def resume_path() -> str | None:
    """Return the path of the last checkpoint that all ranks saved at one step (see `saved`), the same in every rank.

    Returns:
        A path that this job, or an earlier run of the same app, has reported. The script must check that the
        checkpoint still exists. None: there is none, so begin with the first step.
    """
    return os.environ.get(Env.RESUME_PATH) or None


def breakpoint(global_rank: int = 0) -> None:  # noqa: A001  # the builtin calls it, by PYTHONBREAKPOINT
    """Stop in pdb at the caller's line, in one rank, which gets the terminal of its node's agent.

    `breakpoint()` calls it in every worker, unless PYTHONBREAKPOINT was set to something else. In the other ranks it
    does nothing: they go on, and wait where they need this rank. While the rank is in pdb, the agent holds back the
    output of the others and counts no time as a hang, but the timeout of torch's collectives goes on. `continue`
    gives the terminal back, and `quit` ends the job as Ctrl-C does. If the agent has no terminal, one line says how
    to get one, and the script goes on.

    Args:
        global_rank: the rank that stops.
    """
    if int(os.environ.get("RANK") or 0) != global_rank:
        return
    from muster._shared import debugger  # loads pdb

    where = os.environ.get(Env.STATUS_PAGE, "").rpartition("/fd/")[0]
    slot = _state.slot if _state.is_open else _open()
    debugger.debug(sys._getframe(1), None if slot is None else slot.words, f"{where}/fd/0")  # noqa: SLF001


def in_place(main: Callable[_P, _R]) -> Callable[_P, _R]:
    """Have `main` called again in the same process when a rank is lost or nodes join, as a decorator.

    Everything that has to do with the process group is inside `main`: `init_process_group`, DDP, the sampler, the
    loader. It reads rank and world size there. Model, optimizer and compiled functions are outside and stay. `main`
    must load a snapshot (`snapshots.load(into=...)`) before it saves one. When the round ends, it is made to end by an
    exception that is no `Exception`; connections that it has opened are shut, and process groups are destroyed.

    Under torchrun and plain Python, with GPUs, or if no snapshot is there, `main` is called once per process.

    Args:
        main: called by the main thread. What it returns, or raises because of itself, is returned or raised.
    """
    from muster import in_place as module

    return module.decorate(main, module.Slot(is_managed, _note_stays, look_again, _print))


def uninterrupted() -> contextlib.AbstractContextManager[None]:
    """Have a `with` block inside `main` finish before the end of the round interrupts it: a write to disk, say.

    A block that takes over 2 s is ended with its process.
    """
    module = sys.modules.get("muster.in_place")
    return contextlib.nullcontext() if module is None else module.pass_uninterrupted()


def _note_stays(stays: bool) -> None:
    slot = _state.slot if _state.is_open else _open()
    if slot is not None:
        slot.words[Layout.STAYS] = int(stays)


# -- this process's slot ----------------------------------------------------------------------------------------------


class _Slot:
    """The slot of this rank in the status page, mapped."""

    def __init__(self, memory: mmap.mmap, number: int) -> None:
        """Map header and slot `number`. The mapping lives as long as the process."""
        block = Layout.BLOCK_BYTES
        view = memoryview(memory)
        own = view[(number + 1) * block : (number + 2) * block]
        self.header = view[:block].cast("q")
        self.bytes = own
        self.words = own.cast("q")
        self.doubles = own.cast("d")
        self.value_words: dict[str, int] = {}
        """Where each value is, as an index of `doubles`.

        A value for which there is no room has a word that nothing reads.
        """
        self.phases: dict[str, int] = {}

    def ask(self, kind: int, i: int) -> bool:
        """Return whether the agreed step of a drain of this kind is reached.

        Waits while the step is being agreed on.
        """
        step = (i if type(i) is int and i >= 0 else _to_step(i)) + 1
        words, asked = self.words, _ASKED + kind
        before = words[asked]
        if step > before >= 0:
            if before:
                words[Layout.STRIDE + kind] = step - before
            words[asked] = step  # first: the agent looks after raising a ceiling
        elif step < before:
            words[asked] = Layout.NOT_ASKING
            _print(
                f"asked about step {step - 1} after step {before - 1}: this rank takes part in no drain in this attempt"
            )
        if self.header[_COMMAND] == 0:
            return False
        return words[asked] != Layout.NOT_ASKING and self._wait_for_decision(kind, i)

    def _wait_for_decision(self, kind: int, i: int) -> bool:
        """Wait while `i` has reached the ceiling of a drain that is neither committed nor withdrawn.

        There is no limit: a rank that went on by itself would stop at another step than the others. The agent ends the
        drain, or this process.
        """
        wait_s = _FIRST_WAIT_S
        while True:
            command = self.header[_COMMAND]
            if command == 0 or Layout.get_kind(command) != kind or i < Layout.get_step(command):
                return False
            if Layout.is_committed(command):
                # The command may outlast its step.
                return kind != Layout.CHECKPOINT or i == Layout.get_step(command)
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)

    def add_value(self, name: str) -> int:
        """Enter a value's name, and return the index of its double."""
        count = len(self.value_words)
        if count >= Layout.TABLE_ENTRIES:
            if count == Layout.TABLE_ENTRIES:
                _print(f"step: at most {Layout.TABLE_ENTRIES} values are shown; {name!r} and later ones are not")
            self.value_words[name] = Layout.UNREAD
            return Layout.UNREAD
        start = Layout.VALUE_TABLE + count * Layout.VALUE_ENTRY_WORDS
        self.write_text(start, _to_name(name))
        self.value_words[name] = start + Layout.VALUE_ENTRY_WORDS - 1
        self.words[Layout.VALUES] = count + 1
        return self.value_words[name]

    def add_phase(self, name: str) -> int:
        """Enter a phase's name, and return its number, 0 where there is no room."""
        count = len(self.phases)
        if count >= Layout.TABLE_ENTRIES:
            return 0
        self.write_text(Layout.PHASE_TABLE + count * Layout.PHASE_ENTRY_WORDS, _to_name(name))
        self.phases[name] = count + 1
        return count + 1

    def write_text(self, word: int, text: bytes) -> None:
        """Write a text entry: while its bytes change, its length and checksum fit neither the old nor the new ones."""
        start = 8 * (word + 1)
        self.words[word] = 0
        self.bytes[start : start + len(text)] = text
        self.words[word] = len(text) << 32 | zlib.crc32(text)


class _State:
    """Whether this process has looked for its slot and has called `step`, and the slot if it has one."""

    is_open = has_stepped = False
    slot: "_Slot | None" = None


_state = _State()


def _open(claim: "Callable[[_Slot], _Slot | None] | None" = None) -> _Slot | None:
    """Map the slot of this rank if this process may speak for it. Any failure leaves the script as it would be."""
    _state.is_open = True
    where = os.environ.get(Env.STATUS_PAGE)
    if where:
        try:
            _state.slot = _map_slot(*_parse(where), claim or _claim)
        except (OSError, ValueError) as error:
            _print(f"cannot use the status page {where!r} ({error}): steps are not reported and not agreed on")
    return _state.slot


def _begin_steps(i: int) -> _Slot | None:
    """Say when the first step was done. The step before the time, which says that there is one."""
    slot = _state.slot if _state.is_open else _open()
    if slot is not None:
        slot.words[Layout.FIRST] = _to_step(i) + 1
        slot.words[Layout.FIRST_NS] = time.monotonic_ns()
    _state.has_stepped = True
    return slot


def _parse(where: str) -> tuple[str, int, int]:
    path, round_number, slot = where.rsplit(":", 2)
    return path, int(round_number), int(slot)


def _map_slot(path: str, round_number: int, number: int, claim: "Callable[[_Slot], _Slot | None]") -> _Slot | None:
    opened = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        memory = mmap.mmap(opened, os.fstat(opened).st_size)
        header = memoryview(memory)[: Layout.BLOCK_BYTES].cast("q")
        if header[Layout.MAGIC_WORD] != Layout.MAGIC:
            check_format(header[Layout.MAGIC_WORD] ^ Layout.MAGIC ^ FORMAT, "it")
        attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0)
        if (header[Layout.ROUND], header[Layout.ATTEMPT]) != (round_number, attempt):
            raise ValueError("it belongs to another round")
        if not 0 <= number < header[Layout.SLOTS]:
            raise ValueError(f"it has {header[Layout.SLOTS]} slots")
        # Two processes may come at once.
        fcntl.lockf(opened, fcntl.LOCK_EX, 8, (number + 1) * Layout.BLOCK_BYTES)
        return claim(_Slot(memory, number))
    finally:
        os.close(opened)


def _claim(slot: _Slot) -> _Slot | None:
    """Become the process that speaks for the rank, unless another one does."""
    owner = slot.words[Layout.OWNER]
    if owner not in (0, os.getpid()) and _is_alive(owner):
        return None
    if owner:
        slot.bytes[:] = bytes(Layout.BLOCK_BYTES)
    slot.words[Layout.OWNER] = os.getpid()
    return slot


def _share(slot: _Slot) -> _Slot | None:
    """Speak for the rank together with the short-lived processes before and after this one."""
    owner = slot.words[Layout.OWNER]
    if owner and _is_alive(owner):
        _print(f"process {owner} speaks for this rank: it has to ask")
        return None
    if owner:
        slot.bytes[:] = bytes(Layout.BLOCK_BYTES)
    return slot


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def look_again() -> None:
    """Look for the slot at the next call: this process, a fork of one that may have looked before, is a worker now."""
    _state.is_open, _state.has_stepped, _state.slot = False, False, None


def _forget_if_open() -> None:
    """Let the parent speak for the rank. A fork calls it."""
    if _state.is_open:
        _state.slot = None


os.register_at_fork(after_in_child=_forget_if_open)


# -- arguments --------------------------------------------------------------------------------------------------------


def _to_step(i: object) -> int:
    if isinstance(i, bool) or not hasattr(type(i), "__index__") or _is_tensor(i):
        raise TypeError(f"the step must be an int, not {type(i).__name__}")
    number = i.__index__()  # type: ignore[attr-defined]  # looked for above; a numpy integer has it
    if not 0 <= number <= Layout.MAX_STEP:
        raise ValueError(f"the step must be 0 to {Layout.MAX_STEP}, not {number}")
    return int(number)


def _to_float(name: str, value: SupportsFloat) -> float:
    import numbers

    if not isinstance(value, numbers.Real):
        hint = ": it would make the script wait for the device; pass .item()" if _is_tensor(value) else ""
        raise TypeError(f"step({name}=...) takes a number, not {type(value).__name__}{hint}")
    return float(value)


def _is_tensor(value: object) -> bool:
    return any(base.__module__.partition(".")[0] == "torch" for base in type(value).__mro__)


def _encode_path(path: str | os.PathLike[str]) -> bytes:
    text = os.fsencode(path)
    if len(text) > Layout.PATH_BYTES:
        raise ValueError(f"saved: the path has {len(text)} bytes, at most {Layout.PATH_BYTES} are allowed")
    try:
        decoded = text.decode()
    except UnicodeDecodeError:
        raise ValueError(f"saved: the path {path!r} is not UTF-8") from None
    if has_controls(decoded):  # it becomes a variable and lines
        raise ValueError(f"saved: the path {path!r} has control characters")
    return text


def _to_name(name: str) -> bytes:
    return name.encode(errors="replace")[: Layout.NAME_BYTES]


def _print(line: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        if sys.stderr is not None:
            sys.stderr.write(f"muster.worker: {line}\n")
