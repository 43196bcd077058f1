"""Finds the class of a failure's cause, of `_shared.causes`: one pure function of what is known of one worker.

Certain evidence comes first: what the kernel or a counter says, then the exception, the last lines, the signal and the
exit code. Only a cause has a class of its own. A peer's closed connection is the network's fault only if no other rank
has failed before (`root_cause` orders). CUDA's advice about asynchronous errors, its guesses at the cause, and
exceptions raised while another one was handled are not causes.
"""

import errno
import re
from collections.abc import Iterable, Iterator
from typing import Final

from muster._shared import causes
from muster._shared.records import record, replace
from muster._shared.reports import Failure
from muster.agent.diagnosis.kernel_log import KernelLine

EARLY_S: Final = 30.0
"""A start-up error comes within this time; importing torch from a slow disk takes a while."""
_USAGE_S: Final = 5.0

_USAGE_CODE: Final = 2
"""Python's exit code for a script that does not exist, and argparse's for a wrong argument. If stderr was captured, its
text decides instead."""
_NOT_RUN_ERRNOS: Final = (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.ENOEXEC)
"""Errors of an exec: there is no such program, or it cannot be executed."""
_NOT_FOUND_CODES: Final = (126, 127)
"""A shell's exit codes for a command that cannot be executed or is not found."""
_INTERPRETER_SIGN: Final = re.compile(
    r"[^:]*py[^:/]*: ("
    r"can't open file |"  # script: exit code 2
    r"No module named |"  # -m module: 1
    r"Error while finding module specification for |"  # -m package: 1
    r"can't find '__main__' module in )"  # folder or zip: 1
)
"""The interpreter's own lines begin with its path. Libraries print the same words in warnings."""
_INTERPRETER_CODES: Final = (1, 2)

_EARLY: Final = ("ImportError", "ModuleNotFoundError", "SyntaxError", "IndentationError", "TabError", "UsageError")
"""Errors of start-up, after which another attempt of the unchanged program cannot succeed."""

_DEVICE_TEXTS: Final = (
    r"uncorrectable ECC|ECC error|fallen off the bus|GPU is lost|NVLink error|hardware (?:failure|error)",
    r"CUDA-capable device\(?s?\)? is/are busy|no CUDA-capable device is detected|CUDA driver initialization failed",
    r"Found no NVIDIA driver",
    r"ncclRemoteError|NET/IB ?: .*(?:error|async event)|ibv_\w+ failed|local catastrophic error",
    r"CUDA error: .*(?:peer access|hardware stack|invalid program counter)|HSA_STATUS_ERROR_EXCEPTION",
)
_DEVICE_OOM_TEXTS: Final = (
    r"(?:CUDA|HIP|XPU|NPU|MPS backend) (?:error: )?out of memory|OutOfMemoryError|Failed to CUDA malloc",
    r"CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED|cudaErrorMemoryAllocation",
)
_HOST_OOM_TEXTS: Final = (
    r"\bMemoryError\b|Cannot allocate memory|DefaultCPUAllocator: (?:can't allocate|not enough) memory",
    r"std::bad_alloc|is killed by signal: Killed|insufficient shared memory|out of shared memory",
    r"unable to open shared memory object|unable to allocate shared memory|unable to write to file </torch_",
    r"/dev/shm\b.*No space left|No space left on device: '/dev/shm/",  # noqa: S108 - in messages
)
_DISK_TEXTS: Final = (
    r"No space left on device|[Dd]isk quota exceeded|Read-only file system|Input/output error",
    r"PytorchStreamWriter failed writing|inline_container\.cc:\d+\] \. unexpected pos",  # torch.save on a full disk
    r"basic_ios::clear: iostream error",  # torch.save to a path there
)
_HANG_TEXTS: Final = (
    r"collective operation timeout|monitoredBarrier|Timed out waiting \d+ms for (?:recv|send) operation",
)
_USAGE_TEXTS: Final = (
    r"size mismatch for |(?:Missing|Unexpected) key\(s\) in state_dict|Error\(s\) in loading state_dict",
    r"shapes cannot be multiplied|The size of tensor a .* must match|is invalid for input of size",
    r"loaded state dict (?:has|contains)|unrecognized arguments|invalid device ordinal|Given groups=",
    r"expected input.* to have \d+ channels|ConfigKeyError|MissingMandatoryValue|Torch not compiled with CUDA enabled",
    r"Cannot re-initialize CUDA in forked subprocess|Duplicate GPU detected|Too many open files(?! in)",
)
_DATA_TEXTS: Final = (
    r"UnicodeDecodeError|JSONDecodeError|BadZipFile|BadGzipFile|UnpicklingError|UnidentifiedImageError|EOFError",
    r"LZMAError|ReadError: |PytorchStreamReader failed|image file is truncated|ArrowInvalid|ParserError",
    r"cannot identify image file|SafetensorError|[Cc]orrupt(?:ed)? (?:data|file|record|image|shard|sample)",
    r"Error -3 while decompressing|CRC check failed",
)
_NETWORK_TEXTS: Final = (
    r"Connection (?:reset|refused|closed|aborted)|Connection\w+Error|Broken ?Pipe|Dist(?:Network|Store)Error",
    r"failed to recv, got 0 bytes|remote process exited|ncclSystemError|Name or service not known|gaierror",
    r"Temporary failure in name resolution|No route to host|Network is unreachable|[Ss]ocket [Tt]ime(?:d )?out",
    r"Address already in use|EADDRINUSE",
    r"wait timeout after \d+ms|client socket has timed out|Timed out initializing process group",
)
_FILE_TEXTS: Final = (r"\b(?:FileNotFound|NotADirectory|IsADirectory|Permission)Error\b",)
_PATTERNS: Final = tuple(
    (name, re.compile("|".join(texts)))
    for name, texts in (
        (causes.DEVICE, _DEVICE_TEXTS),
        (causes.DEVICE_OOM, _DEVICE_OOM_TEXTS),
        (causes.HOST_OOM, _HOST_OOM_TEXTS),
        (causes.DISK, _DISK_TEXTS),
        (causes.PREEMPTION, (r"DUE TO PREEMPTION|was preempted\b",)),
        (causes.TIME_LIMIT, (r"DUE TO TIME LIMIT|[Ww]all ?time limit exceeded",)),
        (causes.HANG, _HANG_TEXTS),
        (causes.USAGE, _USAGE_TEXTS),
        (causes.DATA, _DATA_TEXTS),
        (causes.NETWORK, _NETWORK_TEXTS),
        (causes.USAGE, _FILE_TEXTS),
    )
)
"""Patterns in this order, the more specific first. A missing file names a path, but so may a lost peer."""

