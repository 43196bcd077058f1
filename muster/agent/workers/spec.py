"""What a worker is, however it is started: the user's program, its ranks' environment, its descriptors."""

import signal
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol


def stack_signal() -> int | None:
    """The signal that makes a Python worker append its threads' stacks to its stack file; None where there is none.

    A real-time signal near the upper end: the low ones are taken by glibc, Go and JVM runtimes, SIGUSR1 and SIGUSR2 by
    everybody. Its default action ends a process: send it only to one that catches it (see `agent.stacks`).
    """
    highest = getattr(signal, "SIGRTMAX", None)
    return None if highest is None else int(highest) - 5


class ProgramKind(Enum):
    """How the user named the program."""

    SCRIPT = "script"
    """`python script.py args`."""
    MODULE = "module"
    """`python -m module args`."""
    RUN_PATH = "run_path"
    """`--run-path`: the script is run by `runpy.run_path` with `__main__` as its name, as torchrun does."""
    COMMAND = "command"
    """`--no-python`: any executable."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """The user's program and its arguments, `${local_rank}` not yet substituted."""

    kind: ProgramKind
    target: str
    """Script path, dotted module name or executable."""
    args: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class WorkerSpec:
    """Everything needed to start one worker."""

    local_rank: int
    program: Program
    """With macros substituted for this rank."""
    env: Mapping[str, str]
    """The worker's whole environment."""
    stdout_fd: int | None = None
    """Write end the worker gets as its descriptor 1; None: the agent's own. Stays the caller's to close."""
    stderr_fd: int | None = None
    cpus: frozenset[int] | None = None
    """CPU affinity; None: the agent's own."""
    command_prefix: tuple[str, ...] = field(default=())
    """Words put before the command (numactl ...); only possible cold."""
    error_file: str | None = None
    """Where an uncaught exception is written in torch's format; also in env as TORCHELASTIC_ERROR_FILE."""
    store_port: int | None = None
    """Where this worker, which has global rank 0, will listen for the others; None: it is another one, there are no
    others, or somebody else listens."""
    stack_file: str | None = None
    """Where the worker appends its Python stacks when it receives `STACK_SIGNAL`."""


class WorkerStarter(Protocol):
    """Starts workers: `command.CommandStarter` (cold) or `template.TemplateStarter` (warm).

    A started worker is a direct child of the agent, leads its own session, dies by SIGKILL when the agent dies, has
    default signal dispositions and an empty signal mask, and only the descriptors 0, 1, 2. The agent's one reaper
    (SIGCHLD, `waitpid(-1)`) learns of its end; a starter never waits for a worker.
    """

    def prepare(self, on_prepared: Callable[[], None]) -> None:
        """Begin whatever can begin before ranks are known (the template's imports). Returns at once.

        Args:
            on_prepared: called once, possibly before this returns, when nothing is left to wait for: from then on
                workers start at once.
        """
        ...

    def start(
        self,
        specs: Sequence[WorkerSpec],
        on_started: Callable[[int, int], None],
        on_failed: Callable[[int, str], None],
    ) -> None:
        """Start one worker per spec. Returns at once; calls back on the loop, in any order, possibly before returning.

        Args:
            specs: length nproc, in order of local rank.
            on_started: called with (local_rank, pid) once the worker exists.
            on_failed: called with (local_rank, one line why) for a worker that could not be started; the
                supervisor then stops those that were.
        """
        ...

    def park(self, count: int) -> None:
        """A start of `count` workers is soon to come: make ready what can be made ready without ranks."""
        ...

    def when_ahead(self, then: Callable[[], None]) -> None:
        """Call `then` when no worker that was started is being given a head start any more: mostly at once."""
        ...

    def cancel(self) -> None:
        """Forget starts that have not happened yet; no callback of theirs comes after this returns."""
        ...

    def reaped(self, pid: int, status: int) -> None:
        """The agent's reaper saw the end of a child that is no known worker; it may be the starter's own."""
        ...

    def keep_pids(self) -> Container[int]:
        """Processes that belong to the starter (the template) and outlive a stop of the workers."""
        ...

    def close(self) -> None:
        """End the starter's own processes. Idempotent."""
        ...
