"""Finds why one worker failed: from its exit status, error file and last output, and the kernel's memory counters."""

import os
import re
import resource
import signal
from collections.abc import Callable, Mapping

from muster._shared.causes import CRASH, DISK, HOST_OOM, UNKNOWN, USAGE
from muster._shared.contract import LogNames, name_signal
from muster._shared.foreign_files import read_regular
from muster._shared.policy import ELSEWHERE, STOP
from muster._shared.processes import wait_events
from muster._shared.records import NO_ITEMS, record, replace
from muster._shared.reports import FailedCheck, Failure, OomEvidence, format_size, print_values
from muster.agent.diagnosis.classes import EARLY_S, FoundClass, classify, find_usage_sign
from muster.agent.diagnosis.kernel_log import KernelLog
from muster.agent.diagnosis.root_cause import add_early_exits
from muster.agent.diagnosis.tracebacks import find_place, read_error_file, read_stderr
from muster.agent.logs import WorkerStreams
from muster.agent.round import Round
from muster.agent.runtime.loop import Clock
from muster.agent.workers.memory import MemoryCgroup, MemoryWatch, read_number
from muster.agent.workers.pool import WorkerEnd
from muster.agent.workers.status_page import SlotStatus

_UNLIMITED_BYTES = 1 << 60
"""cgroup v1 shows "no limit" as the largest multiple of a page that fits into a long."""


class OomWatch:
    """Compares the kernel's counters with those of the last `MemoryWatch.reset`: has it killed a process for memory?

    A SIGKILL that the agent did not send has few possible senders. The counter of OOM kills in the worker's own cgroup
    proves an OOM kill. A reached limit, or a kill anywhere on the machine, only makes one likely and is called a guess.
    """

    def __init__(self, memory: MemoryWatch) -> None:
        self._memory = memory

    @property
    def counts_kills(self) -> bool:
        """Whether the kernel counts the OOM kills of this node's own cgroup. Then none counted means none."""
        return self._memory.cgroup is not None and self._memory.before.kills is not None

    def check(self) -> OomEvidence | None:
        """Return the evidence of an OOM kill since the reset; None if there is none."""
        before, now, cgroup = self._memory.before, self._memory.read(), self._memory.cgroup
        if cgroup is not None and now.kills is not None and before.kills is not None and now.kills > before.kills:
            name = "memory.events" if cgroup.version == 2 else "memory.oom_control"
            return _build_oom_evidence(cgroup, certain=True, source=f"{cgroup.folders[0]}/{name}")
        if cgroup is not None and now.limit_hits > before.limit_hits and now.kills is None:
            return _build_oom_evidence(cgroup, certain=False, source=f"{cgroup.folders[0]}/memory.failcnt")
        if now.machine_kills > before.machine_kills:
            return _build_oom_evidence(cgroup, certain=False, source=f"{self._memory.proc}/vmstat")
        return None


def _build_oom_evidence(cgroup: MemoryCgroup | None, *, certain: bool, source: str) -> OomEvidence:
    limit = find_limit(cgroup) if cgroup else None
    return OomEvidence(
        certain=certain,
        limit_bytes=limit[0] if limit else None,
        peak_bytes=_read_peak(limit[1]) if limit else None,
        source=source,
    )


def find_limit(cgroup: MemoryCgroup) -> tuple[int, str] | None:
    """Return the lowest limit of the cgroup and those above it, and its folder; None if unlimited."""
    name = "memory.max" if cgroup.version == 2 else "memory.limit_in_bytes"
    limits = [(limit, folder) for folder in cgroup.folders if (limit := read_number(f"{folder}/{name}")) is not None]
    limits = [(limit, folder) for limit, folder in limits if limit < _UNLIMITED_BYTES]
    return min(limits, key=lambda found: found[0]) if limits else None


def _read_peak(folder: str) -> int | None:
    for name in ("memory.peak", "memory.max_usage_in_bytes"):  # v2 (Linux 5.19), v1
        peak = read_number(f"{folder}/{name}")
        if peak is not None:
            return peak
    return None


