"""Cold workers, each started by fork and exec."""

import contextlib
import errno
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn

from muster._shared import processes
from muster.agent.errors import SpawnError
from muster.agent.workers import program
from muster.agent.workers.spec import ProgramKind, WorkerSpec

_EXEC_FAILED = 127
_EXEC_LIMIT_S = 1.0
"""How long the agent's loop may wait for a program's disk. It sends one heartbeat a second and may miss four."""
_RESET_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGCHLD")
)
"""Signals that the agent may handle. Signals that were ignored at its start (nohup) stay ignored."""


class CommandStarter:
    """Starts each worker as its own command (see `spec.WorkerStarter`)."""

    def __init__(self, *, on_record: Callable[..., None] | None = None) -> None:
        """Keep the settings; `start` starts workers.

        Args:
            on_record: `EventLog.write`, or a function with its arguments; None when the caller records the starts.
        """
        self._on_record = on_record

    def prepare(self, on_read: Callable[[], None], on_prepared: Callable[[], None]) -> None:
        """Do nothing: a cold start needs the ranks."""
        on_prepared()
        on_read()

    def can_host_store(self) -> bool:
        """Return False: this starter imports no torch, so global rank 0's worker hosts the store."""
        return False

    def start_store(self, addr: str, port: int, world_size: int, on_lost: Callable[[str], None]) -> None:
        """Do nothing: it is not called, because of `can_host_store`."""
        raise NotImplementedError

    def check_store(self) -> None:
        """Do nothing: there is no store."""

    def end_store(self) -> None:
        """Do nothing: there is no store."""

    def start(
        self,
        specs: Sequence[WorkerSpec],
        on_started: Callable[[int, int], None],
        on_failed: Callable[[int, SpawnError], None],
    ) -> None:
        """See `spec.WorkerStarter`. Stop at the first worker that cannot be started, because the round fails anyway.

        This runs on the agent's loop (see `spawn`). All workers together wait at most `_EXEC_LIMIT_S` for their disk.
        """
        until_s = time.monotonic() + _EXEC_LIMIT_S
        for spec in specs:
            try:
                pid = spawn(spec, until_s=until_s)
            except SpawnError as error:
                on_failed(spec.local_rank, error)
                return
            if self._on_record is not None:
                self._on_record("worker_released", how="cold", local_rank=spec.local_rank, pid=pid)
            on_started(spec.local_rank, pid)

    def park(self, count: int) -> None:
        """Do nothing: a cold start needs the ranks."""

    def cancel(self) -> None:
        """Do nothing: starts happen at once."""

    def list_own_pids(self) -> frozenset[int]:
        """Return an empty list: this starter has no processes of its own."""
        return frozenset()

    def close(self) -> None:
        """Do nothing: this starter has no processes of its own."""


def build_command(spec: WorkerSpec) -> list[str]:
    """Return the worker's whole command line."""
    prog = spec.program
    if prog.kind is ProgramKind.COMMAND:
        return [*spec.command_prefix, prog.target, *prog.args]
    return [*spec.command_prefix, sys.executable, *program.build_argv(program.build_words(spec))]


def spawn(spec: WorkerSpec, *, keep_fd: int | None = None, until_s: float | None = None) -> int:
    """Start one worker, and return its process id.

    This must run in the thread that lives as long as the agent, for two reasons. A death signal comes at the end of the
    *thread* that forked. The thread that collects children must know a worker before it can end. So the agent's loop
    waits for fork and exec: 4 ms per worker (33 ms if ten processes wait for each core), and never beyond `until_s`.

    Args:
        spec: what to start.
        keep_fd: a descriptor it keeps besides 0, 1 and 2, under the same number (the template's control socket).
        until_s: how long to wait for the exec, by the monotonic clock; None means `_EXEC_LIMIT_S`. The disk with the
            program may hang. If the exec fails later, the worker exits with 127.

    Raises:
        SpawnError: there is no such program, or memory, descriptors or processes ran out. One line says which.
    """
    command = build_command(spec)
    try:
        report_read, report_write = os.pipe()
    except OSError as error:
        raise SpawnError(f"cannot start {command[0]!r}: {error.strerror}", error.errno) from error
    agent_pid = os.getpid()
    try:
        with warnings.catch_warnings():
            # Python 3.12 warns of threads: ours hold no lock that the child needs before exec.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
    except OSError as error:
        os.close(report_read)
        os.close(report_write)
        raise SpawnError(f"cannot fork a worker: {error.strerror}", error.errno) from error
    if pid == 0:
        exec_worker(spec, command, report_write, agent_pid, keep_fd)
    os.close(report_write)
    try:
        failed = _read_report(report_read, until_s or time.monotonic() + _EXEC_LIMIT_S)
    finally:
        os.close(report_read)
    if failed:
        os.waitpid(pid, 0)
        raise SpawnError(f"cannot run {command[0]!r}: {os.strerror(int(failed))}", int(failed))
    return pid


def _read_report(fd: int, until_s: float) -> bytes:
    """Return the errno of the exec; empty if the exec has succeeded or has not finished yet."""
    return os.read(fd, 16) if processes.wait_readable(fd, until_s - time.monotonic()) else b""


def _close_other_descriptors(kept: Iterable[int]) -> None:
    """Close every descriptor from 3 on that is not kept, even if it was inheritable when the agent started."""
    first = 3
    for fd in sorted(kept):
        os.closerange(first, fd)
        first = fd + 1
    os.closerange(first, os.sysconf("SC_OPEN_MAX"))


def exec_worker(
    spec: WorkerSpec, command: list[str], report_write: int, agent_pid: int, keep_fd: int | None
) -> NoReturn:
    """Set up session, death signal, descriptors and affinity in the child, then exec the worker. Never returns.

    The exec closes `report_write`. If a step fails before, its errno is written there.
    """
    code = errno.EINVAL
    try:
        os.setsid()
        processes.set_death_signal(signal.SIGKILL)
        if os.getppid() != agent_pid:
            os._exit(_EXEC_FAILED)
        for source, target in ((spec.stdout_fd, 1), (spec.stderr_fd, 2)):
            if source != target:
                os.dup2(source, target)
        _close_other_descriptors({report_write} if keep_fd is None else {report_write, keep_fd})
        if keep_fd is not None:
            os.set_inheritable(keep_fd, True)
        if spec.cpus is not None:
            os.sched_setaffinity(0, spec.cpus)
        for signum in _RESET_SIGNALS:
            if signal.getsignal(signum) is not signal.SIG_IGN:
                signal.signal(signum, signal.SIG_DFL)
        for signum in processes.IGNORED_BY_PYTHON:
            signal.signal(signum, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.execvpe(command[0], command, spec.env)  # noqa: S606  # deliberately without a shell
    except OSError as error:
        code = error.errno or code
    finally:
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # the agent may be gone
        with contextlib.suppress(OSError):
            os.write(report_write, str(code).encode())
        os._exit(_EXEC_FAILED)
