"""Why one worker failed: its exit status, its error file, its last output, and the kernel's memory counters."""

import errno
import os
import re
import signal
from collections.abc import Mapping

from muster._shared.contract import name_signal
from muster._shared.foreign_files import read_regular
from muster._shared.records import NO_ITEMS, record, replace
from muster._shared.reports import Failure, OomEvidence, print_values
from muster.agent.diagnosis.oom import OomWatch
from muster.agent.diagnosis.root_cause import add_early_exits
from muster.agent.diagnosis.tracebacks import read_error_file, read_stderr
from muster.agent.logs import WorkerStreams
from muster.agent.round import Round
from muster.agent.runtime.clock import Clock
from muster.agent.workers.pool import WorkerEnd
from muster.agent.workers.status_page import SlotStatus

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
class FailedWorker:
    """What its node knows of one worker that has failed, before any of its files is read."""

    round: Round
    """The one it was started for."""
    local_rank: int
    end: WorkerEnd | None = None
    """None when no process has ended: the worker could not be started, or it hangs."""
    hung_pid: int | None = None
    """The process of a worker that hangs; None: it has ended or was never started."""
    spawn_errno: int | None = None
    """Of the call that could not start it."""
    reason: str = ""
    """One line, when there is no exit status."""
    streams: WorkerStreams | None = None
    """None when there were none yet."""
    stderr_text: str = ""
    """The end of its stderr, some 64 KiB."""
    stderr_tail: tuple[str, ...] = ()
    """Its last lines."""
    slot: SlotStatus | None = None
    """What it has reported on the status page."""
    values: Mapping[str, float] = NO_ITEMS
    """Likewise."""
    ended_ranks: tuple[int, ...] = ()
    """Global ranks of this node that had ended with success before."""


class FailureBuilder:
    """Builds what is reported of a failed worker."""

    def __init__(self, *, host: str, clock: Clock, oom: OomWatch) -> None:
        """Set what all failures of this node share.

        Args:
            host: the name of this machine in reports.
            clock: of the agent's loop.
            oom: has been reset when the round's workers were started.
        """
        self._host = host
        self._clock = clock
        self._oom = oom

    def build(self, worker: FailedWorker) -> Failure:
        """Build the failure of one worker; reads its error file and stack file."""
        formed, end, streams, slot = worker.round, worker.end, worker.streams, worker.slot
        age_s, stopped_by_us = self._date(worker)
        code = end.code if end else None
        exception, traceback = _find_exception(worker) or (None, None)
        error_file = streams.error_file if streams else None
        step = slot.step if slot else None
        failure = Failure(
            node=formed.group_rank,
            node_index=formed.node_index,
            host=self._host,
            local_rank=worker.local_rank,
            global_rank=formed.rank_offset + worker.local_rank,
            attempt=formed.attempt,
            round=formed.number,
            pid=end.worker.pid if end else worker.hung_pid or 0,
            time_s=self._clock.wall_s() - age_s,
            age_s=age_s,
            exit_code=code if code is not None and code >= 0 else None,
            signal=name_signal(-code) if code is not None and code < 0 else None,
            reason=worker.reason,
            exception=exception,
            traceback=traceback,
            error_file=error_file if error_file and os.path.exists(error_file) else None,
            stderr_tail=worker.stderr_tail,
            log_path=streams.log_path if streams else None,
            oom=None if code is None or stopped_by_us else self._find_oom(code),
            stopped_by_us=stopped_by_us,
            collateral=stopped_by_us,
            step=step,
            total_steps=slot.total if slot else None,
            optimizer_steps=slot.optimizer_steps if slot and step is None else None,
            values=print_values(worker.values),
            hung=worker.hung_pid is not None,
        )
        run_time_s = max(0.0, end.ended_s - end.worker.started_s) if end else 0.0
        failure = replace(failure, early=is_early(failure, run_time_s, worker.spawn_errno))
        return add_early_exits(failure, worker.ended_ranks)

    def _date(self, worker: FailedWorker) -> tuple[float, bool]:
        """How long ago it failed, in seconds, and whether it had got a signal of ours before."""
        end, now_s = worker.end, self._clock.now_s()
        if end is None:
            return 0.0, False
        raised_age_s = self._find_exception_age_s(end, worker.streams, now_s)
        signal_age_s = None if end.signalled_s is None else now_s - end.signalled_s
        if raised_age_s is not None and (signal_age_s is None or raised_age_s > signal_age_s):
            # It takes an interpreter with torch up to a second to end after an exception, and its connections close
            # somewhere in between: the exit status may come after a victim's, or after our signal.
            return raised_age_s, False
        return max(0.0, now_s - end.ended_s), signal_age_s is not None

    def _find_exception_age_s(self, end: WorkerEnd, streams: WorkerStreams | None, now_s: float) -> float | None:
        """Seconds since the worker recorded its exception; None: it recorded none."""
        if streams is None or streams.error_file is None:
            return None
        try:
            age_s = self._clock.wall_s() - os.stat(streams.error_file).st_mtime
        except OSError:
            return None
        # The wall clock may have been set since then.
        return min(max(age_s, now_s - end.ended_s), now_s - end.worker.started_s)

    def _find_oom(self, code: int) -> OomEvidence | None:
        """A counted kill may have hit a child, whose parent then failed; a guess must explain a SIGKILL."""
        evidence = self._oom.check()
        return evidence if evidence and (evidence.certain or code == -signal.SIGKILL) else None


def _find_exception(worker: FailedWorker) -> tuple[str, str | None] | None:
    """Exception and traceback, as far as Python has said them anywhere."""
    streams = worker.streams
    found = read_error_file(streams.error_file if streams else None)
    found = found or read_stderr(worker.stderr_text or read_crash(streams))
    sign = None if found else _find_early_sign(worker.end.code if worker.end else None, worker.stderr_tail)
    return (sign, None) if sign else found


def read_crash(streams: WorkerStreams | None) -> str:
    """What faulthandler wrote into the stack file, where a worker whose stderr is not captured reports a crash."""
    try:
        text = read_regular((streams and streams.stack_file) or "", _CRASH_BYTES, -_CRASH_BYTES)
        return text.decode("utf-8", "replace").rpartition(_STACKS_HEADER)[2]
    except OSError:
        return ""


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
