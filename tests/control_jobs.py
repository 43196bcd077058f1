"""Jobs whose ranks count steps, and `muster` from another shell."""

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path

from harness import PROGRAMS, wait_until
from torchx.specs import AppDef, Resource, Role
from torchx.specs.api import macros

from muster._shared import processes
from muster.cli.commands import main
from muster.schedulers.local import create_detached_scheduler
from muster.schedulers.supervision.registry import AppRegistry, find_state_dir

PROGRAM = PROGRAMS / "control_steps.py"
COMMANDS = ("stop", "checkpoint", "pause", "resume", "stacks", "resize")
PATIENT = ("--rdzv-conf", "keep_alive_max_attempt=60")
"""An agent without CPU time for some seconds is no lost node, unless the loss of one is the subject."""
READY_S = 90.0
END_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Shell:
    """What a `muster` command has printed."""

    code: int
    stdout: str
    stderr: str

    @property
    def answer(self) -> dict:
        return json.loads(self.stdout)

    def explain(self) -> str:
        return f"exit {self.code}\n--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}"


def build_app(
    folder: Path, *words: str, nodes: int = 2, nproc: int = 2, least: int | None = None, flags: Sequence[str] = PATIENT
) -> AppDef:
    size = str(nodes) if least is None else f"{least}:{nodes}"
    args = ["-m", "muster.agent", "--nnodes", size, "--nproc-per-node", str(nproc)]
    args += ["--rank0-env", macros.rank0_env, "--node-rank", macros.replica_id, "--rdzv-id", macros.app_id]
    args += ["--start", "cold", "--shutdown-timeout", "2", *flags, str(PROGRAM), str(folder), "100000", *words]
    role = Role(
        name="r", image="", entrypoint="python3", args=args, num_replicas=nodes, max_retries=2, min_replicas=least
    )
    role.resource = Resource(cpu=1, gpu=0, memMB=1)
    return AppDef("app", roles=[role])


class Job:
    """A detached job of local_cwd."""

    def __init__(self, scheduler, folder: Path, app_id: str, ranks: int) -> None:
        self.scheduler = scheduler
        self.folder = folder
        self.app_id = app_id
        self.handle = f"detached://torchx/{app_id}"
        self.state = AppRegistry(find_state_dir(os.environ), "detached").open(app_id)
        self.ranks = ranks

    def wait_ready(self) -> None:
        """All ranks count steps, so they take part in what their agents agree on."""
        wait_until(
            lambda: len(list(self.folder.glob("pid*"))) == self.ranks,
            timeout_s=READY_S,
            what=f"the ranks\n{self.read_console()}",
        )

    def read_console(self) -> str:
        found = sorted(self.state.path.rglob("combined.log"))
        return "\n".join(f"--- {path}\n{path.read_text()[-4000:]}" for path in found)

    def wait_for_line(self, text: str, times: int = 1) -> None:
        wait_until(
            lambda: self.read_console().count(text) >= times, timeout_s=READY_S, what=f"{text!r}\n{self.read_console()}"
        )

    def pid_of(self, rank: int) -> int:
        return int((self.folder / f"pid{rank}").read_text())

    def signal_agent(self, node: int, signum: int = signal.SIGKILL) -> None:
        """One that is killed, or fenced because it was stopped, is started again by the supervisor."""
        guard = list(self.state.read_record().handles.values())[node]["pid"]
        [agent] = [pid for pid, parent in processes.list_parents().items() if parent == guard]
        os.kill(agent, signum)

    def wait_healed(self, *shells: Shell) -> None:
        """Wait until a checkpoint succeeds after the loss of node 0: the round may be formed more than once."""
        wait_until(lambda: muster("checkpoint", self.handle).code == 0, timeout_s=2 * END_S, what=self.explain(*shells))
        assert self.describe() == "RUNNING", self.explain(*shells)
        assert self.count_starts()[1:] == [1] * (len(self.count_starts()) - 1), self.explain(*shells)

    def count_starts(self) -> list[int]:
        record = self.state.read_record()
        return [replica.starts for replica in record.app.replicas.values()]

    def describe(self) -> str:
        return self.scheduler.describe(self.app_id).state.name

    def wait_ended(self) -> str:
        ended = ("SUCCEEDED", "FAILED", "CANCELLED")
        wait_until(lambda: self.describe() in ended, timeout_s=END_S, what=f"the end\n{self.read_console()}")
        return self.describe()

    def explain(self, *shells: Shell) -> str:
        return "\n".join([*(each.explain() for each in shells), self.read_console()])


@contextmanager
def start_job(tmp_path: Path, *words: str, **more) -> Iterator[Job]:
    scheduler = create_detached_scheduler("torchx")
    folder = tmp_path / "ranks"
    folder.mkdir()
    app = build_app(folder, *words, **more)
    try:
        app_id = scheduler.submit(app, {})
        job = Job(scheduler, folder, app_id, more.get("nodes", 2) * more.get("nproc", 2))
        try:
            job.wait_ready()
            yield job
        finally:
            scheduler.delete(app_id)
    finally:
        scheduler.close()


def continue_process(pid: int) -> None:
    """Continue a process that was stopped, if the end of its round has not ended it already."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def begin(*words: str) -> "subprocess.Popen[str]":
    """Start a `muster` command in another process, beside others."""
    command = [sys.executable, "-m", "muster", *words]
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(process: "subprocess.Popen[str]") -> Shell:
    stdout, stderr = process.communicate(timeout=END_S)
    return Shell(code=process.returncode, stdout=stdout, stderr=stderr)


def muster(*words: str) -> Shell:
    """Run a `muster` command in this process."""
    with redirect_stdout(io.StringIO()) as stdout, redirect_stderr(io.StringIO()) as stderr:
        code = main([*words])
    return Shell(code=code, stdout=stdout.getvalue(), stderr=stderr.getvalue())


def list_answers(handle: str, capsys) -> dict[str, tuple[int, str]]:
    """What each command about a running app answers of one that does not run, in this process."""
    answers = {}
    for command in COMMANDS:
        capsys.readouterr()
        code = main([command, handle, *(["1"] if command == "resize" else [])])
        answers[command] = (code, capsys.readouterr().err)
    return answers


def unknown_line(scheduler: str, app_id: str) -> str:
    """What every command prints of an app that does not exist."""
    return (
        f"muster: {scheduler} has no job {app_id!r}: it may have been deleted, or submitted by another user or on "
        f"another machine; `muster list -s {scheduler}` lists the jobs that are known here\n"
    )