_CRASH_BYTES = 64 << 10
_EXIT_BYTES = 8
_KERNEL_S = 60.0
"""How long before a worker's end the kernel's log may show its cause. What the worker survived for longer is no cause.
"""
_VERDICT_CALLS = {STOP: "muster.worker.give_up", ELSEWHERE: "muster.worker.leave_node"}
_NOT_MEMORY = "a process sent SIGKILL: this cgroup counts no OOM kill"
_OTHER_MEMORY = re.compile(r"/dev/shm|shared memory|[Kk]illed|/torch_")  # noqa: S108 - in messages
_QUOTED_PATH = re.compile(r"'([^'\n]*/[^'\n]*)'|: '([^'\n]+)'")
_KILLERS = (
    "the kernel for want of memory (`dmesg -T` on that host)",
    "a limit of the scheduler or of the container",
    "another person or program (`kill -9`)",
)
_STACKS_HEADER = "--- stacks of process "
"""Each process that opens a stack file writes this first, see `workers.program`."""


@record
class FailedWorker:
    """What its node knows about a failed worker before any of its files is read."""

    round: Round
    """The round that the worker was started for."""
    local_rank: int
    end: WorkerEnd | None = None
    """None if no process has ended, because the worker could not be started or hangs."""
    hung_pid: int | None = None
    """The process of a worker that hangs; None if it has ended or was never started."""
    spawn_errno: int | None = None
    """The error of the call that could not start the worker."""
    reason: str = ""
    """One line, if there is no exit status."""
    check: FailedCheck | None = None
    """The check that has found the failure."""
    streams: WorkerStreams | None = None
    """None if there were no streams yet."""
    stderr_text: str = ""
    """The end of the worker's stderr, some 64 KiB."""
    stderr_tail: tuple[str, ...] = ()
    """The last lines of stderr."""
    slot: SlotStatus | None = None
    """What the worker has reported on the status page."""
    values: Mapping[str, float] = NO_ITEMS
    """The numbers that the worker has reported there, by name."""
    ended_ranks: tuple[int, ...] = ()
    """Global ranks of this node that had succeeded before."""
    requested_verdict: tuple[str, str] | None = None
    """What the rank itself has requested as follow-up, and why; see `Failure.requested_verdict`."""


@record
class WorkerFiles:
    """What the files of a failed worker say."""

    written_s: float | None = None
    """When it recorded its exception or its exit code, by the wall clock; None if it recorded none."""
    exit_code: int | None = None
    """The exit code that it has recorded; None if it has raised or was killed."""
    exception: tuple[str, str | None] | None = None
    """Exception and traceback."""
    error_file: str | None = None


def read_files(worker: FailedWorker) -> WorkerFiles:
    """Read them, on a disk that may hang."""
    streams = worker.streams
    error_file = streams.error_file if streams else None
    written_s = [os.stat(path).st_mtime for path in _list_records(streams) if os.path.exists(path)]
    return WorkerFiles(
        written_s=min(written_s, default=None),
        exit_code=_read_exit_code(streams),
        exception=_find_exception(worker),
        error_file=error_file if error_file and os.path.exists(error_file) else None,
    )


