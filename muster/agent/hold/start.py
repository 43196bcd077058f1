"""What an agent on a hold has before its run: its loop, and a template that has imported torch without a program.

The original of these templates is started here too.
"""

import json
import os
import signal
import socket
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, NoReturn

from muster._shared import processes
from muster._shared.guard import GuardLease
from muster.agent.cli.arguments import parse_args
from muster.agent.errors import SpawnError
from muster.agent.features import PARTS, load_half
from muster.agent.hold.thread_counts import THREAD_VARIABLES
from muster.agent.runtime.loop import JobClock, Loop
from muster.agent.workers import program
from muster.agent.workers.cold import exec_worker
from muster.agent.workers.environment import build_common_env
from muster.agent.workers.spec import HELD
from muster.agent.workers.warm.fork_safety import find_early_difference
from muster.agent.workers.warm.template_handle import (
    MESSAGE_BYTES,
    TemplateHandle,
    TemplateOptions,
    list_program,
    make_memory_file,
)

if TYPE_CHECKING:
    from muster.agent.hold.listening import Order
    from muster.agent.workers.warm.forking import WaitsHeld

_PROGRAM: Final = ("-m", "muster.hold")
"""Flags are parsed together with a program, which does not exist yet."""
_OF_RUNS: Final = (
    *("muster.agent.logs.pump", "muster.agent.node.supervisor", "muster.agent.workers.status_page"),
    *("muster.agent.rendezvous.selection", "muster.agent.rendezvous.one_node", "encodings.idna"),
    *("muster.agent.rendezvous.member.member", "muster.agent.rendezvous.transport.tcp_network"),
    *("muster.agent.workers.warm.starter", "muster.agent.workers.warm.store_handle"),
)
"""They bring with them a hundred modules, which `launch` and others import when they are needed."""


class HeldTemplate(TemplateHandle):
    """A template that has no program yet: a fork of the node's `original`, and this process's child since then."""

    def __init__(self, loop: Loop, env: Mapping[str, str], pid: int, control_fd: int, stderr_fd: int) -> None:
        """Take it over.

        Args:
            loop: calls back with messages.
            env: with which the original was started.
            pid: the template's.
            control_fd: to it.
            stderr_fd: the memory file that is its standard error.
        """
        self._loop = loop
        self._on_message = None
        self.pending_sockets = []
        self.started_s = loop.clock.now_s()
        self._control = socket.socket(fileno=control_fd)
        self._control.set_inheritable(False)
        os.set_inheritable(stderr_fd, False)
        self._stderr_fd = stderr_fd
        self.pid = pid
        self._env = env

    @property
    def fd(self) -> int:
        """Readable when the template has sent something or has ended."""
        return -1 if self._control is None else self._control.fileno()

    def receive_held(self) -> "WaitsHeld | None":
        """Return what was imported, without a program; None if it has ended."""
        assert self._control is not None  # noqa: S101  # called before `close`
        self._control.setblocking(True)
        try:
            data = self._control.recv(MESSAGE_BYTES)
        except ConnectionError:
            return None
        finally:
            self._control.setblocking(False)
        message: WaitsHeld | None = json.loads(data) if data else None
        return message

    def find_obstacle(self, options: TemplateOptions, cwd: str) -> str | None:
        """Return why it cannot become a program's template, as far as this process knows; None if it can.

        Args:
            options: those with which that program's template would be started.
            cwd: the folder in which this one was started.
        """
        variable = find_early_difference(self._env, options.env, without=THREAD_VARIABLES)
        if variable is not None:
            return f"{variable} differs, and is read only at start"
        if options.cpus is not None:
            return "workers are bound to CPUs, which libraries count at import"
        paths = options.env.get("PYTHONPATH", "").split(os.pathsep)
        if cwd != os.getcwd() and any(path and not os.path.isabs(path) for path in paths):
            return "PYTHONPATH has a relative folder"
        return None

    def send_program(self, options: TemplateOptions, settings: Mapping[str, Any]) -> None:
        """Send the template its program, and what its workers inherit.

        Raises:
            SpawnError: the template has ended, or no descriptor is left.
        """
        assert self._control is not None  # noqa: S101  # called before `close`
        order = {
            "env": options.env,
            "preload": options.preload,
            "program": list_program(options.program),
            "settings": settings,
        }
        try:
            memory_fd = make_memory_file(json.dumps(order).encode())
            try:
                socket.send_fds(self._control, [b"!"], [memory_fd, 0])
            finally:
                os.close(memory_fd)
        except OSError as error:
            raise SpawnError(f"cannot reach the template: {error.strerror}", error.errno) from error
        self.started_s = self._loop.clock.now_s()


