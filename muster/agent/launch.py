"""From a command line to a running agent: parse, start the template, put the parts together, map errors to exit codes.

The template's imports take ten times as long as the agent's, so the template starts first: this module imports only
what parsing and starting it need. The rest of the agent is imported while the template imports.

What happens at a start, in this order:

1. `entry` or `__main__` starts the guard (`_shared.guard`), and below it this module: `_run` unpacks the workspace,
   reads the flags, has features add variables, starts the template, and calls those whose rows say `begins_early`.
2. `_run_supervisor` opens logs and the event log, and connects the sinks of features. From here on `node.supervisor`
   passes events to `node.decisions`. The supervisor makes the rendezvous, which `rendezvous.selection` chooses.
3. `AgentStarted` lets the node join, and in the end a round forms (`RoundFormed`). `node.round_workers` opens the
   round's store, if this node hosts it. Log files begin to open.
4. With `StartWorkers`, which waits for the back-off after a failure, a page is made, and those parts of features that
   are wanted begin the round at once, in the order of their table (`node.round_parts`). When none holds the workers
   back and the log files are open, each worker's variables are built, and `workers.pool` starts them: the template
   forks them, or they start cold. In a worker, `workers.program` runs what a feature wants run first, and then the
   user's script.
"""

import errno
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from muster._shared.contract import DEFAULT_RUN_ID, Env, ExitCode, LogNames
from muster._shared.guard import GuardLease
from muster._shared.processes import write_stderr
from muster._shared.records import replace
from muster.agent.cli.arguments import parse_args
from muster.agent.config import AgentConfig
from muster.agent.errors import InternalError, MusterError, SpawnError, UsageError
from muster.agent.features import PARTS, SINKS, load_module
from muster.agent.runtime.loop import JobClock, Loop
from muster.agent.workers.environment import build_common_env
from muster.agent.workers.spec import ProgramKind, WorkerStarter
from muster.agent.workers.warm.template_handle import TemplateHandle, TemplateOptions

if TYPE_CHECKING:
    from muster.agent.features.sink import Witness
    from muster.agent.hold.start import HeldStart
    from muster.agent.logs import LogRouter
    from muster.agent.placement.affinity import WorkerPlacement
    from muster.agent.runtime.event_log import EventLog
    from muster.agent.runtime.signals import ChildWatch

_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN)
"""Errors if the machine has run out of descriptors, memory or processes, which is no bug in muster."""


def run_agent(
    args: Sequence[str], environ: Mapping[str, str], lease: GuardLease, held: "HeldStart | None" = None
) -> int:
    """Run one agent to its end, and return its exit code. Only this function turns errors into lines and codes.

    Args:
        args: the command line without the program's name.
        environ: the agent's environment.
        lease: the guard's.
        held: what a hold has prepared for this run.
    """
    control_fd = environ.get(Env.CONTROL_FD)
    try:
        return _run(args, environ, lease, held)
    except InternalError as error:
        return _report_error(f"{error}: this is a bug in muster; please report it", ExitCode.WORKERS_FAILED)
    except MusterError as error:
        if control_fd is not None:
            from muster.agent.control_socket import send_error

            return send_error(int(control_fd), str(error), error.exit_code)
        return _report_error(str(error), error.exit_code)
    except SystemExit as stop:  # --help
        return int(stop.code or 0)
    except (OSError, ImportError) as error:
        reason = _name_exhausted(error)
        if reason is None:
            raise
        return _report_error(f"the agent cannot continue: {reason}", ExitCode.WORKERS_FAILED)


def _name_exhausted(error: OSError | ImportError) -> str | None:
    """Return what the machine has run out of, in the system's words; None for another error.

    The dynamic linker gives its reason only as text, so the ImportError of an extension module has no errno.
    """
    if isinstance(error, OSError):
        return error.strerror if error.errno in _EXHAUSTED else None
    return next((os.strerror(code) for code in _EXHAUSTED if os.strerror(code) in str(error)), None)


def _report_error(line: str, code: int) -> int:
    """Print one line to stderr, and return the exit code."""
    write_stderr(f"muster: {line}\n")
    return int(code)