_NO_CAUSE: Final = re.compile(
    r"CUDA_LAUNCH_BLOCKING|asynchronously reported|may be caused by|might be caused by|TORCH_USE_CUDA_DSA|"
    r"Exception ignored in|[Ww]arning: "
)
"""Lines that give advice, or that report progress."""
_HANDLING: Final = re.compile(
    r"(?m)^(?:During handling of the above exception, another exception occurred|"
    r"The above exception was the direct cause of the following exception):$"
)
_EXCEPTION_LINE: Final = re.compile(r"(?m)^[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Timeout)\b.*")

_CRASHES: Final = ("SIGSEGV", "SIGABRT", "SIGILL", "SIGBUS", "SIGFPE", "SIGTRAP", "SIGSYS")
_SHELL_SIGNALS: Final = {128 + number: name for number, name in ((11, "SIGSEGV"), (6, "SIGABRT"), (4, "SIGILL"),
    (7, "SIGBUS"), (8, "SIGFPE"), (15, "SIGTERM"))}  # fmt: skip
"""Exit codes of a shell that ran the program, by signal."""


@record
class FoundClass:
    """The class of a failure, and the evidence for it."""

    cause: str
    """A name of `_shared.causes`."""
    evidence: str = ""
    """The line that says so; "" if the end of the process does."""
    early: bool = False
    """Whether it is a start-up error of the unchanged program, within seconds."""


def classify(
    failure: Failure, run_time_s: float, spawn_errno: int | None = None, kernel: Iterable[KernelLine] = ()
) -> FoundClass:
    """Find the class of a worker's failure.

    Args:
        failure: that of one worker; its class is not read.
        run_time_s: seconds from the worker's start to its end.
        spawn_errno: the error of the call that could not start it; None if it was started.
        kernel: what the kernel's log has said since the worker was started.
    """
    if failure.hung:
        return FoundClass(cause=causes.HANG)
    if failure.requested_verdict == "stop":
        return FoundClass(cause=causes.GAVE_UP)
    if failure.check is not None and failure.check.cause:
        return FoundClass(cause=failure.check.cause)
    found = _find_certain(failure, tuple(kernel)) or _find_usage(failure, run_time_s, spawn_errno)
    is_sure = found is not None or failure.exception is not None
    found = found or _find_by_text(failure) or FoundClass(cause=_find_by_end(failure))
    if failure.requested_verdict == "elsewhere" and found.cause in (causes.CRASH, causes.UNKNOWN):
        found = FoundClass(cause=causes.DEVICE, evidence=found.evidence)
    has_stepped = failure.step is not None or bool(failure.optimizer_steps)
    is_early = found.cause == causes.USAGE and run_time_s <= EARLY_S and not (failure.stopped_by_us or has_stepped)
    is_early = is_early and is_sure  # only sure signs stop a job
    return replace(found, early=is_early and not failure.signal)


