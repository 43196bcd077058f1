"""Builds the spec of an app and the script of its job from an AppDef: pure, the dry run."""

import io
import json
import posixpath
import shlex
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import mul
from pathlib import Path
from typing import Final

from torchx.specs import AppDef, Role

from muster._shared.contract import AGENT_BUNDLE_NAME, SIZE_LIMIT, WORKSPACE_BUNDLE_NAME, Env, RoleKey
from muster.schedulers import adapter
from muster.schedulers.bundle import strip_source
from muster.schedulers.slurm.node import FILES_DIR, GO_ON, JOBS_NAME, LOG_NAME, SCRIPT_NAME
from muster.schedulers.slurm.options import SlurmOptions

PAYLOAD_NAME: Final = "node.zip"
NOT_SENT: Final = 97
"""Exit code of the job's script if it cannot write the zip to the nodes. Programs rarely use it."""
SCRIPT_LIMIT_BYTES: Final = 4_000_000
"""Slurm's default limit of a script (`max_script_size`) is 4 MiB."""

_PACKAGE: Final = Path(__file__).resolve().parents[2]
_MODULES: Final = (
    *(
        "__init__",
        "_shared/**/*",
        "schedulers/__init__",
        "schedulers/failure_report",
        "schedulers/naming",
        "schedulers/role_variables",
    ),
    *("schedulers/node_program/__init__", "schedulers/node_program/output_pipes", "schedulers/processes/*"),
    *("schedulers/slurm/hosts", "schedulers/slurm/node", "schedulers/supervision/*", "schedulers/wording/*"),
)
_MAIN: Final = """\
import signal, sys

# Kept until `watch_signals`: Slurm may send them in a job's first second.
signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP))
if sys.version_info < (3, 10):
    sys.exit("muster: needs Python 3.10 or newer, but %s is Python %d.%d" % ((sys.executable,) + sys.version_info[:2]))
from muster.schedulers.slurm.node import main

sys.exit(main(sys.argv))
"""


def build_payload(files: Mapping[str, bytes]) -> bytes:
    """Pack what a node runs.

    Args:
        files: of the app's state folder, by name: for nodes without the shared folder.
    """
    paths = [path for name in _MODULES for path in sorted(_PACKAGE.glob(f"{name}.py"))]
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("__main__.py", _MAIN)
        archive.writestr("muster/schedulers/slurm/__init__.py", "")  # nodes need no entry point
        for path in paths:
            archive.writestr(f"muster/{path.relative_to(_PACKAGE).as_posix()}", strip_source(path.read_text()))
        for name, content in files.items():
            archive.writestr(f"{FILES_DIR}{name}", content)
    return packed.getvalue()


WORKSPACE_KEY: Final = "muster.slurm_workspace"
"""In `Role.metadata`: absolute path of the folder that travels with the app."""
WORK_DIR: Final = "workspace"
PAYLOAD_MARK: Final = "@PAYLOAD@"
"""In a script without a shared folder: where the zip comes."""
SRUN: Final = 'srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES"'
"""Begins the command that starts the tasks."""
DRIVER: Final = "muster.schedulers.slurm.node:SlurmDriver"
_PASSED_ON: Final = (
    *("partition", "time", "account", "qos", "comment", "constraint", "reservation", "mail_user", "mail_type"),
    *("segment", "signal"),
)
"""Options that sbatch has, too."""
_END: Final = "MUSTER_END_OF_PAYLOAD"
_IMAGE_PYTHON: Final = "python3"
"""Interpreter of an image, which need not have the environment of the caller."""
_IMAGE_PROGRAMS: Final = (
    *("apptainer", "singularity", "podman", "podman-hpc", "docker", "udocker", "enroot", "shifter", "ch-run"),
)
"""Programs of a `prefix` that run what follows in an image."""


@dataclass(frozen=True, kw_only=True)
class SubmissionSite:
    """Facts about this machine and the caller on which a request depends."""

    folder: str
    """Absolute path of the app's future folder here."""
    cwd: str
    python: str
    """Interpreter of the nodes. That of an image is another one, see `_IMAGE_PYTHON`."""


@dataclass(frozen=True, kw_only=True)
class SlurmRequest:
    """A whole app. `schedule` carries it out."""

    spec: adapter.AppSpec
    script: str
    folder: str
    """The app's folder on this machine. On the nodes it is `spec.folder`."""
    runs_in_place: bool = False
    """Its programs are started in the caller's folder, and see this machine's files."""

    def __str__(self) -> str:
        """Return the text of the dry run, without secrets."""
        plans = json.dumps(adapter.mask_plans(self.spec.details["replicas"]), indent=2)
        return f"{self.script}\n# the replicas, in the order of the job's tasks:\n{plans}"