def _run(args: Sequence[str], environ: Mapping[str, str], lease: GuardLease, held: "HeldStart | None") -> int:
    if Env.AFTER in environ:
        from muster._shared.role_start import wait_for_role

        wait_for_role(environ, lambda line: write_stderr(f"muster: {line}\n"))
    _unpack_workspace(environ)
    config = parse_args(args, environ)
    _check_program(config)
    placements = _plan_placements(config)
    with ExitStack() as stack:
        names = ",".join(row.name for row in PARTS)
        config = replace(config, base_env={**config.base_env, Env.FEATURES: names})
        for row in PARTS:
            if row.adds_variables(config):
                config = load_module(row.name, "variables").add_variables(config, stack)
        loop = Loop(JobClock(lease.suspended)) if held is None else held.loop
        stack.callback(loop.close)
        image = environ.get(Env.IMAGE)
        warm = None if _starts_cold(config) and not image else _build_template_options(config, placements)
        template = _adopt_template(loop, image) if image else None if held is None else held.take(warm)
        template = template or _start_template(loop, warm)
        if template is not None:
            stack.callback(template.close)
        rows = (row for row in PARTS if row.begins_early(config))
        early = {row.name: load_module(row.name, "node").begin_early(loop, config, environ) for row in rows}
        return _run_supervisor(
            config,
            environ,
            loop=loop,
            lease=lease,
            placements=placements,
            warm=warm,
            template=template,
            refused="" if held is None else held.refused,
            early=early,
        )


def _run_supervisor(
    config: AgentConfig,
    environ: Mapping[str, str],
    *,
    loop: Loop,
    lease: GuardLease,
    placements: "tuple[WorkerPlacement, ...]",
    warm: TemplateOptions | None,
    template: TemplateHandle | None,
    refused: str,
    early: Mapping[str, object],
) -> int:
    """Put the parts of the agent together and run it; return its exit code.

    Args:
        config: the agent's.
        environ: this process's.
        loop: the agent's only loop.
        lease: the guard's fencing lease.
        placements: length nproc, indexed by local rank. If empty, workers run where the agent may run.
        warm: how templates are started; None if workers start cold.
        template: the first template, if it was started already.
        refused: see `TemplateStarter`.
        early: what features have begun, by their names.

    Raises:
        MusterError: the log folder, the event sink or the rendezvous is not available.
    """
    # Imported while the template imports torch.
    from muster.agent.logs import LogRouter
    from muster.agent.node.round_workers import AgentParts
    from muster.agent.node.supervisor import Supervisor
    from muster.agent.rendezvous.selection import create_rendezvous
    from muster.agent.runtime.signals import ChildWatch

    logs = LogRouter(
        config=config.logs, loop=loop, run_id=config.rendezvous.run_id, role=config.role, nproc=config.nproc
    )
    if config.rendezvous.segment == "":
        logs.print_line(
            "--rank-order segment: nothing names this node's NVLink domain (ClusterUUID, the node label "
            "nvidia.com/gpu.clique, SLURM_JOB_SEGMENT_SIZE, MUSTER_SEGMENT), so it keeps its place by node index"
        )
    if environ.get("LOGLEVEL") == "DEBUG":
        print_debug_records(logs)
    ranks = config.logs.local_ranks_filter
    if ranks is not None and ranks.isdisjoint(range(config.nproc)):
        logs.print_line("--local-ranks-filter: no worker of this node is shown")
    config = _add_checkpoint(config, logs.run_dir, environ)
    config = replace(config, loss=describe_loss(logs.run_dir, environ))
    if incarnation := find_incarnation(config, environ, time.time()):
        logs.print_line(" starts, ".join(incarnation))
        config = replace(config, counts_since=incarnation[0])
    event_log, children = _open_event_log(config, loop, logs), ChildWatch(loop)
    config, witnesses = _connect_sinks(config, environ, loop=loop, logs=logs, children=children, event_log=event_log)
    parts = AgentParts(
        loop=loop,
        lease=lease,
        logs=logs,
        event_log=event_log,
        children=children,
        starter=_build_starter(loop, children, logs, event_log, warm, template, refused),
        placements=placements,
        early=early,
        witnesses=witnesses,
        connect=lambda post: create_rendezvous(
            config.rendezvous, config.nproc, config.role, loop, lease, config.node_name, post
        ),
    )
    return Supervisor(config, parts).run()


