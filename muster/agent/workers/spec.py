"""Describes a worker, cold or warm: the user's program, its environment and its descriptors."""

import json
from collections.abc import Callable, Collection, Container, Sequence
from enum import Enum
from typing import TYPE_CHECKING

from muster._shared.records import build, record

if TYPE_CHECKING:  # the template imports this module but not `errors`
    from muster.agent.errors import SpawnError


class ProgramKind(str, Enum):
    """How the user named the program. A worker gets the value as text and compares it with `==`."""

    SCRIPT = "script"
    """`python script.py args`."""
    MODULE = "module"
    """`python -m module args`."""
    RUN_PATH = "run_path"
    """`--run-path`: the script is run by `runpy.run_path` with `__main__` as its name, as torchrun does."""
    COMMAND = "command"
    """`--no-python`: any executable."""


HELD = "held"
"""Replaces a program's kind: the template waits for its program, see `warm.template`."""


@record
class Program:
    """The user's program and its arguments, before `${local_rank}` is substituted."""

    kind: ProgramKind
    target: str
    """Script path, dotted module name or executable."""
    args: tuple[str, ...] = ()


@record
class WorkerSpec:
    """The single record that says how a worker is launched.

    A cold worker gets the program and the text fields (see `program.build_worker_args`). What the other fields say is
    done before its first line runs. A parked worker gets all of it as JSON. Both read the fields by these names.
    """

    local_rank: int
    program: Program
    """With macros substituted for this rank."""
    env: dict[str, str]
    """The worker's whole environment."""
    stdout_fd: int = 1
    """Write end that becomes the worker's descriptor 1, by default the agent's own. The caller closes it."""
    stderr_fd: int = 2
    cpus: Collection[int] | None = None
    """CPU affinity; None means the agent's own."""
    command_prefix: Sequence[str] = ()
    """Words put before the command (numactl ...); only for cold workers."""
    error_file: str = ""
    """Where an uncaught exception is written in torch's format; "" means nowhere.

    The environment has it too, as TORCHELASTIC_ERROR_FILE.
    """
    stack_file: str = ""
    """Where the worker appends its Python stacks when it receives `program.get_stack_signal()`; "" means nowhere."""
    crash_file: str = ""
    """Where the worker writes the stack of a crash; "" means its stderr, because the agent reads that."""

    def to_json(self) -> str:
        """Return all fields for a parked worker; the descriptors are sent beside them."""
        return json.dumps(self, default=_list_parts)

    @classmethod
    def from_json(cls, text: bytes, *, stdout_fd: int, stderr_fd: int) -> "WorkerSpec":
        """Read what `to_json` returns, with the descriptors as they arrived."""
        values = json.loads(text)
        program = build(Program, values["program"])
        return build(cls, {**values, "program": program, "stdout_fd": stdout_fd, "stderr_fd": stderr_fd})


def _list_parts(value: object) -> object:
    return sorted(value) if isinstance(value, frozenset) else vars(value)


class WorkerStarter:
    """Starts workers: `cold.CommandStarter` or `warm.starter.TemplateStarter`. What one needs, it overrides.

    A started worker is a direct child of the agent and leads its own session. SIGKILL ends it when the agent dies. It
    has default signal dispositions, an empty signal mask, and only the descriptors 0, 1 and 2. Only the agent's
    `ChildWatch` collects workers; a starter never does.
    """

    def prepare(self, on_read: Callable[[], None], on_prepared: Callable[[], None]) -> None:
        """Start what needs no ranks (the template's imports). Returns at once.

        Args:
            on_read: called once, possibly before this returns. From then on `can_host_store` is known.
            on_prepared: called once, possibly before this returns. From then on workers start at once.
        """
        on_prepared()
        on_read()

    def can_host_store(self) -> bool:
        """Return whether this node would host the round's store in a process of its own, if it had global rank 0."""
        return False

    def start_store(self, addr: str, port: int, on_lost: Callable[[str], None]) -> None:
        """Listen on MASTER_PORT at once, have a process serve the round's store, and end the store before.

        Args:
            addr: MASTER_ADDR.
            port: MASTER_PORT.
            on_lost: called at most once, on the loop, possibly before this returns, if there is no store (any more).
                Its argument is a clause about the round's rank 0.
        """
        raise NotImplementedError  # nothing calls it, because of `can_host_store`

    def end_store(self) -> None:
        """End the store's process, if there is one: no node has a worker of its round any more."""

    def start(
        self,
        specs: Sequence[WorkerSpec],
        on_started: Callable[[int, int], None],
        on_failed: "Callable[[int, SpawnError], None]",
    ) -> None:
        """Start one worker per spec. Returns at once; calls back on the loop, in any order, possibly before returning.

        Args:
            specs: length nproc, in order of local rank.
            on_started: called with (local_rank, pid) once the worker exists.
            on_failed: called with (local_rank, why) for a worker that could not be started. The supervisor then stops
                the started ones.
        """
        raise NotImplementedError

    def park(self, count: int) -> None:
        """Prepare a start of `count` workers that will come soon, as far as this needs no ranks."""

    def cancel(self) -> None:
        """Cancel starts of workers that have not happened yet; none of their callbacks is called after this returns.

        Those of processes that are no workers yet, of a local rank below 0, go on.
        """

    def list_own_pids(self) -> Container[int]:
        """Return the starter's own processes (the template), which a stop of the workers must not kill."""
        return frozenset()

    def close(self) -> None:
        """End the starter's own processes. Idempotent."""
