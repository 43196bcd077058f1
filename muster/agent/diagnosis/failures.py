"""What one worker died of: its exit status, its error file, the last it wrote, and the kernel's word on memory.

`FailureCollector` gathers, `build_failure` decides what it means (pure but for the error file).
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
"""A start-up error is one that comes this soon; importing torch from a slow disk takes a while."""

_ERROR_FILE_LIMIT_BYTES = 4 << 20
_TRACEBACK_LINES = 60
_EXCEPTION_CHARS = 2000
_FATAL = "Fatal Python error: "
_OWN_FRAMES = "muster/agent/workers/"
"""What runs the user's program stands at the outer end of a fatal error's stack, and explains nothing."""
_TRACEBACK = "Traceback (most recent call last):"
_EARLY_EXCEPTIONS = ("ImportError", "ModuleNotFoundError", "SyntaxError", "IndentationError", "TabError")
_EARLY_SIGNS = (
    ": can't open file ",  # python: no such script, exit code 2
    ": No module named ",  # python -m: no such module, exit code 1
    ": can't find '__main__' module in ",  # python: a folder or a zip without one, exit code 1
)
_USAGE_CODE = 2
"""What Python exits with for a script that is not there, and argparse for a wrong argument. Where stderr was captured,
its text decides instead."""
_USAGE_S = 5.0
_NO_SUCH_FILE = "No such file or directory"
_NOT_FOUND_CODES = (126, 127)
"""A shell's way of saying: cannot be executed, not found."""


@dataclass(frozen=True, kw_only=True)
class FailureContext:
    """All that is known of a worker that did not end well."""

    round: Round
    local_rank: int
    host: str
    code: int | None
    """As of os.waitstatus_to_exitcode; None: there was no process to exit."""
    pid: int = 0
    reason: str = ""
    time_s: float = 0.0
    """Wall clock of its end."""
    age_s: float = 0.0
    """Seconds since then."""
    lived_s: float = 0.0
    stopped_by_us: bool = False
    error_file: str | None = None
    log_path: str | None = None
    stderr_text: str = ""
    """The end of its stderr, some 64 KiB."""
    stderr_tail: tuple[str, ...] = ()
    oom: OomEvidence | None = None


class StderrMemory(Protocol):
    """What the collector asks of `logs.LogRouter`."""

    def stderr_text(self, local_rank: int) -> str:
        """The end of the worker's stderr."""
        ...

    def stderr_tail(self, local_rank: int) -> tuple[str, ...]:
        """Its last lines."""
        ...


