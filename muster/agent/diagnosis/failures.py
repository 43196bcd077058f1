"""Why one worker failed: its exit status, its error file, its last output, and the kernel's memory counters.

`FailureCollector` collects the evidence, `build_failure` interprets it (pure except for the error file).
"""

import errno
import os
import re
import signal
from typing import Protocol

from muster._shared.contract import name_signal, read_regular
from muster._shared.records import record, replace
from muster._shared.reports import Failure, OomEvidence
from muster.agent.diagnosis.oom import OomWatch
from muster.agent.diagnosis.tracebacks import read_error_file, read_stderr
from muster.agent.logs import WorkerStreams
from muster.agent.round import Round
from muster.agent.runtime.clock import Clock
from muster.agent.workers.pool import WorkerEnd

EARLY_S = 30.0
"""A start-up error comes within this time; importing torch from a slow disk takes a while."""

_EARLY_EXCEPTIONS = ("ImportError", "ModuleNotFoundError", "SyntaxError", "IndentationError", "TabError")
_INTERPRETER_SIGN = re.compile(
    r"[^:]*py[^:/]*: ("
    r"can't open file |"  # no such script, exit code 2
    r"No module named |"  # -m: no such module, exit code 1
    r"Error while finding module specification for |"  # -m: no such package, exit code 1
    r"can't find '__main__' module in )"  # a folder or a zip without it, exit code 1
)
"""The interpreter's own lines begin with its path. Libraries print the same words in warnings."""
_INTERPRETER_CODES = (1, 2)
_CRASH_BYTES = 64 << 10
_STACKS_HEADER = "--- stacks of process "
"""Each process that opens a stack file writes this first, see `workers.program`."""
_USAGE_CODE = 2
"""Python's exit code for a script that does not exist, and argparse's for a wrong argument. When stderr was captured,
its text decides instead."""
_USAGE_S = 5.0
_NOT_RUN_ERRNOS = (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.ENOEXEC)
"""Of an exec: there is no such program, or it cannot be executed."""
_NOT_FOUND_CODES = (126, 127)
"""A shell's exit codes for a command that cannot be executed or is not found."""


@record
class FailureContext:
    """All that is known about a failed worker."""

    round: Round
    local_rank: int
    host: str
    code: int | None
    """As from os.waitstatus_to_exitcode; None: there was no process."""
    pid: int = 0
    reason: str = ""
    spawn_errno: int | None = None
    """Of the call that could not start it."""
    time_s: float = 0.0
    """Wall clock of its end."""
    age_s: float = 0.0
    """Seconds since then."""
    run_time_s: float = 0.0
    stopped_by_us: bool = False
    hung: bool = False
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
        *,
        spawn_errno: int | None = None,
        hung_pid: int | None = None,
    ) -> Failure:
        """Collect the failure of one worker.

        Args:
            round: the round it was started for.
            local_rank: its rank on this node.
            end: None when no process has ended: the worker could not be started, or it hangs.
            streams: None when there were none yet.
            reason: one line, when there is no exit status.
            spawn_errno: of the call that could not start it.
            hung_pid: the process of a worker that hangs; None: it has ended or was never started.
        """
        now_s = self._clock.now_s()
        age_s = max(0.0, now_s - end.ended_s) if end else 0.0
        raised_age_s = self._find_exception_age_s(end, streams, now_s)
        signal_age_s = now_s - end.signalled_s if end and end.signalled_s is not None else None
        stopped_by_us = signal_age_s is not None
        if raised_age_s is not None and (signal_age_s is None or raised_age_s > signal_age_s):
            # It takes an interpreter with torch up to a second to end after an exception, and its connections close
            # somewhere in between: the exit status may come after a victim's, or after our signal.
            age_s, stopped_by_us = raised_age_s, False
        killed = end is not None and end.code == -signal.SIGKILL
        evidence = None if end is None or stopped_by_us else self._oom.check()
        return build_failure(
            FailureContext(
                round=round,
                local_rank=local_rank,
                host=self._host,
                code=end.code if end else None,
                pid=end.worker.pid if end else hung_pid or 0,
                hung=hung_pid is not None,
                reason=reason,
                spawn_errno=spawn_errno,
                time_s=self._clock.wall_s() - age_s,
                age_s=age_s,
                run_time_s=max(0.0, end.ended_s - end.worker.started_s) if end else 0.0,
                stopped_by_us=stopped_by_us,
                error_file=streams.error_file if streams else None,
                log_path=streams.log_path if streams else None,
                stderr_text=self._logs.read_stderr_text(local_rank) or read_crash(streams),
                stderr_tail=self._logs.read_stderr_tail(local_rank),
                # A counted kill may have hit a child, whose parent then failed; a guess must explain a SIGKILL.
                oom=evidence if evidence and (evidence.certain or killed) else None,
            )
        )

    def _find_exception_age_s(self, end: WorkerEnd | None, streams: WorkerStreams | None, now_s: float) -> float | None:
        """Seconds since the worker recorded its exception; None: it recorded none."""
        path = streams.error_file if streams else None
        if end is None or path is None:
            return None
        try:
            age_s = self._clock.wall_s() - os.stat(path).st_mtime
        except OSError:
            return None
        # The wall clock may have been set since then.
        return min(max(age_s, now_s - end.ended_s), now_s - end.worker.started_s)


def read_crash(streams: WorkerStreams | None) -> str:
    """What faulthandler wrote into the stack file, where a worker whose stderr is not captured reports a crash."""
    try:
        text = read_regular((streams and streams.stack_file) or "", _CRASH_BYTES, -_CRASH_BYTES)
        return text.decode("utf-8", "replace").rpartition(_STACKS_HEADER)[2]
    except OSError:
        return ""


def build_failure(context: FailureContext) -> Failure:
    """Build the failure from what is known."""
    sign = _find_early_sign(context.code, context.stderr_tail)
    found = read_error_file(context.error_file) or read_stderr(context.stderr_text)
    if found is None and sign is not None:
        found = sign, None
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
        hung=context.hung,
    )
    return replace(failure, early=is_early(failure, context.run_time_s, context.spawn_errno))


def is_early(failure: Failure, run_time_s: float, spawn_errno: int | None = None) -> bool:
    """Whether it is a start-up error that a restart would only repeat: no such script, a failed import, bad syntax.

    Args:
        failure: of one worker.
        run_time_s: seconds from the worker's start to its end.
        spawn_errno: of the call that could not start it; None when it was started.
    """
    if failure.stopped_by_us or failure.signal or run_time_s > EARLY_S:
        return False
    if failure.exit_code in _NOT_FOUND_CODES or spawn_errno in _NOT_RUN_ERRNOS:
        return True
    if failure.exit_code == _USAGE_CODE and run_time_s <= _USAGE_S and not failure.stderr_tail:
        return True
    kind = (failure.exception or "").partition(":")[0].strip().rpartition(".")[2]
    if kind in _EARLY_EXCEPTIONS:
        return True
    return failure.exception is not None and failure.exception == _find_early_sign(
        failure.exit_code, failure.stderr_tail
    )


def _find_early_sign(code: int | None, tail: tuple[str, ...]) -> str | None:
    """What Python says of a program that it cannot run, or argparse or click of its arguments; None: nothing."""
    if code == _USAGE_CODE and tail and (": error: " in tail[-1] or tail[-1].startswith("Error: ")):
        return tail[-1]
    if code not in _INTERPRETER_CODES:
        return None
    signs = (_INTERPRETER_SIGN.match(line) for line in tail[-3:])
    return next((sign.string[sign.start(1) :] for sign in signs if sign), None)