def _find_certain(failure: Failure, kernel: tuple[KernelLine, ...]) -> FoundClass | None:
    """Return what the kernel says, which no text of the program can contradict."""
    killed = next((line for line in kernel if line.cause == causes.HOST_OOM and line.pid == failure.pid), None)
    if killed is not None:
        return FoundClass(cause=causes.HOST_OOM, evidence=killed.text)
    if failure.oom is not None and failure.oom.certain:
        return FoundClass(cause=causes.HOST_OOM, evidence=f"the OOM killer, from {failure.oom.source}")
    device = next((line for line in kernel if line.cause == causes.DEVICE), None)
    return None if device is None else FoundClass(cause=causes.DEVICE, evidence=device.text)


def _find_usage(failure: Failure, run_time_s: float, spawn_errno: int | None) -> FoundClass | None:
    """Return the class of a program that cannot run: no such script, a wrong flag, no such program; else None."""
    if spawn_errno in _NOT_RUN_ERRNOS:
        return FoundClass(cause=causes.USAGE, evidence=failure.reason)
    if spawn_errno is not None or failure.reason:
        found = _match(failure.reason)
        return found or FoundClass(cause=causes.HOST_OOM if spawn_errno == errno.ENOMEM else causes.UNKNOWN)
    if failure.exit_code in _NOT_FOUND_CODES:
        return FoundClass(cause=causes.USAGE)
    sign = find_usage_sign(failure.exit_code, failure.stderr_tail)
    if sign is not None and failure.exception in (None, sign):
        return FoundClass(cause=causes.USAGE, evidence=sign)
    is_silent = failure.exit_code == _USAGE_CODE and run_time_s <= _USAGE_S and not failure.stderr_tail
    return FoundClass(cause=causes.USAGE) if is_silent and failure.exception is None else None


def find_usage_sign(code: int | None, tail: tuple[str, ...]) -> str | None:
    """Return Python's message about a program that cannot run, or argparse's or click's about arguments; else None."""
    if code == _USAGE_CODE and tail and (": error: " in tail[-1] or tail[-1].startswith("Error: ")):
        return tail[-1]
    if code not in _INTERPRETER_CODES:
        return None
    signs = (_INTERPRETER_SIGN.match(line) for line in tail[-3:])
    return next((sign.string[sign.start(1) :] for sign in signs if sign), None)


def _find_by_text(failure: Failure) -> FoundClass | None:
    """Judge by the exception, or else by the last lines. An exception that matches no pattern is the program's."""
    kind = name_exception(failure)
    if kind.rpartition(".")[2] in _EARLY:
        return FoundClass(cause=causes.USAGE, evidence=_first_line(failure.exception or ""))
    for text in _list_texts(failure):
        found = _match(text)
        if found is not None:
            return found
    if failure.exception is not None and not failure.exception.startswith("Fatal Python error"):
        return FoundClass(cause=causes.CRASH, evidence=_first_line(failure.exception))
    return None


def _list_texts(failure: Failure) -> Iterator[str]:
    if failure.exception is None:
        yield from reversed(failure.stderr_tail)
        return
    handled = _find_handled(failure.traceback or "")
    found = None if handled is None else _match(handled)
    if handled is not None and found is not None and found.cause != causes.USAGE:
        yield handled  # its handling, a fetch, has failed
    yield "\n".join(line for line in failure.exception.splitlines() if not _NO_CAUSE.search(line))


def _find_handled(traceback: str) -> str | None:
    """Return the exception that was being handled when the last one was raised, because it came first."""
    first, *others = _HANDLING.split(traceback, maxsplit=1)
    lines = _EXCEPTION_LINE.findall(first) if others else []
    return lines[-1] if lines else None


def _match(text: str) -> FoundClass | None:
    if _NO_CAUSE.search(text):
        return None
    cause = next((name for name, pattern in _PATTERNS if pattern.search(text)), None)
    return None if cause is None else FoundClass(cause=cause, evidence=_first_line(text.strip()))


def _find_by_end(failure: Failure) -> str:
    name = failure.signal or _SHELL_SIGNALS.get(failure.exit_code or 0)
    if name in _CRASHES or (failure.exception or "").startswith("Fatal Python error"):
        return causes.CRASH
    if name == "SIGTERM":  # not sent by this job
        return causes.PREEMPTION
    return causes.TIME_LIMIT if name == "SIGXCPU" else causes.UNKNOWN


def name_exception(failure: Failure) -> str:
    """Return the exception's name, with its package if Python has printed it, as "torch.OutOfMemoryError"; else ""."""
    name = (failure.exception or "").partition(":")[0].strip()
    return name if re.fullmatch(r"[A-Za-z_]\w*(\.\w+)*", name) else ""


def _first_line(text: str) -> str:
    return text.split("\n", 1)[0][:400]
