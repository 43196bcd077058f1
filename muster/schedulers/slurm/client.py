"""Calls Slurm's commands, and reads only their fixed formats, because what `--json` prints differs between versions."""

import contextlib
import re
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from muster.schedulers.errors import EngineError, NotConfiguredError, SchedulerError
from muster.schedulers.slurm.hosts import expand_hosts, parse_fields, parse_time

LIMIT_S: Final = 60.0
WAIT_FOR_CHILDREN: Final = "--wait-for-children"
TIMED_OUT: Final = 124
"""As of `timeout`."""
_RETRY_S: Final = 1.0
_DOWN: Final = ("Unable to contact slurm controller", "Connection refused", "Socket timed out", "Zero Bytes were")
_NO_CONFIG: Final = "configuration source"
"""In what a command says that finds no slurm.conf, and no controller that has one."""
_NO_CLUSTER: Final = (
    "no cluster is configured: Slurm's commands are here, but no slurm.conf; set SLURM_CONF to its path"
)
_UNKNOWN: Final = "Invalid job id"
_NO_GRES: Final = "invalid generic resource"
_ENDED: Final = "State,End,NodeList,ExitCode"
_FORMAT: Final = "%i|%T|%r|%N|%V|%e|%S"


class SlurmDownError(EngineError):
    """The controller does not answer."""


class RefusedError(EngineError):
    """Slurm has refused a request. The text is its own."""


@dataclass(frozen=True, kw_only=True)
class QueueEntry:
    """What Slurm knows of one job."""

    job_id: str
    state: str
    """RUNNING, PENDING, ..."""
    reason: str = ""
    nodes: tuple[str, ...] = ()
    end_s: float | None = None
    """Wall-clock seconds: of a job that runs its time limit, of one that has ended its end. None: not known."""
    start_s: float | None = None
    """When it started. For a job that waits, it is when Slurm expects it to start."""
    submitted_s: float | None = None
    """When it was submitted, or queued again."""
    exit_code: int | None = None
    """Of its script. None: `squeue` does not tell it, see `find_ended`."""


def run(
    command: Sequence[str],
    *,
    text: str | None = None,
    env: Mapping[str, str] | None = None,
    limit_s: float = LIMIT_S,
    waits: bool = True,
) -> str:
    """Run a command of Slurm's, and return what it prints.

    Args:
        command: the program and its arguments.
        text: its standard input.
        env: its environment. None: this process's.
        limit_s: the longest time. While the controller does not answer, the command is tried again until then.
        waits: whether to wait for the controller.

    Raises:
        SlurmDownError: the controller does not answer.
        RefusedError: it refuses the request.
        NotConfiguredError: there is no such program, or no configuration of a cluster.
        EngineError: it cannot be run.
    """
    deadline_s = time.monotonic() + limit_s
    while True:
        try:
            done = subprocess.run(
                command, input=text or "", capture_output=True, text=True, timeout=limit_s, check=False,
                env=None if env is None else dict(env),
            )  # fmt: skip
        except FileNotFoundError:
            raise NotConfiguredError(
                f"there is no {command[0]} here: Slurm's commands must be installed and in PATH"
            ) from None
        except OSError as error:
            raise EngineError(f"{command[0]} cannot be run here: {error.strerror}") from None
        except subprocess.TimeoutExpired:
            raise SlurmDownError(f"{command[0]} did not answer in {limit_s:g} s") from None
        if done.returncode == 0:
            return done.stdout
        if _NO_CONFIG in done.stderr:
            raise NotConfiguredError(_NO_CLUSTER)
        lines = done.stderr.strip().splitlines() or [f"it exited with code {done.returncode}"]
        why = "; ".join(line.removeprefix(f"{command[0]}: error: ").removeprefix("error: ") for line in lines[-2:])
        if not any(each in done.stderr for each in _DOWN):
            raise RefusedError(f"{command[0]}: {why}")
        if not waits or time.monotonic() + _RETRY_S > deadline_s:
            raise SlurmDownError(f"Slurm's controller does not answer: {why}")
        time.sleep(_RETRY_S)


@lru_cache(maxsize=4)
def read_help(program: str) -> str:
    """Return what a command says of its options."""
    return run([program, "--help"])


def check_version(least: tuple[int, int], what: str) -> None:
    """Refuse what only a newer Slurm has.

    Raises:
        SchedulerError: one line that names both versions.
    """
    text = run(["sbatch", "--version"]).strip()
    found = re.search(r"(\d+)\.(\d+)", text)
    if found is not None and (int(found[1]), int(found[2])) < least:
        raise SchedulerError(f"{what} needs Slurm {least[0]}.{least[1]:02d}, and this cluster has {text}")


def has_option(text: str, flag: str) -> bool:
    """Return whether a command's help names an option."""
    return any(word.strip(",[]").partition("[")[0].partition("=")[0] == flag for word in text.split())


def can_wait_for_children() -> bool:
    """Return whether this cluster's srun can wait for all processes of a task: since 25.05, with cgroups of version 2.

    An agent whose supervisor was killed then has the time to let its workers save.
    """
    if not has_option(read_help("srun"), WAIT_FOR_CHILDREN):
        return False
    rows = (line.partition("=")[::2] for line in run(["scontrol", "show", "config"]).splitlines())
    config = {name.strip(): value.strip() for name, value in rows}
    return config.get("ProctrackType") == "proctrack/cgroup" and config.get("CgroupPlugin") != "cgroup/v1"