class FailureBuilder:
    """Builds the report of a failed worker."""

    def __init__(self, *, host: str, clock: Clock, oom: OomWatch, kernel: KernelLog) -> None:
        """Set what all failures of this node share.

        Args:
            host: the name of this machine in reports.
            clock: that of the agent's loop.
            oom: was reset when the round's workers were started.
            kernel: the kernel's log.
        """
        self._host = host
        self._clock = clock
        self._oom = oom
        self._kernel = kernel

    def build(
        self, worker: FailedWorker, files: WorkerFiles, advise: Callable[[Failure], str] | None = None
    ) -> Failure:
        """Build the failure of one worker.

        Args:
            worker: the worker.
            files: what its files say.
            advise: calls `find_advice`, which may look at a file system.
        """
        formed, end, streams, slot = worker.round, worker.end, worker.streams, worker.slot
        age_s, stopped_by_us = self._date(end, files.written_s)
        code = end.code if end else None
        if end is not None and end.signalled_s is not None and not stopped_by_us:
            code = files.exit_code or code  # the signal came during its end
        exception, traceback = files.exception or (None, None)
        if worker.requested_verdict is not None:
            exception = f"{_VERDICT_CALLS[worker.requested_verdict[0]]}: {worker.requested_verdict[1]}"
        step = slot.step if slot else None
        saved_step = formed.continued_step
        if saved_step is None and formed.checkpoint is not None:
            saved_step = formed.checkpoint.step
        has_stepped = step is not None or (slot is not None and bool(slot.optimizer_steps))
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
            check=worker.check,
            exception=exception,
            traceback=traceback,
            error_file=files.error_file,
            stderr_tail=worker.stderr_tail,
            log_path=(worker.stderr_text and streams.stderr_log) or streams.stdout_log or streams.stderr_log
            if streams
            else None,
            oom=None if code is None or stopped_by_us else self._find_oom(code),
            stopped_by_us=stopped_by_us,
            collateral=stopped_by_us,
            step=step,
            total_steps=slot.total if slot else None,
            optimizer_steps=slot.optimizer_steps if slot and step is None else None,
            values=print_values(worker.values),
            saved_step=None if has_stepped else saved_step,
            hung=worker.hung_pid is not None,
            requested_verdict=worker.requested_verdict[0] if worker.requested_verdict else "",
            reports_steps=slot is not None and slot.owner_pid is not None,
        )
        return add_early_exits(self._add_class(failure, worker, advise or find_advice), worker.ended_ranks)

    def _add_class(self, failure: Failure, worker: FailedWorker, advise: Callable[[Failure], str]) -> Failure:
        """Add the class of the failure's cause, and advice; a worker that we have ended has none."""
        if failure.stopped_by_us:
            return failure
        end = worker.end
        run_time_s = max(0.0, end.ended_s - end.worker.started_s) if end else 0.0
        kernel = () if end is None else self._kernel.read(max(end.worker.started_s, end.ended_s - _KERNEL_S))
        found = classify(failure, run_time_s, worker.spawn_errno, kernel)
        if worker.streams and worker.streams.stdout_fd is None and _has_lost_console(failure):
            found = FoundClass(cause=USAGE, evidence="nothing reads its output", early=run_time_s <= EARLY_S)
        evidence = found.evidence
        is_killed = failure.signal == "SIGKILL" and failure.oom is None
        if end is not None and found.cause == UNKNOWN and not evidence and is_killed:
            evidence = self._find_other_kill(end.ended_s) or (_NOT_MEMORY if self._oom.counts_kills else "")
        if found.cause == UNKNOWN and failure.exit_code and not (evidence or failure.exception):
            evidence = f"it ended with exit code {failure.exit_code} and raised no Python exception"
        limit = resource.getrlimit(resource.RLIMIT_AS)[0]  # the worker's as well
        is_limited = limit != resource.RLIM_INFINITY and failure.oom is None
        if found.cause == HOST_OOM and is_limited and not _OTHER_MEMORY.search(evidence):
            evidence = f"limit of the process: ulimit -v {format_size(limit)}"
        failure = replace(failure, cause=found.cause, evidence=evidence, early=found.early)
        return replace(failure, advice=advise(failure))

    def _find_other_kill(self, ended_s: float) -> str:
        """Say that the kernel has killed another process of this machine for memory shortly before."""
        kills = [line.pid for line in self._kernel.read(ended_s - _KERNEL_S) if line.cause == HOST_OOM]
        return f"within a minute after the kernel killed process {kills[-1]} for want of memory (OOM)" if kills else ""

    def _date(self, end: WorkerEnd | None, written_s: float | None) -> tuple[float, bool]:
        """Return how long ago the worker failed, in seconds, and whether it had got a signal of ours before."""
        now_s = self._clock.now_s()
        if end is None:
            return 0.0, False
        raised_age_s = None
        if written_s is not None:
            # The wall clock may have changed.
            age_s = max(self._clock.wall_s() - written_s, now_s - end.ended_s)
            raised_age_s = min(age_s, now_s - end.worker.started_s)
        signal_age_s = None if end.signalled_s is None else now_s - end.signalled_s
        if raised_age_s is not None and (signal_age_s is None or raised_age_s > signal_age_s):
            # With torch, an interpreter takes up to a second to end after an exception, and closes its connections
            # before. Its exit may follow a victim's, or our signal.
            return raised_age_s, False
        return max(0.0, now_s - end.ended_s), signal_age_s is not None

    def _find_oom(self, code: int) -> OomEvidence | None:
        """Return the evidence of an OOM kill that explains the failure.

        A counted kill may have hit a child, whose parent then failed. A guess must explain a SIGKILL.
        """
        evidence = self._oom.check()
        return evidence if evidence and (evidence.certain or code == -signal.SIGKILL) else None