def print_debug_records(logs: "LogRouter") -> None:
    """Print what muster records at debug level, such as events that the phase of a state machine does not accept.

    The variable LOGLEVEL is torchrun's, and TorchX passes it on. The agent has no records of other levels.
    """
    import logging

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            logs.print_line(self.format(record))

    logger = logging.getLogger("muster")
    logger.addHandler(Lines())
    logger.setLevel(logging.DEBUG)


def _add_checkpoint(config: AgentConfig, run_dir: str | None, environ: Mapping[str, str]) -> AgentConfig:
    """Add the last checkpoint of the job's earlier incarnations, unless every job has the same run id."""
    is_kept = run_dir is not None and os.path.exists(os.path.join(run_dir, LogNames.CHECKPOINT))
    if config.rendezvous.run_id == DEFAULT_RUN_ID or not (is_kept or environ.get(Env.CHECKPOINT)):
        return config
    from muster.agent import checkpoint_file

    checkpoint = checkpoint_file.find(run_dir, environ.get(Env.CHECKPOINT, ""))
    return replace(config, rendezvous=replace(config.rendezvous, checkpoint=checkpoint))


def describe_loss(run_dir: str | None, environ: Mapping[str, str]) -> str:
    """Return the line about what was lost with the earlier pods of this node. "": there were none, or it is here.

    Args:
        run_dir: this agent's, before it has written a record; None if it has none.
        environ: this process's.
    """
    if environ.get(Env.DRAINED_PODS, "") in ("", "0"):
        return ""
    if run_dir is not None and os.path.exists(os.path.join(run_dir, LogNames.EVENTS)):
        return ""
    return (
        "the job begins anew: its pods were drained, and its log folder with the path of the last checkpoint was lost "
        f"with them; --env {Env.LOG_DIR}=FOLDER keeps it, if the folder is on a volume"
    )


def find_incarnation(config: AgentConfig, environ: Mapping[str, str], now_s: float) -> tuple[str, str] | None:
    """Name an incarnation after the first, for a log that has those before it, too, and say when and why it starts.

    Args:
        config: this agent's.
        environ: this process's.
        now_s: the wall clock.

    Returns:
        None for the first one, as far as this agent knows, or if another node says it.
    """
    rendezvous = config.rendezvous
    began = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now_s))
    if rendezvous.incarnation:
        return f"incarnation {rendezvous.incarnation + 1} of this node", began
    text, _, reason = environ.get(Env.JOB_INCARNATION, "").partition(" ")
    restarts = environ.get("SLURM_RESTART_COUNT", "0")
    if rendezvous.is_by_hand and config.control_fd is None and restarts.isdecimal() and int(restarts):
        text, reason = str(int(restarts) + 1), ""
    if not text or rendezvous.node_index not in (None, 0):
        return None
    slurm_id = environ.get("SLURM_JOB_ID")
    where = f" (Slurm job {slurm_id})" if slurm_id else ""
    before = f"; the previous incarnation ended: {reason}" if reason else ""
    return f"incarnation {text} of this job", f"{began}{where}{before}"


def _open_event_log(config: AgentConfig, loop: Loop, logs: "LogRouter") -> "EventLog":
    from muster.agent.runtime.event_log import ConsoleSink, EventLog

    event_log = EventLog(loop.clock)
    if config.event_log_handler == "console":
        event_log.add_sink(ConsoleSink(logs.print_text))
    event_log.status_readers.append(logs.show_status)
    if config.control_fd is not None:
        from muster.agent.control_socket import ControlSink

        event_log.add_sink(ControlSink(config.control_fd))
    return event_log


