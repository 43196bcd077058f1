"""Two users on one machine, both real: what the other one leaves in folders of this one's jobs is not started."""

import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from harness import Outcome, run_tree
from other_user import OTHER, call_as_other, needs_two_users, other_dir, shared_dir

from muster.schedulers.supervision.app_folder import AppFolder, AppSpec
from muster.schedulers.supervision.registry import AppRegistry

__all__ = ["other_dir", "shared_dir"]

pytestmark = [pytest.mark.torchx, needs_two_users]

TORCHX = str(Path(sys.executable).with_name("torchx"))


def make_app(path: Path, python: Path, app_id: str) -> Callable[[], None]:
    """What makes an app that runs, as its files say, whose supervisor has died: looking at it may start that again."""
    machine = {
        "host": os.uname().nodename,
        "boot_id": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        "pid_namespace": os.readlink("/proc/self/ns/pid"),
    }
    record = {"phase": "running", "outcome": None, "reason": "", "retries": {}, "restarting": [], "grace_number": 0}
    record |= {"lingering": 0, "replicas": [], "supervisor": None, "submitted_s": 0.0, "ended_s": None}
    description = {"name": app_id, "roles": [], "metadata": {}}
    spec = AppSpec(
        app_id=app_id,
        scheduler="detached",
        folder=str(path),
        driver="a:b",
        roles=(),
        grace_s=1.0,
        python=str(python),
        description=description,
    )

    def make() -> None:
        folder = AppFolder(path)
        folder.create(spec)
        folder.state_file.write_text(json.dumps(record | {"machine": machine}))
        path.chmod(0o755)
        for each in path.rglob("*"):
            each.chmod(0o755)

    return make


def test_a_run_folder_that_another_user_made_is_not_used(shared_dir):
    """As with `--log-dir /tmp` and a run id that is known."""
    shared_dir.chmod(0o1777)
    call_as_other(lambda: os.mkdir(shared_dir / "job", 0o777))
    script = shared_dir / "program.py"
    script.write_text("import sys\nprint('trains', file=sys.stderr)\n")
    agent = [sys.executable, "-m", "muster.agent", "--standalone", "--rdzv-id", "job", "--start", "cold"]
    done = run_tree([*agent, "--log-dir", str(shared_dir), "--tee", "3", str(script)], cwd=shared_dir)
    assert done.exit_code == 0, done.explain()
    refusal = f"no log files, console only: cannot write to {shared_dir}/job: it belongs to another user ({OTHER})"
    assert refusal in " ".join(done.stderr.split()), done.explain()
    assert "trains" in done.stderr, done.explain()
    assert list((shared_dir / "job").iterdir()) == []


def torchx(*words: str, env: Mapping[str, str]) -> Outcome:
    return run_tree([TORCHX, *words], env=env)


def test_looking_at_jobs_starts_nothing_of_another_user(shared_dir, other_dir):
    trap, marker = shared_dir / "trap", shared_dir / "started"
    trap.write_text(f"#!/bin/sh\nid -u > {marker}\n")
    trap.chmod(0o755)
    home = shared_dir / "home"
    env = {"HOME": str(home), "XDG_STATE_HOME": "", "PATH": os.environ["PATH"]}
    registry = AppRegistry(home / ".local/state/muster", "detached")
    call_as_other(make_app(other_dir / "logs/torchx/forged", trap, "forged"))
    registry.add("forged", other_dir / "logs/torchx/forged")  # once it was a job of this user
    make_app(home / "logs/torchx/mine", Path(sys.executable), "mine")()
    registry.add("mine", home / "logs/torchx/mine")

    refusal = f"{other_dir} belongs to user {OTHER}, not to you: choose a folder of your own with -cfg log_dir"
    listed = torchx("list", "-s", "detached", env=env)
    assert "mine" in listed.stdout, listed.explain()
    assert refusal in listed.stderr, listed.explain()
    forged = "detached://torchx/forged"
    submission = ["run", "-s", "detached", "-cfg", f"log_dir={other_dir}/logs", "utils.sh", "true"]
    for words in (["status", forged], ["log", forged], ["cancel", forged], ["describe", forged], submission):
        done = torchx(*words, env=env)
        assert refusal in done.stderr, done.explain()
        assert "Traceback" not in done.stderr, done.explain()
    assert not marker.exists(), f"a program of user {OTHER} ran as user {marker.read_text()}"