def build_request(app: AppDef, options: SlurmOptions, *, name: str, token: str, site: SubmissionSite) -> SlurmRequest:
    """Build the request for an app. The AppDef is not changed.

    Args:
        app: what to run. Images are ignored, see `container_image` and `prefix`.
        options: of `-cfg`.
        name: the app's id, and the name of its jobs.
        token: the app's secret.
        site: see `SubmissionSite`.

    Raises:
        SchedulerError: a part of the app cannot be run. It is one line.
    """
    _check(options)
    if options.container_image:
        site = replace(site, python=options.python or _IMAGE_PYTHON)
    roles = adapter.assign_arguments(app, adapter.build_role_labels([role.name for role in app.roles]), name)
    spare_role = _choose_spare_role(roles, options)
    has_workspace = any(WORKSPACE_KEY in role.metadata for role in app.roles)
    folder = site.folder if options.shared else posixpath.join(options.node_dir, f"muster-{name}")
    replicas = {
        role.name: [
            _build_plan(role, index, options, name, folder, site, has_workspace=has_workspace)
            for index in range(role.num_replicas + (options.spares if role.name == spare_role else 0))
        ]
        for role in roles
    }
    nodes = sum(map(len, replicas.values()))
    plans = [adapter.build_role_plan(role) for role in app.roles]
    may_lose = options.spares > 0 or any(plan.is_elastic or not plan.policy.critical for plan in plans)
    needs_records = [plan.name for plan in plans if plan.policy.ends_with]
    if needs_records and not options.shared:
        raise adapter.OptionError(
            f"shared=False: role {needs_records[0]!r} ends with another one, which its nodes see in the shared folder",
            "shared",
        )
    spec = adapter.build_process_spec(
        app,
        replicas,
        _build_place(name, folder, app.roles[0].name, options),
        folder=folder,
        driver=DRIVER,
        token=token,
        workspace_key=WORKSPACE_KEY,
        details={
            "prefix": list(options.prefix),
            "continues": options.continues,
            "may_lose": may_lose,
            "shared": options.shared,
            "in_image": bool(options.container_image),
            "signal_s": int(options.signal.rpartition("@")[2]) if options.signal else 0,
        },
        python=site.python,
    )
    _check_time(options, spec.grace_s)
    flags = (*_list_flags(name, app.roles, options, nodes, site, may_lose=may_lose), *options.sbatch)
    _check_lines(flags)
    mounts = [folder if options.shared else options.node_dir]
    if options.shared and not has_workspace and site.cwd != "/":  # where the job runs
        mounts.append(site.cwd)
    srun_flags = (*_list_srun_flags(app.roles, options, mounts, may_lose=may_lose), *options.srun)
    return SlurmRequest(
        spec=spec,
        script=_build_script(flags, srun_flags, options, folder, site.python),
        folder=site.folder,
        runs_in_place=options.shared and not (has_workspace or options.container_image or options.prefix),
    )


def _check(options: SlurmOptions) -> None:
    if not options.shared and options.continues == "follow-up":
        raise adapter.OptionError("continues=follow-up needs a folder that the nodes share: shared=true", "continues")
    if options.container_mounts and not options.container_image:
        raise adapter.OptionError("container_mounts needs container_image=IMAGE", "container_mounts")
    if options.gpu_type and options.gpus == "none":
        raise adapter.OptionError("gpu_type needs gpus=gres or gpus=tres: gpus=none asks for no GPU", "gpu_type")
    if options.workspace_type != "dir" or options.image_repo is not None:
        name = "workspace_type" if options.workspace_type != "dir" else "image_repo"
        text = "no image is built here: name one with container_image, or use TorchX's own adapter, -s slurm_torchx"
        raise adapter.OptionError(f"{name}={getattr(options, name)}: {text}", name)


def _check_lines(flags: Sequence[str]) -> None:
    """Check that a value is one line: what follows a line break in a comment of the script would be a command."""
    for flag in flags:
        if any(each in flag for each in "\n\r\0"):
            name, _, value = flag.removeprefix("--").partition("=")
            raise adapter.OptionError(f"{name}={value!r} must be one line", name)


