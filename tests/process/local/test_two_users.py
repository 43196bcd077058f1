"""Two users on one machine, both real: what the other one leaves in folders of this one's jobs is not started."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from harness import AGENT, LIMIT_S, run_tree, wait_until
from other_user import OTHER, call_as_other, needs_two_users, other_dir, shared_dir
from supervised_apps import build_spec
from torchx.specs import AppDef

from muster.schedulers.runner.app_codec import dump_app
from muster.schedulers.supervision.app_folder import AppFolder, AppRecord
from muster.schedulers.supervision.machine import Machine
from muster.schedulers.supervision.registry import AppRegistry
from muster.schedulers.supervision.state import AppPhase, SupervisedApp

__all__ = ["other_dir", "shared_dir"]

pytestmark = needs_two_users

SECRET = "pa$$word-${app_id}-hunter2"
"""Neither its name below nor its value looks secret."""

TORCHX = str(Path(sys.executable).with_name("torchx"))


def make_app(path: Path, python: Path, app_id: str) -> Callable[[], None]:
    """What makes an app that runs, as its files say, whose supervisor has died: looking at it may start that again."""
    record = AppRecord(app=SupervisedApp(replicas={}, phase=AppPhase.RUNNING), machine=Machine.here())
    description = dump_app(AppDef(app_id))
    spec = build_spec(path, scheduler="detached", python=str(python), description=description)

    def make() -> None:
        folder = AppFolder(path)
        folder.create(spec)
        folder.write_record(record)
        path.chmod(0o755)
        for each in path.rglob("*"):
            each.chmod(0o755)

    return make


def test_a_log_folder_whose_owner_can_replace_the_run_is_named(other_dir):
    """That user could put in a `checkpoint.json`; it may also be the owner of a volume."""
    agent = [*AGENT, "--standalone", "--rdzv-id", "job", "--start", "cold", "--no-python"]
    done = run_tree([*agent, "--log-dir", str(other_dir), "true"], cwd=other_dir).check()
    assert f"user {OTHER} can replace " in done.stderr, done.explain()


def test_modules_and_checkpoints_of_another_user_have_no_effect(shared_dir, other_dir):
    """In a working folder and in a log folder of that user."""
    marker = shared_dir / "token"

    def plant() -> None:
        trap = f"import os\nopen({str(marker)!r}, 'w').write(os.environ.get('MUSTER_TOKEN', ''))\n"
        for name in ("muster.py", "types.py", "operator.py"):
            (other_dir / name).write_text(trap)
        os.mkdir(other_dir / "job")
        path = "/evil.pt\n[muster] forged\x1b[2J"
        (other_dir / "job/checkpoint.json").write_text(json.dumps({"number": 9, "step": 5, "path": path}))

    call_as_other(plant)
    script = shared_dir / "program.py"
    script.write_text("from muster import worker\nprint('resumes from', worker.resume_path())\n")
    env = {"HOME": str(shared_dir / "home"), "PATH": os.environ["PATH"], "MUSTER_TOKEN": "0" * 64}
    agent = [str(Path(sys.executable).with_name("muster-agent")), "--standalone", "--rdzv-id", "job", "--start", "cold"]
    by_hand = run_tree([*agent, "--log-dir", str(other_dir), str(script)], cwd=other_dir, env=env)
    job = ["dist.ddp", "-j", "1x1", "--start", "cold", "--script", str(script)]
    submitted = run_tree([TORCHX, "run", "-s", "local_cwd", *job], cwd=other_dir, env=env)
    for done in (by_hand, submitted):
        assert done.exit_code == 0, done.explain()
        assert "resumes from None" in done.stdout + done.stderr, done.explain()
        assert "forged" not in done.stdout + done.stderr, done.explain()
    assert not marker.exists()


@pytest.fixture
def home(shared_dir, monkeypatch):
    """A home of this process."""
    monkeypatch.setenv("HOME", str(shared_dir / "home"))
    monkeypatch.setenv("XDG_STATE_HOME", "")
    return shared_dir / "home"


def test_looking_at_jobs_starts_nothing_of_another_user(shared_dir, other_dir, home, torchx):
    trap, marker = shared_dir / "trap", shared_dir / "started"
    trap.write_text(f"#!/bin/sh\nid -u > {marker}\n")
    trap.chmod(0o755)
    registry = AppRegistry(home / ".local/state/muster", "detached")
    call_as_other(make_app(other_dir / "logs/torchx/forged", trap, "forged"))
    registry.add("forged", other_dir / "logs/torchx/forged")  # once it was a job of this user
    make_app(home / "logs/torchx/mine", Path(sys.executable), "mine")()
    registry.add("mine", home / "logs/torchx/mine")

    refusal = f"{other_dir} belongs to user {OTHER}"
    _, listed, errors = torchx("list", "-s", "detached")
    assert ("mine" in listed, refusal in errors) == (True, True), errors
    forged = "detached://torchx/forged"
    submission = ["run", "-s", "detached", "-cfg", f"log_dir={other_dir}/logs", "utils.sh", "true"]
    for words in (["status", forged], ["log", forged], ["cancel", forged], ["describe", forged], submission):
        _, _, errors = torchx(*words)
        assert (refusal in errors, "Traceback" in errors) == (True, False), errors
    assert not marker.exists(), f"a program of user {OTHER} ran as user {marker.read_text()}"


def search_as_other(secret: bytes, folder: Path) -> Callable[[], None]:
    """What fails if a user who looks around finds the secret: in `ps`, in environments, or in files of the job."""

    def read(path: Path) -> bytes:
        try:
            return path.read_bytes()
        except OSError:
            return b""

    def search() -> None:
        lines = [read(process / "cmdline") for process in Path("/proc").glob("[0-9]*")]
        assert any(b"muster.agent" in line or b"muster/agent" in line for line in lines), "the job runs"
        found = [line for line in lines if secret in line]
        found += [path for path in Path("/proc").glob("[0-9]*/environ") if secret in read(path)]
        found += [path for path, _, _ in os.walk(folder) if path != str(folder)]
        found += [path for path in folder.rglob("*") if secret in read(path)]
        assert not found, found

    return search


def test_values_from_the_environment_or_a_file_are_seen_by_no_other_user(shared_dir, home, torchx):
    env_file, script, marker = shared_dir / "job.env", shared_dir / "program.py", shared_dir / "out"
    env_file.write_text(f"# of the job\nFROM_FILE={SECRET}\n")
    env_file.chmod(0o600)
    script.write_text(
        "import os, sys, time\n"
        f"if os.environ['FROM_FILE'] == os.environ['FROM_HERE'] == {SECRET!r}: open({str(marker)!r}, 'w').close()\n"
        "else: sys.exit('another value')\n"
        "time.sleep(600)\n"
    )
    env = {"HOME": str(home), "PATH": os.environ["PATH"], "FROM_HERE": SECRET}
    job = ["dist.ddp", "-j", "2x1", "--start", "cold", "--env", "FROM_HERE", "--env_file", str(env_file)]
    command = [TORCHX, "run", "-s", "local_cwd", *job, "--script", str(script)]
    with subprocess.Popen(command, env=env, cwd=shared_dir, stderr=subprocess.PIPE, text=True) as run:
        try:
            wait_until(lambda: marker.exists() or run.poll() is not None, what="the workers' start")
            assert run.poll() is None, run.stderr.read()
            call_as_other(search_as_other(SECRET.encode(), home))
            _, listed, _ = torchx("list", "-s", "local_cwd")
            handle = next(word for word in listed.split() if word.startswith("local_cwd://"))
            _, shown, errors = torchx("describe", handle)
            assert ("FROM_FILE" in shown, "hunter2" in shown + errors) == (True, False)
        finally:
            run.send_signal(signal.SIGINT)  # it waits until the job's processes have ended
            _, errors = run.communicate(timeout=LIMIT_S)
    assert "hunter2" not in errors