def _has_lost_console(failure: Failure) -> bool:
    """Return whether a worker has ended because nothing reads the agent's standard output, which is its own."""
    is_broken = failure.signal == "SIGPIPE" or "BrokenPipe" in (failure.exception or "")
    return is_broken and bool(wait_events({1: 0}, 0.0))


def find_advice(failure: Failure) -> str:
    """Return what to check or do next, in one line; "" if the cause says enough.

    It looks at a file system only if that has just answered: the failure has an error file, and is no I/O error.
    """
    if failure.cause == UNKNOWN and failure.signal == "SIGKILL":
        is_above = failure.evidence == _NOT_MEMORY
        first, second, last = _KILLERS[::-1] if is_above else _KILLERS
        where = ", for a limit above this cgroup" if is_above else ""
        return f"find what has sent SIGKILL: {first}, {second}, or {last}{where}"
    if failure.cause == UNKNOWN and failure.exit_code and not failure.exception:
        return f"look at its last lines, and search the script and its libraries for exit({failure.exit_code})"
    if not failure.stderr_tail and (failure.signal == "SIGABRT" or (failure.cause == CRASH and not failure.exception)):
        return "its stderr says what ended it, in a line such as `what():  ...`; with --tee 2 this report quotes it"
    if failure.cause != DISK:
        return ""
    text = f"{failure.evidence}\n{failure.exception or ''}"
    named = _QUOTED_PATH.search(text)
    path = (named[1] or named[2]) if named else ""
    place = find_place(failure.traceback or "")
    line = f" ({place[0]})" if place else ""
    what, where = path or "the message names no path", "" if named else f" where the program writes{line}"
    answers = path and failure.error_file and "Input/output error" not in text
    free = f" ({_describe_free(path)})" if answers else ""
    return f"{what}{free}: remove files{where}, or write elsewhere; `df -h` and `dmesg -T` on that host show more"


def _describe_free(path: str) -> str:
    """Return the free space of the file system that has this file, or is to have it."""
    path = os.path.abspath(path)
    while not os.path.exists(path):
        path = os.path.dirname(path)
    try:
        found = os.statvfs(path)
    except OSError as error:
        return str(error.strerror)
    return f"{format_size(found.f_bavail * found.f_frsize)} free"


def _list_records(streams: WorkerStreams | None) -> tuple[str, ...]:
    """Return the files in which a worker that begins to end by itself records its exception or exit code."""
    if streams is None or streams.error_file is None:
        return ()
    return streams.error_file, f"{streams.error_file}{LogNames.EXIT_SUFFIX}"


def _read_exit_code(streams: WorkerStreams | None) -> int | None:
    """Return the exit code that the worker has recorded; None if it has raised or was killed."""
    try:
        return int(read_regular(_list_records(streams)[1], _EXIT_BYTES))
    except (IndexError, OSError, ValueError):
        return None


def _find_exception(worker: FailedWorker) -> tuple[str, str | None] | None:
    """Return exception and traceback, wherever Python has written them."""
    streams = worker.streams
    found = read_error_file(streams.error_file if streams else None)
    found = found or read_stderr(worker.stderr_text or read_crash(streams))
    sign = None if found else find_usage_sign(worker.end.code if worker.end else None, worker.stderr_tail)
    return (sign, None) if sign else found


def read_crash(streams: WorkerStreams | None) -> str:
    """Return what faulthandler wrote into the stack file.

    A worker whose stderr is not captured reports a crash there.
    """
    try:
        text = read_regular((streams and streams.stack_file) or "", _CRASH_BYTES, -_CRASH_BYTES)
        return text.decode("utf-8", "replace").rpartition(_STACKS_HEADER)[2]
    except OSError:
        return ""
