"""What a worker is, cold or warm: the user's program, its environment, its descriptors."""

import json
from collections.abc import Callable, Collection, Container, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Protocol

from muster._shared.records import build, record

if TYPE_CHECKING:  # the template imports this module but not `errors`
    from muster.agent.errors import SpawnError


class ProgramKind(str, Enum):
    """How the user named the program. A worker gets the text, and compares it with `==`."""

    SCRIPT = "script"
    """`python script.py args`."""
    MODULE = "module"
    """`python -m module args`."""
    RUN_PATH = "run_path"
    """`--run-path`: the script is run by `runpy.run_path` with `__main__` as its name, as torchrun does."""
    COMMAND = "command"
    """`--no-python`: any executable."""


HELD = "held"
"""In place of a program's kind: the template waits for one, see `warm.preload`."""


@record
class Program:
    """The user's program and its arguments, `${local_rank}` not yet substituted."""

    kind: ProgramKind
    target: str
    """Script path, dotted module name or executable."""
    args: tuple[str, ...] = ()


@record
class WorkerSpec:
    """How one worker is launched: the one record that says it, made once.

    A cold worker is told the program and the fields that are text, see `program.build_words`; what the rest says is
    done before its first line runs. A parked worker gets all of it as JSON. Both read them by these names.
    """

    local_rank: int
    program: Program
    """With macros substituted for this rank."""
    env: dict[str, str]
    """The worker's whole environment."""
    stdout_fd: int = 1
    """Write end the worker gets as its descriptor 1, by default the agent's own. The caller closes it."""
    stderr_fd: int = 2
    cpus: Collection[int] | None = None
    """CPU affinity; None: the agent's own."""
    command_prefix: Sequence[str] = ()
    """Words put before the command (numactl ...); cold workers only."""
    error_file: str = ""
    """Where an uncaught exception is written in torch's format; also in env as TORCHELASTIC_ERROR_FILE. "": nowhere."""
    stack_file: str = ""
    """Where the worker appends its Python stacks when it receives `program.get_stack_signal()`; "": nowhere."""
    crash_file: str = ""
    """Where the worker writes the stack of a crash; "": on its stderr, because the agent reads that."""

    def to_json(self) -> str:
        """Return all of it, for a parked worker; the descriptors travel beside."""
        return json.dumps(self, default=_list_parts)

    @classmethod
    def from_json(cls, text: bytes, *, stdout_fd: int, stderr_fd: int) -> "WorkerSpec":
        """Read what `to_json` returns, with the descriptors as they arrived."""
        values = json.loads(text)
        program = build(Program, values["program"])
        return build(cls, {**values, "program": program, "stdout_fd": stdout_fd, "stderr_fd": stderr_fd})


def _list_parts(value: object) -> object:
    return sorted(value) if isinstance(value, frozenset) else vars(value)


class WorkerStarter(Protocol):
    """Starts workers: `cold.CommandStarter` or `warm.starter.TemplateStarter`.

    A started worker is a direct child of the agent, leads its own session, is killed by SIGKILL when the agent dies,
    has default signal dispositions and an empty signal mask, and only the descriptors 0, 1, 2. Only the agent's
    `ChildWatch` collects workers; a starter never does.
    """

    def prepare(self, on_read: Callable[[], None], on_prepared: Callable[[], None]) -> None:
        """Start what needs no ranks (the template's imports). Returns at once.

        Args:
            on_read: called once, possibly before this returns; from then on `can_host_store` is known.
            on_prepared: called once, possibly before this returns; from then on workers start at once.
        """
        ...

    def can_host_store(self) -> bool:
        """Return whether this node would host the round's store in a process of its own, if it had global rank 0."""
        ...

    def start_store(self, addr: str, port: int, world_size: int, on_lost: Callable[[str], None]) -> None:
        """Listen on MASTER_PORT at once and have a process serve the round's store, and end the one before.

        Args:
            addr: MASTER_ADDR.
            port: MASTER_PORT.
            world_size: how many workers the round has.
            on_lost: called at most once, on the loop, possibly before this returns, with a clause about the round's
                rank 0: there is no store (any more).
        """
        ...

    def check_store(self) -> None:
        """Have the store's process look now at what it else sees within a second: the workers are about to end."""
        ...

    def end_store(self) -> None:
        """End the store's process, if there is one: no worker of its round is left on any node."""
        ...

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
            on_failed: called with (local_rank, why) for a worker that could not be started; the
                supervisor then stops those that were.
        """
        ...

    def park(self, count: int) -> None:
        """Prepare a start of `count` workers that will come soon, as far as it needs no ranks."""
        ...

    def cancel(self) -> None:
        """Cancel starts that have not happened yet; none of their callbacks is called after this returns."""
        ...

    def list_own_pids(self) -> Container[int]:
        """Return the processes of the starter (the template) that a stop of the workers must not kill."""
        ...

    def close(self) -> None:
        """End the starter's own processes. Idempotent."""
        ...