class HeldStart:
    """The start of one run."""

    def __init__(
        self, flags: Sequence[str], environ: Mapping[str, str], lease: GuardLease, template: Sequence[int]
    ) -> None:
        """Take the template over.

        Args:
            flags: the hold's, without a program.
            environ: the hold's.
            lease: the guard's.
            template: its pid, and the descriptors that `HeldTemplate` takes.

        Raises:
            MusterError: a flag is wrong.
        """
        config = parse_args([*flags, *_PROGRAM], environ)
        self.loop = Loop(JobClock(lease.suspended))
        self.refused = ""
        """Why the template is not the run's; "" if it is, or if the run starts cold anyway."""
        self._cwd = os.getcwd()
        self._nproc = config.nproc
        self._settings: Order = {}
        self._template = HeldTemplate(self.loop, build_common_env(config), *template)

    @property
    def template_fd(self) -> int:
        """Readable when the template has ended."""
        return self._template.fd

    def read_ready(self) -> dict[str, object] | None:
        """Wait until the template waits, and return what people see of it; None if it has ended."""
        imported = self._template.receive_held()
        if imported is None:
            return None
        return {"nproc": self._nproc, "modules": imported["held"], "import_s": imported["import_s"]}

    def import_ahead(self) -> None:
        """Import what a run would import at its start, while none waits for it."""
        for name in _OF_RUNS:
            import_module(name)
        for row in PARTS:
            load_half(row.name, "node")

    def become_run(self, env: Mapping[str, str], settings: "Order") -> None:
        """Give this process what the run's own process would have inherited; see `client`."""
        from muster.agent.hold.original import apply_settings
        from muster.agent.workers.warm.forked_worker import replace_environment

        self._settings = settings
        replace_environment(dict(env))
        apply_settings(settings)

    def take(self, warm: TemplateOptions | None) -> TemplateHandle | None:
        """Make this the run's template; return None if it cannot be, and is closed.

        Args:
            warm: the settings of the run's template; None if its workers start cold.
        """
        template = self._template
        obstacle = None if warm is None else template.find_obstacle(warm, self._cwd)
        if warm is not None and obstacle is None:
            try:
                template.send_program(warm, self._settings)
            except SpawnError as error:
                obstacle = str(error)
            else:
                return template
        self.refused = obstacle or ""
        template.close()
        return None


def become_original(control_fd: int, flags: Sequence[str], environ: Mapping[str, str]) -> NoReturn:
    """Become the process that imports, and is forked: see `original`.

    Args:
        control_fd: to this process's parent.
        flags: the hold's, without a program.
        environ: the hold's.
    """
    config = parse_args([*flags, *_PROGRAM], environ)
    options = TemplateOptions(
        program=config.program, nproc=config.nproc, env=build_common_env(config), preload=config.preload
    )
    argv = (program.TEMPLATE, str(control_fd), str(os.getppid()), config.preload, HELD, "muster.agent.hold.original")
    # What the imports print belongs to each worker, see `TemplateHandle`.
    printed = [os.memfd_create(name) for name in ("stdout", "stderr")]
    spec = options.build_spec(*argv, stdout_fd=printed[0], stderr_fd=printed[1])
    processes.set_death_signal(signal.SIGKILL)
    processes.strip_process((0, *printed), [control_fd], keeps_ignored=True)
    exec_worker(spec)