def list_jobs(name: str, job_ids: Sequence[str]) -> list[QueueEntry]:
    """Return the jobs of an app that Slurm still knows, oldest first.

    Args:
        name: of the jobs.
        job_ids: those that are known to be the app's: where no job has ended long ago, squeue knows all.
    """
    found = _parse_rows(run(["squeue", "-h", "-t", "all", "--name", name, "-o", _FORMAT], waits=False))
    if found or not job_ids:
        return found
    return [each for each in map(find_ended, job_ids) if each is not None]


def _parse_rows(text: str) -> list[QueueEntry]:
    rows = [line.split("|") for line in text.splitlines() if line.count("|") == _FORMAT.count("|")]
    return sorted((_parse_row(row) for row in rows), key=lambda each: int(each.job_id.partition("_")[0]))


def _parse_row(row: Sequence[str]) -> QueueEntry:
    job_id, state, reason, nodes, submitted, end, start = row
    return QueueEntry(
        job_id=job_id,
        state=state,
        reason="" if reason == "None" else reason,
        nodes=tuple(expand_hosts(nodes)) if nodes else (),
        end_s=parse_time(end),
        start_s=parse_time(start),
        submitted_s=parse_time(submitted),
    )


def find_ended(job_id: str) -> QueueEntry | None:
    """Find a job that is not in the queue any more: its accounting, where there is one."""
    return _try(_read_accounting, job_id) or _try(_read_control, job_id)


def _try(read: Callable[[str], QueueEntry], job_id: str) -> QueueEntry | None:
    try:
        return read(job_id)
    except SlurmDownError:
        raise
    except (EngineError, ValueError, KeyError):
        return None  # accounting is off, or the job forgotten


def _read_accounting(job_id: str) -> QueueEntry:
    row = run(["sacct", "-X", "-P", "-n", "-j", job_id, "-o", _ENDED], waits=False).splitlines()[-1:]
    state, end, nodes, code = "".join(row).split("|")
    return QueueEntry(
        job_id=job_id,
        state=state.split()[0],
        nodes=() if nodes in ("", "None assigned") else tuple(expand_hosts(nodes)),
        end_s=parse_time(end),
        exit_code=int(code.partition(":")[0]),
    )


def _read_control(job_id: str) -> QueueEntry:
    fields = parse_fields(run(["scontrol", "-o", "show", "job", job_id], waits=False))
    return QueueEntry(
        job_id=job_id,
        state=fields["JobState"],
        end_s=parse_time(fields["EndTime"]),
        exit_code=int(fields["ExitCode"].partition(":")[0]),
    )


def update_job(job_id: str, setting: str) -> None:
    """Change a setting of a job, unless Slurm refuses it."""
    with contextlib.suppress(RefusedError):
        run(["scontrol", "update", f"JobId={job_id}", setting])


def cancel(job_id: str, *options: str) -> None:
    """End a job, without options by SIGTERM to its processes, and SIGKILL after the cluster's KillWait."""
    try:
        run(["scancel", *options, job_id])
    except RefusedError as error:  # it may have ended
        if _UNKNOWN not in str(error) and "already completing or completed" not in str(error):
            raise


def submit_script(path: str, env: Mapping[str, str]) -> str:
    """Submit a script, and return the job's id.

    Args:
        path: of the script.
        env: what the job inherits.
    """
    try:
        return run(["sbatch", "--parsable", path], env=env).strip().partition(";")[0]
    except RefusedError as error:
        if _NO_GRES not in str(error).lower():
            raise
        hint = (
            "`sinfo -o '%P %G'` lists what each partition has; -cfg gpus=tres asks for GPUs by --gpus-per-node, and "
            "-cfg gpus=none leaves them to the partition"
        )
        raise RefusedError(f"{error}: this cluster does not know the GPUs that the job asks for: {hint}") from None


def run_on_node(
    job_id: str, node: str, command: Sequence[str], env: Mapping[str, str], limit_s: float
) -> tuple[int, str, str]:
    """Run a command on a node of a job that runs. Return its exit code, standard output and standard error.

    The exit code is `TIMED_OUT` where it did not end, and any where `srun` could not start it.
    """
    argv = build_step(job_id, node, ["--input=none"], command)
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=limit_s, check=False, env=dict(env)
        )
    except OSError as error:
        return 1, "", f"srun on {node}: {error}"
    except subprocess.TimeoutExpired:
        return TIMED_OUT, "", f"srun on {node} did not end in {limit_s:g} s"
    return done.returncode, done.stdout, done.stderr


def build_step(job_id: str, node: str, options: Sequence[str], command: Sequence[str]) -> list[str]:
    """Build the `srun` of a command on a node of a job that runs."""
    argv = ["srun", "--overlap", f"--jobid={job_id}", f"--nodelist={node}", "--nodes=1", "--ntasks=1", "--quiet"]
    return [*argv, "--cpus-per-task=1", "--mem=0", *options, "--chdir=/", *command]