class FailureCollector:
    """Gathers what is known of a dead worker."""

    def __init__(self, *, host: str, clock: Clock, logs: StderrMemory, oom: OomWatch) -> None:
        """Keep what every failure of this node shares.

        Args:
            host: how reports call this machine.
            clock: of the agent's loop.
            logs: where the workers' stderr is remembered.
            oom: has compared this process's cgroup with itself since the round's workers were started.
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
        """The failure of one worker.

        Args:
            round: the round it was started for.
            local_rank: its rank on this node.
            end: None when there was no process to end: it could not be started, or it hangs.
            streams: None when there were none yet.
            reason: one line, when there is no exit to speak of.
        """
        now_s = self._clock.now_s()
        age_s = max(0.0, now_s - end.ended_s) if end else 0.0
        killed = end is not None and end.code == -signal.SIGKILL
        evidence = None if end is None or end.signalled else self._oom.look()
        return collect_failure(
            FailureContext(
                round=round,
                local_rank=local_rank,
                host=self._host,
                code=end.code if end else None,
                pid=end.worker.pid if end else 0,
                reason=reason,
                time_s=self._clock.wall_s() - age_s,
                age_s=age_s,
                lived_s=max(0.0, end.ended_s - end.worker.started_s) if end else 0.0,
                stopped_by_us=end.signalled if end else False,
                error_file=streams.error_file if streams else None,
                log_path=streams.log_path if streams else None,
                stderr_text=self._logs.stderr_text(local_rank),
                stderr_tail=self._logs.stderr_tail(local_rank),
                # A counted kill may have hit a child whose parent then gave up; a guess needs a SIGKILL to explain.
                oom=evidence if evidence and (evidence.certain or killed) else None,
            )
        )


def collect_failure(context: FailureContext) -> Failure:
    """Make a failure of what is known."""
    told = read_error_file(context.error_file) or read_stderr(context.stderr_text)
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
        exception=told[0] if told else None,
        traceback=told[1] if told else None,
        error_file=context.error_file if context.error_file and os.path.exists(context.error_file) else None,
        stderr_tail=context.stderr_tail,
        log_path=context.log_path,
        oom=context.oom,
        stopped_by_us=context.stopped_by_us,
        collateral=context.stopped_by_us,
    )
    return replace(failure, early=is_early(failure, context.lived_s))


def is_early(failure: Failure, lived_s: float) -> bool:
    """Whether it is a start-up error that a restart would only repeat: no such script, an import, a syntax error.

    Args:
        failure: of one worker.
        lived_s: seconds from the worker's start to its end.
    """
    if failure.stopped_by_us or failure.signal or lived_s > EARLY_S:
        return False
    if failure.exit_code in _NOT_FOUND_CODES or (failure.exit_code is None and _NO_SUCH_FILE in failure.reason):
        return True
    if failure.exit_code == _USAGE_CODE and lived_s <= _USAGE_S and not failure.stderr_tail:
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
    """(exception, traceback) from an error file in torch's format; None when there is none, or it is no such file.

    Source: torch/distributed/elastic/multiprocessing/errors/error_handler.py. `message` is an object with what
    `@record` writes, or, from other writers, a plain text.
    """
    data = load_error_file(path)
    message = data.get("message") if data else None
    if isinstance(message, str):
        return _clip(message), None
    if not isinstance(message, dict):
        return None
    extra = message.get("extraInfo")
    stack = extra.get("py_callstack") if isinstance(extra, dict) else None
    text = message.get("message")
    return _clip(str(text) if text is not None else "unknown error"), trim_traceback(stack) if stack else None


def load_error_file(path: str | None) -> dict[str, Any] | None:
    """The file's JSON object; None when there is no readable one."""
    if not path:
        return None
    try:
        with open(path, "rb") as file:
            data = json.loads(file.read(_ERROR_FILE_LIMIT_BYTES))
    except (OSError, ValueError):  # half-written by a worker that was killed
        return None
    return data if isinstance(data, dict) else None


def read_stderr(text: str) -> tuple[str, str | None] | None:
    """(exception, traceback) from what a Python program printed when it died; None when it printed no such thing."""
    fatal = text.rfind(_FATAL)
    if fatal >= 0:
        lines = text[fatal:].rstrip().split("\n")
        block = "\n".join(line for line in lines if not ("File " in line and _OWN_FRAMES in line))
        return _clip(block.split("\n", 1)[0]), trim_traceback(block)
    start = text.rfind(_TRACEBACK)
    return _read_traceback(text[start:]) if start >= 0 else None


def _read_traceback(text: str) -> tuple[str, str | None] | None:
    """The frames are indented; the first line after them that is not is the exception."""
    lines = text.rstrip().split("\n")
    for index, line in enumerate(lines[1:], start=1):
        if line and not line.startswith(" "):
            return _clip(line), trim_traceback("\n".join(lines[: index + 1]))
    return None


def trim_traceback(text: str) -> str:
    """A traceback's first line and its last frames."""
    lines = text.rstrip().split("\n")
    if len(lines) <= _TRACEBACK_LINES:
        return "\n".join(lines)
    # A fatal error's innermost frames come first, an exception's last.
    if text.startswith(_FATAL):
        return "\n".join([*lines[:_TRACEBACK_LINES], "  ..."])
    return "\n".join([lines[0], "  ...", *lines[-_TRACEBACK_LINES:]])


def _clip(text: str) -> str:
    text = text.strip()
    return text if len(text) <= _EXCEPTION_CHARS else text[:_EXCEPTION_CHARS] + " ..."