def _connect_sinks(
    config: AgentConfig,
    environ: Mapping[str, str],
    *,
    loop: Loop,
    logs: "LogRouter",
    children: "ChildWatch",
    event_log: "EventLog",
) -> "tuple[AgentConfig, tuple[Witness, ...]]":
    """Connect the sinks that are wanted; return the configuration with what they add, and the witnesses among them."""
    witnesses: list[Witness] = []
    for row in SINKS:
        if row.is_wanted(environ, config):
            from muster.agent.features.sink import SinkContext

            context = SinkContext(
                config=config,
                environ=environ,
                loop=loop,
                logs=logs,
                children=children,
                event_log=event_log,
                add_witness=witnesses.append,
            )
            config = load_module(row.name, "sink").connect(context)
    return config, tuple(witnesses)


def _build_starter(
    loop: Loop,
    children: "ChildWatch",
    logs: "LogRouter",
    event_log: "EventLog",
    warm: TemplateOptions | None,
    template: TemplateHandle | None,
    refused: str,
) -> WorkerStarter:
    from muster.agent.workers.cold import CommandStarter
    from muster.agent.workers.warm.starter import TemplateStarter

    if warm is None:
        return CommandStarter(on_record=event_log.write)
    starter_class = TemplateStarter
    if template is not None and template.is_image:
        from muster.agent.workers.image import ImageStarter

        starter_class = ImageStarter
    return starter_class(
        loop,
        children,
        CommandStarter(),
        warm,
        on_notice=logs.print_notice,
        on_record=event_log.write,
        early=template,
        refused=refused,
    )


def _check_program(config: AgentConfig) -> None:
    """Refuse a program that does not exist, in one line.

    A job of several nodes is not checked, because only one may lack the program, and the others would wait for that
    node. There its workers fail, and the job ends with a report.
    """
    program = config.program
    is_file = program.kind in (ProgramKind.SCRIPT, ProgramKind.RUN_PATH)
    if config.rendezvous.max_nodes > 1 or not (is_file or program.kind is ProgramKind.MODULE):
        return
    if is_file and os.path.exists(program.target):
        return
    from muster._shared.programs import explain_missing

    problem = explain_missing("script" if is_file else "module", program.target, os.getcwd())
    if problem is not None:
        raise UsageError(problem)


def _unpack_workspace(environ: Mapping[str, str]) -> None:
    """Unpack the workspace before flags are read, because they may name files of it."""
    bundle = environ.get(Env.WORKSPACE)
    if not bundle:
        return
    from muster.agent.workspace_unpacking import unpack_workspace

    into_dir = environ.get(Env.WORKSPACE_DIR) or os.getcwd()
    unpack_workspace(bundle, into_dir)
    os.chdir(into_dir)


def _starts_cold(config: AgentConfig) -> bool:
    """Return True unless workers are warm. Python programs are by default; with --run-path, --start-method decides."""
    if config.start == "auto" and config.program.kind is ProgramKind.RUN_PATH and config.start_method == "spawn":
        return True
    return config.start == "cold" or config.program.kind is ProgramKind.COMMAND


def _build_template_options(config: AgentConfig, placements: "tuple[WorkerPlacement, ...]") -> TemplateOptions:
    return TemplateOptions(
        program=config.program,
        nproc=config.nproc,
        env=build_common_env(config),
        preload=config.preload,
        cpus=min((placement.cpus for placement in placements), key=len, default=None),
    )


def _adopt_template(loop: Loop, image: str) -> TemplateHandle:
    from muster.agent.workers.image import ImageHandle

    return ImageHandle(loop, *map(int, image.split(":")))


def _start_template(loop: Loop, warm: TemplateOptions | None) -> TemplateHandle | None:
    """Start the template. Return None if it cannot be started: the starter tries again and reports the result."""
    if warm is None:
        return None
    try:
        return TemplateHandle(loop, warm)
    except SpawnError:
        return None


def _plan_placements(config: AgentConfig) -> "tuple[WorkerPlacement, ...]":
    """Return placements (length nproc), or none without --numa-binding. A warm worker has no command for numactl."""
    if config.numa_binding is None:
        return ()
    from muster.agent.placement.affinity import plan_affinity

    placements = plan_affinity(config.numa_binding, config.nproc, env=config.base_env)
    if _starts_cold(config):
        return placements
    return tuple(replace(placement, command_prefix=()) for placement in placements)
