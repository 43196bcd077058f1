"""Why one worker failed: its exit status, its error file, its last output, and the kernel's memory counters.

`FailureCollector` collects the evidence, `build_failure` interprets it (pure except for the error file).
"""

import json
import os
import signal
from dataclasses import dataclass, replace
from typing import Any, Protocol

from muster.agent.diagnosis.oom import OomWatch
from muster.agent.diagnosis.report import Failure, OomEvidence
from muster.agent.logs import WorkerStreams
from muster.agent.round import Round
from muster.agent.runtime.clock import Clock
from muster.agent.workers.pool import WorkerEnd

EARLY_S = 30.0
"""A start-up error comes within this time; importing torch from a slow disk takes a while."""

_ERROR_FILE_LIMIT_BYTES = 4 << 20
_TRACEBACK_LINES = 60
_EXCEPTION_CHARS = 2000
_FATAL = "Fatal Python error: "
_OWN_FRAMES = "muster/agent/workers/"
"""Our frames at the outer end of a fatal error's stack, which explain nothing."""
_TRACEBACK = "Traceback (most recent call last):"
_EARLY_EXCEPTIONS = ("ImportError", "ModuleNotFoundError", "SyntaxError", "IndentationError", "TabError")
_EARLY_SIGNS = (
    ": can't open file ",  # python: no such script, exit code 2
    ": No module named ",  # python -m: no such module, exit code 1
    ": can't find '__main__' module in ",  # python: a folder or a zip without it, exit code 1
)
_USAGE_CODE = 2
"""Python's exit code for a script that does not exist, and argparse's for a wrong argument. When stderr was captured,
its text decides instead."""
_USAGE_S = 5.0
_NO_SUCH_FILE = "No such file or directory"
_NOT_FOUND_CODES = (126, 127)
"""A shell's exit codes for a command that cannot be executed or is not found."""


@dataclass(frozen=True, kw_only=True)
class FailureContext:
    """All that is known about a failed worker."""

    round: Round
    local_rank: int
    host: str
    code: int | None
    """As from os.waitstatus_to_exitcode; None: there was no process."""
    pid: int = 0
    reason: str = ""
    time_s: float = 0.0
    """Wall clock of its end."""
    age_s: float = 0.0
    """Seconds since then."""
    run_time_s: float = 0.0
    stopped_by_us: bool = False
    error_file: str | None = None
    log_path: str | None = None
    stderr_text: str = ""
    """The end of its stderr, some 64 KiB."""
    stderr_tail: tuple[str, ...] = ()
    oom: OomEvidence | None = None


class StderrSource(Protocol):
    """What the collector needs of `logs.LogRouter`."""

    def read_stderr_text(self, local_rank: int) -> str:
        """The end of the worker's stderr."""
        ...

    def read_stderr_tail(self, local_rank: int) -> tuple[str, ...]:
        """Its last lines."""
        ...


class FailureCollector:
    """Collects the evidence of a failed worker."""

    def __init__(self, *, host: str, clock: Clock, logs: StderrSource, oom: OomWatch) -> None:
        """Set what all failures of this node share.

        Args:
            host: the name of this machine in reports.
            clock: of the agent's loop.
            logs: keeps the end of the workers' stderr.
            oom: has been reset when the round's workers were started.
        """
        self._host = host
        self._clock = clock
        self._logs = logs
        self._oom = oom

    def collect(
        self,
        round: Round,  # noqa: A002
        local_rank: int,
        end: WorkerEnd | None,
        streams: WorkerStreams | None = None,
        reason: str = "",
    ) -> Failure:
        """Collect the failure of one worker.

        Args:
            round: the round it was started for.
            local_rank: its rank on this node.
            end: None when no process has ended: the worker could not be started, or it hangs.
            streams: None when there were none yet.
            reason: one line, when there is no exit status.
        """
        now_s = self._clock.now_s()
        age_s = max(0.0, now_s - end.ended_s) if end else 0.0
        killed = end is not None and end.code == -signal.SIGKILL
        evidence = None if end is None or end.signalled else self._oom.check()
        return build_failure(
            FailureContext(
                round=round,
                local_rank=local_rank,
                host=self._host,
                code=end.code if end else None,
                pid=end.worker.pid if end else 0,
                reason=reason,
                time_s=self._clock.wall_s() - age_s,
                age_s=age_s,
                run_time_s=max(0.0, end.ended_s - end.worker.started_s) if end else 0.0,
                stopped_by_us=end.signalled if end else False,
                error_file=streams.error_file if streams else None,
                log_path=streams.log_path if streams else None,
                stderr_text=self._logs.read_stderr_text(local_rank),
                stderr_tail=self._logs.read_stderr_tail(local_rank),
                # A counted kill may have hit a child, whose parent then failed; a guess must explain a SIGKILL.
                oom=evidence if evidence and (evidence.certain or killed) else None,
            )
        )


