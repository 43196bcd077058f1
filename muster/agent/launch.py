"""From a command line to a running agent: parse, put the parts together, map errors to exit codes."""

import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from muster._contract import Env
from muster._guard import GuardLease
from muster.agent.cli import parse_args
from muster.agent.config import AgentConfig
from muster.agent.errors import MusterError
from muster.agent.journal import Journal
from muster.agent.logs import LogRouter
from muster.agent.loop import Loop
from muster.agent.sinks import open_sink
from muster.agent.supervisor import Supervisor
from muster.agent.worker_env import build_common_env
from muster.agent.workers.base import ProgramKind, WorkerStarter
from muster.agent.workers.command import CommandStarter

if TYPE_CHECKING:
    from muster.agent.affinity import WorkerPlacement


def run_agent(args: Sequence[str], environ: Mapping[str, str], lease: GuardLease) -> int:
    """Run one agent to its end; its exit code. The one place that turns errors into lines and codes.

    Args:
        args: the command line without the program's name.
        environ: the agent's environment.
        lease: the guard's.
    """
    try:
        _unpack_workspace(environ)
        config = parse_args(args, environ)
        loop = Loop()
        try:
            return _build_supervisor(config, loop, lease).run()
        finally:
            loop.close()
    except MusterError as error:
        # A console that is full or gone must not change the exit code: schedulers act on it.
        with contextlib.suppress(OSError):
            print(f"muster: {error}", file=sys.stderr, flush=True)
        return int(error.exit_code)
    except SystemExit as stop:  # --help
        return int(stop.code or 0)


def _unpack_workspace(environ: Mapping[str, str]) -> None:
    """Before flags are read: they may name files of the workspace."""
    bundle = environ.get(Env.WORKSPACE)
    if not bundle:
        return
    from muster.agent.workspace import unpack_workspace

    into_dir = environ.get(Env.WORKSPACE_DIR) or os.getcwd()
    unpack_workspace(bundle, into_dir)
    os.chdir(into_dir)


def _build_supervisor(config: AgentConfig, loop: Loop, lease: GuardLease) -> Supervisor:
    logs = LogRouter(
        config=config.logs, loop=loop, run_id=config.rendezvous.run_id, role=config.role, nproc=config.nproc
    )
    journal = Journal(loop.clock, [open_sink(config.event_log_handler)])
    placements = _plan_placements(config)
    return Supervisor(
        config,
        loop=loop,
        lease=lease,
        logs=logs,
        journal=journal,
        starter=_choose_starter(config, loop, logs, journal, placements),
        placements=placements,
    )


def _starts_cold(config: AgentConfig) -> bool:
    """Warm for Python programs on Linux, unless told otherwise; with --run-path, --start-method tells."""
    if config.start == "auto" and config.program.kind is ProgramKind.RUN_PATH and config.start_method == "spawn":
        return True
    return config.start == "cold" or config.program.kind is ProgramKind.COMMAND or sys.platform != "linux"


def _choose_starter(
    config: AgentConfig, loop: Loop, logs: LogRouter, journal: Journal, placements: "tuple[WorkerPlacement, ...]"
) -> WorkerStarter:
    if _starts_cold(config):
        return CommandStarter(on_record=journal.write)
    from muster.agent.workers.template import TemplateStarter
    from muster.agent.workers.template_link import TemplateOptions

    options = TemplateOptions(
        program=config.program,
        nproc=config.nproc,
        env=build_common_env(config),
        preload=config.preload,
        cpus=min((placement.cpus for placement in placements), key=len, default=None),
    )
    return TemplateStarter(loop, CommandStarter(), options, on_notice=logs.say, on_record=journal.write)


def _plan_placements(config: AgentConfig) -> "tuple[WorkerPlacement, ...]":
    """Length nproc, or empty without --numa-binding. A warm worker has no command to put numactl before."""
    if config.numa_binding is None:
        return ()
    from muster.agent.affinity import plan_affinity

    placements = plan_affinity(config.numa_binding, config.nproc, env=config.base_env)
    if _starts_cold(config):
        return placements
    return tuple(replace(placement, command_prefix=()) for placement in placements)
