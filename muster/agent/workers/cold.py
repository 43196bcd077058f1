"""Cold workers, each started by fork and exec."""

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

from muster._shared import processes
from muster.agent.errors import SpawnError
from muster.agent.workers import program
from muster.agent.workers.spec import ProgramKind, WorkerSpec, WorkerStarter

_EXEC_LIMIT_S = 1.0
"""How long the agent's loop may wait for a program's disk. It sends one heartbeat a second and may miss four."""


class CommandStarter(WorkerStarter):
    """Starts each worker as its own command (see `spec.WorkerStarter`)."""

    def __init__(self, *, on_record: Callable[..., None] | None = None) -> None:
        """Keep the settings; `start` starts workers.

        Args:
            on_record: `EventLog.write`, or a function with its arguments; None when the caller records the starts.
        """
        self._on_record = on_record

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


def build_command(spec: WorkerSpec) -> list[str]:
    """Return the worker's whole command line."""
    prog = spec.program
    if prog.kind is ProgramKind.COMMAND:
        return [*spec.command_prefix, prog.target, *prog.args]
    return [*spec.command_prefix, sys.executable, *program.build_argv(program.build_worker_args(spec))]


def spawn(spec: WorkerSpec, *, keep_fds: Sequence[int] = (), until_s: float | None = None) -> int:
    """Start one worker, and return its process id.

    This must run in the thread that lives as long as the agent, for two reasons. A death signal comes at the end of the
    *thread* that forked. The thread that collects children must know a worker before it can end. So the agent's loop
    waits for fork and exec: 4 ms per worker (33 ms if ten processes wait for each core), and never beyond `until_s`.
    Signals that were ignored at the agent's start (nohup) stay ignored.

    Args:
        spec: what to start.
        keep_fds: what it inherits besides 0, 1 and 2 (the template's control socket).
        until_s: how long to wait for the exec, by the monotonic clock; None means `_EXEC_LIMIT_S`. The disk with the
            program may hang. If the exec fails later, the worker exits with 127.

    Raises:
        SpawnError: there is no such program, or memory, descriptors or processes ran out. One line says which.
    """
    try:
        return processes.spawn(
            lambda: exec_worker(spec),
            (0, spec.stdout_fd, spec.stderr_fd),
            keep_fds,
            death_signal=signal.SIGKILL,
            limit_s=_EXEC_LIMIT_S if until_s is None else until_s - time.monotonic(),
            keeps_ignored=True,
        )
    except OSError as error:
        what = "fork a worker" if error.filename is None else f"run {build_command(spec)[0]!r}"
        raise SpawnError(f"cannot {what}: {error.strerror}", error.errno) from error


def exec_worker(spec: WorkerSpec) -> NoReturn:
    """Become a worker whose session, death signal, descriptors and signals are arranged."""
    if spec.cpus is not None:
        os.sched_setaffinity(0, spec.cpus)
    command = build_command(spec)
    os.execvpe(command[0], command, spec.env)  # noqa: S606  # deliberately without a shell