def build_failure(context: FailureContext) -> Failure:
    """Build the failure from what is known."""
    found = read_error_file(context.error_file) or read_stderr(context.stderr_text)
    code = context.code
    failure = Failure(
        node=context.round.group_rank,
        node_index=context.round.node_index,
        host=context.host,
        local_rank=context.local_rank,
        global_rank=context.round.rank_offset + context.local_rank,
        attempt=context.round.attempt,
        round=context.round.number,
        pid=context.pid,
        time_s=context.time_s,
        age_s=context.age_s,
        exit_code=code if code is not None and code >= 0 else None,
        signal=name_signal(-code) if code is not None and code < 0 else None,
        reason=context.reason,
        exception=found[0] if found else None,
        traceback=found[1] if found else None,
        error_file=context.error_file if context.error_file and os.path.exists(context.error_file) else None,
        stderr_tail=context.stderr_tail,
        log_path=context.log_path,
        oom=context.oom,
        stopped_by_us=context.stopped_by_us,
        collateral=context.stopped_by_us,
    )
    return replace(failure, early=is_early(failure, context.run_time_s))


def is_early(failure: Failure, run_time_s: float) -> bool:
    """Whether it is a start-up error that a restart would only repeat: no such script, a failed import, bad syntax.

    Args:
        failure: of one worker.
        run_time_s: seconds from the worker's start to its end.
    """
    if failure.stopped_by_us or failure.signal or run_time_s > EARLY_S:
        return False
    if failure.exit_code in _NOT_FOUND_CODES or (failure.exit_code is None and _NO_SUCH_FILE in failure.reason):
        return True
    if failure.exit_code == _USAGE_CODE and run_time_s <= _USAGE_S and not failure.stderr_tail:
        return True
    kind = (failure.exception or "").partition(":")[0].strip().rpartition(".")[2]
    if kind in _EARLY_EXCEPTIONS:
        return True
    return any(sign in line for line in failure.stderr_tail[-3:] for sign in _EARLY_SIGNS) and not failure.exception


def name_signal(number: int) -> str:
    """`SIGKILL` for 9; `signal 40` for one without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def read_error_file(path: str | None) -> tuple[str, str | None] | None:
    """Read (exception, traceback) from an error file in torch's format; None when there is no such file.

    Source: torch/distributed/elastic/multiprocessing/errors/error_handler.py. `message` is an object when `@record`
    wrote it, from other writers a plain text.
    """
    data = load_error_file(path)
    message = data.get("message") if data else None
    if isinstance(message, str):
        return _shorten(message), None
    if not isinstance(message, dict):
        return None
    extra = message.get("extraInfo")
    stack = extra.get("py_callstack") if isinstance(extra, dict) else None
    text = message.get("message")
    return _shorten(str(text) if text is not None else "unknown error"), trim_traceback(stack) if stack else None


def load_error_file(path: str | None) -> dict[str, Any] | None:
    """Load the file's JSON object; None when it cannot be read or parsed."""
    if not path:
        return None
    try:
        with open(path, "rb") as file:
            data = json.loads(file.read(_ERROR_FILE_LIMIT_BYTES))
    except (OSError, ValueError):  # incomplete: its worker was killed
        return None
    return data if isinstance(data, dict) else None


def read_stderr(text: str) -> tuple[str, str | None] | None:
    """Find (exception, traceback) in a Python program's stderr; None when it has neither."""
    fatal = text.rfind(_FATAL)
    if fatal >= 0:
        lines = text[fatal:].rstrip().split("\n")
        block = "\n".join(line for line in lines if not ("File " in line and _OWN_FRAMES in line))
        return _shorten(block.split("\n", 1)[0]), trim_traceback(block)
    start = text.rfind(_TRACEBACK)
    return _read_traceback(text[start:]) if start >= 0 else None


def _read_traceback(text: str) -> tuple[str, str | None] | None:
    """Split a traceback: its frames are indented; the first line after them that is not is the exception."""
    lines = text.rstrip().split("\n")
    for index, line in enumerate(lines[1:], start=1):
        if line and not line.startswith(" "):
            return _shorten(line), trim_traceback("\n".join(lines[: index + 1]))
    return None


def trim_traceback(text: str) -> str:
    """Keep a long traceback's first line and its last frames."""
    lines = text.rstrip().split("\n")
    if len(lines) <= _TRACEBACK_LINES:
        return "\n".join(lines)
    # A fatal error's innermost frames come first, an exception's last.
    if text.startswith(_FATAL):
        return "\n".join([*lines[:_TRACEBACK_LINES], "  ..."])
    return "\n".join([lines[0], "  ...", *lines[-_TRACEBACK_LINES:]])


def _shorten(text: str) -> str:
    text = text.strip()
    return text if len(text) <= _EXCEPTION_CHARS else text[:_EXCEPTION_CHARS] + " ..."