def _choose_spare_role(roles: Sequence[Role], options: SlurmOptions) -> str:
    if options.spares == 0:
        return ""
    if options.spares > SIZE_LIMIT:
        raise adapter.OptionError(f"spares={options.spares} is more than {SIZE_LIMIT}", "spares")
    agents = [str(role.name) for role in roles if adapter.is_agent_role(role)]
    if len(agents) != 1:
        raise adapter.OptionError(
            f"spares={options.spares}: the app must have exactly one role of agents, and has {len(agents)}", "spares"
        )
    return agents[0]


def _build_plan(
    role: Role, index: int, options: SlurmOptions, name: str, folder: str, site: SubmissionSite, *, has_workspace: bool
) -> adapter.ReplicaPlan:
    files = adapter.AppFolder(folder)
    cwd = site.cwd if options.shared else folder
    plan = adapter.plan_replica(
        role,
        index,
        _build_place(name, folder, role.name, options),
        cwd=posixpath.join(folder, WORK_DIR) if has_workspace else cwd,
        bundle_dir=str(files.state_dir),
        error_file=str(files.replica_dir(adapter.ReplicaId(role.name, index)) / adapter.ERROR_FILE),
        python=_choose_python(options, site),
    )
    if has_workspace and not options.shared and plan.runs_agent:
        return replace(plan, env={**plan.env, Env.WORKSPACE: str(files.state_dir / WORKSPACE_BUNDLE_NAME)})
    return plan


def _choose_python(options: SlurmOptions, site: SubmissionSite) -> str:
    enters_image = any(posixpath.basename(word) in _IMAGE_PROGRAMS for word in options.prefix)
    return _IMAGE_PYTHON if enters_image and options.python is None else site.python


def _build_place(name: str, folder: str, role: str, options: SlurmOptions) -> adapter.AgentPlace:
    log_dir = str(adapter.AppFolder(folder).role_dir(role))
    return adapter.AgentPlace(  # `node` prints who has sent SIGTERM
        adapter="slurm", app_id=name, log_dir=log_dir, grace_s=options.grace_s, env=options.env, sigterm_senders=""
    )


def _list_flags(
    name: str, roles: Sequence[Role], options: SlurmOptions, nodes: int, site: SubmissionSite, *, may_lose: bool
) -> list[str]:
    """Return the flags of sbatch. All nodes of a job are alike: each has what the largest role asks for."""
    log = str(adapter.AppFolder(site.folder).state_dir / LOG_NAME) if options.shared else "/dev/null"
    flags = [f"--job-name={name}", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1"]
    flags += [f"--output={log}", "--open-mode=append", f"--chdir={site.cwd if options.shared else '/'}"]
    flags += ["--no-requeue"] if options.continues == "no" else ["--requeue"]
    flags += ["--no-kill"] if may_lose else []
    cpus, gpus = _count_cpus(roles), max(int(role.resource.gpu) for role in roles)
    memory = max(0 if RoleKey.MEMORY_REQUEST_MB in role.metadata else int(role.resource.memMB) for role in roles)
    if options.exclusive:  # the workers get all of a node that has at least so many CPUs
        flags += ["--exclusive", "--mem=0", *([f"--mincpus={cpus}"] if cpus > 0 else [])]
    else:
        flags += [f"--cpus-per-task={cpus}"] if cpus > 0 else []
        flags += [f"--mem={memory}M"] if memory > 0 else []
    flags += _list_gpu_flags(options, gpus)
    given = {name.replace("_", "-"): getattr(options, name) for name in _PASSED_ON}
    return flags + [f"--{flag}={value}" for flag, value in given.items() if value is not None]


def _check_time(options: SlurmOptions, grace_s: float) -> None:
    """Refuse a time limit in which no step could be done."""
    limit_s = None if options.time is None else _count_seconds(options.time)
    if limit_s is not None and limit_s <= grace_s:
        why = "so long before the limit all ranks stop; give more time, or a smaller grace_s"
        raise adapter.OptionError(f"time={options.time} must be more than {grace_s:g} s: {why}", "time")


def _count_seconds(time: str) -> float | None:
    """Return the seconds of one of Slurm's times: M, M:S, H:M:S, D-H, D-H:M or D-H:M:S. None: there is no limit."""
    days, dash, rest = time.rpartition("-")
    parts = rest.split(":")
    if not parts[0].isdecimal():
        return None
    numbers = list(map(int, parts))
    units = (3600, 60, 1) if dash or len(numbers) == 3 else (60, 1)
    seconds: int = sum(map(mul, numbers, units))
    return seconds + (int(days) * 86400 if dash else 0)


def _count_cpus(roles: Sequence[Role]) -> int:
    """Count the CPUs of a node. Slurm binds the workers to them, so each has one where the user gave no number."""
    return max(int(adapter.count_cpus(role)) for role in roles)


def _list_gpu_flags(options: SlurmOptions, gpus: int) -> list[str]:
    if gpus <= 0 or options.gpus == "none":
        return []
    kind = f"{options.gpu_type}:" if options.gpu_type else ""
    return [f"--gres=gpu:{kind}{gpus}" if options.gpus == "gres" else f"--gpus-per-node={kind}{gpus}"]


def _list_srun_flags(
    roles: Sequence[Role], options: SlurmOptions, mounts: Sequence[str], *, may_lose: bool
) -> list[str]:
    cpus = _count_cpus(roles)
    flags = ["--ntasks-per-node=1", "--kill-on-bad-exit=0", "--wait=0"]
    flags += [f"--cpus-per-task={cpus}"] if cpus > 0 and not options.exclusive else []
    flags += ["--no-kill"] if may_lose else []
    if options.container_image:
        given = ",".join(filter(None, (*(f"{each}:{each}" for each in mounts), options.container_mounts)))
        flags += [f"--container-image={options.container_image}", f"--container-mounts={given}"]
    return flags


def _build_script(
    flags: Sequence[str], srun_flags: Sequence[str], options: SlurmOptions, folder: str, python: str
) -> str:
    lines = ["#!/bin/sh", *(f"#SBATCH {shlex.quote(flag)}" for flag in flags)]
    lines += [f"module load {shlex.quote(module)}" for module in options.modules]
    lines += [options.prolog] if options.prolog else []
    bundle = shlex.quote(posixpath.join(str(adapter.AppFolder(folder).state_dir), PAYLOAD_NAME))
    if not options.shared:
        # A name per run: existing files, perhaps another user's, are refused.
        lines += [f'bundle={shlex.quote(folder)}".$SLURM_JOB_ID.${{SLURM_RESTART_COUNT:-0}}.zip"']
        lines += ["umask 077", 'rm -f "$bundle.sent"', "set -C"]
        lines += [f"base64 -d >\"$bundle.sent\" <<'{_END}' || exit {NOT_SENT}", f"{PAYLOAD_MARK}{_END}"]
        lines += [f'sbcast --preserve "$bundle.sent" "$bundle" || exit {NOT_SENT}', 'rm -f "$bundle.sent"']
        bundle = '"$bundle"'
    # It may run again with fewer nodes.
    command = f"{SRUN} {shlex.join([*srun_flags, python])} {bundle} {shlex.quote(folder)}"
    if options.container_image:
        return "\n".join([*lines, *_list_image_lines(command, options.continues, adapter.AppFolder(folder)), ""])
    return "\n".join([*lines, f"exec {command}", ""])


def _list_image_lines(command: str, how: str, folder: adapter.AppFolder) -> list[str]:
    """Return lines that do outside of the image what its nodes cannot do if it lacks Slurm's commands.

    The time limit's end is known to the tasks, and the job goes on if one of them asks for it by its exit code.
    """
    expedite = "expedite " if how == "expedite" else ""
    again = f'scontrol requeue {expedite}"$SLURM_JOB_ID"'
    if how == "follow-up":
        script, jobs = (shlex.quote(str(folder.state_dir / name)) for name in (SCRIPT_NAME, JOBS_NAME))
        again = f'sbatch --parsable --dependency=afterany:"$SLURM_JOB_ID" {script} | cut -d ";" -f 1 >>{jobs}'
    end = '$(date +%s -d "$(squeue -h -j "$SLURM_JOB_ID" -o %e)" 2>/dev/null)'
    return [
        "trap : TERM USR1 HUP",
        f'SLURM_JOB_END_TIME="${{SLURM_JOB_END_TIME:-{end}}}" {command}',  # Slurm sets it since 23.02
        "code=$?",
        f'[ "$code" -ne {GO_ON} ] || {again}',
        'exit "$code"',
    ]


def list_files(spec: adapter.AppSpec, agent: bytes | None, workspace: bytes | None) -> dict[str, bytes]:
    """Return the files of the app's state folder that a node without it needs, by name.

    Args:
        spec: of the app.
        agent: the bundle. None: no role runs agents.
        workspace: packed. None: there is none.
    """
    content, details = spec.encode()
    files = {"spec.json": json.dumps(content).encode(), "private.json": json.dumps(details).encode()}
    if agent is not None:
        files[AGENT_BUNDLE_NAME] = agent
    if workspace is not None:
        files[WORKSPACE_BUNDLE_NAME] = workspace
    return files
