"""`python -m muster prune`: says what it would remove, asks, removes what has ended and nothing else."""

import fcntl
import os
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager

import pytest
from torchx.specs import AppDef, Resource, Role

from muster.cli import leftovers
from muster.cli import prune as module
from muster.cli.commands import main
from muster.schedulers.local import create_detached_scheduler
from muster.schedulers.supervision import client
from muster.schedulers.supervision.app_folder import AppFolder
from muster.schedulers.supervision.registry import AppRegistry, find_state_dir

pytestmark = pytest.mark.torchx

TINY = Resource(cpu=1, gpu=0, memMB=1)


@pytest.fixture
def scheduler(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    # Docker's SDK leaves its socket open when no engine answers; tests/docker has an engine.
    monkeypatch.setattr(leftovers, "_find_lost_containers", lambda _: iter(()))
    scheduler = create_detached_scheduler("test")
    yield scheduler
    for item in scheduler.list():
        folder = folder_of(item.app_id)
        client.request_stop(folder, "kill")
        client.wait_ended(folder, limit_s=30)
    scheduler.close()


def folder_of(app_id):
    return AppFolder(AppRegistry(find_state_dir(os.environ), "detached").find(app_id))


def submit(scheduler, script):
    role = Role("r", image="", entrypoint="/bin/sh", args=["-c", script], resource=TINY)
    return scheduler.schedule(scheduler.submit_dryrun(AppDef("app", roles=[role]), {}))


@pytest.fixture
def ended(scheduler):
    app_id = submit(scheduler, "echo hello; exit 3")
    assert client.wait_ended(folder_of(app_id), limit_s=60)
    return app_id


def test_only_what_has_ended_goes(scheduler, ended, capsys):
    running = submit(scheduler, "sleep 1000")
    path = folder_of(ended).path
    assert main(["prune", "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert f"detached://{ended}" in text
    assert "failed: logs" in text
    assert running not in text
    assert path.exists()
    assert main(["prune", "--yes"]) == 0
    assert not path.exists()
    assert [item.app_id for item in scheduler.list()] == [running]
    assert main(["prune", "--yes"]) == 0
    assert capsys.readouterr().out.endswith("nothing to remove\n")


def test_young_jobs_stay(scheduler, ended, capsys):
    assert main(["prune", "--yes", "--older-than", "1h"]) == 0
    assert capsys.readouterr().out == "nothing to remove\n"
    assert folder_of(ended).path.exists()


@pytest.mark.parametrize(("answer", "goes"), [("y", True), ("yes", True), ("", False), ("n", False)])
def test_it_asks(scheduler, ended, monkeypatch, answer, goes):
    path = folder_of(ended).path
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda _: answer)
    assert main(["prune"]) == (0 if goes else 1)
    assert path.exists() is not goes


def test_without_a_terminal_it_needs_yes(scheduler, ended):
    done = subprocess.run(
        [sys.executable, "-m", "muster", "prune"], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "use --yes" in done.stderr
    assert folder_of(ended).path.exists()


def test_what_a_killed_command_had_packed_goes_after_a_day(scheduler, tmp_path):
    young, old = (find_state_dir(os.environ) / f".packed-{name}" for name in ("young", "old"))
    for folder in (young, old):
        folder.mkdir()
        (folder / "workspace-1.tar.gz").write_bytes(b"x" * 1000)
    two_days_ago_s = time.time() - 2 * 86400
    os.utime(old, (two_days_ago_s, two_days_ago_s))
    assert main(["prune", "--yes"]) == 0
    assert young.exists()
    assert not old.exists()


def test_unpacked_agents_that_no_job_uses_go(scheduler, tmp_path, capsys):
    base = tmp_path / f"muster-{os.geteuid()}"
    used, unused = base / ("a" * 32), base / ("b" * 32)
    for folder in (used, unused):
        folder.mkdir(parents=True)
        (folder / "x.py").write_text("x = 1\n")
    with hold(used):
        assert main(["prune", "--yes"]) == 0
    text = capsys.readouterr().out
    assert f"{unused}" in text
    assert "an unpacked agent that no job uses" in text
    assert str(used) not in text
    assert [path.name for path in base.iterdir()] == [used.name]


def test_what_a_job_has_begun_to_use_stays_and_is_no_error(scheduler, tmp_path, monkeypatch, capsys):
    """A job starts between the question and the answer."""
    folder = tmp_path / f"muster-{os.geteuid()}" / ("a" * 32)
    folder.mkdir(parents=True)
    with ExitStack() as job:

        def answer(_):
            job.enter_context(hold(folder))
            return "y"

        monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
        monkeypatch.setattr("builtins.input", answer)
        assert main(["prune"]) == 0
    said = capsys.readouterr()
    assert f"{folder} stays: a job has begun to use it" in said.out
    assert said.err == ""
    assert folder.exists()


def test_what_another_command_has_removed_is_no_error(scheduler, tmp_path, monkeypatch, capsys):
    folder = tmp_path / f"muster-{os.geteuid()}" / ("a" * 32)
    folder.mkdir(parents=True)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda _: folder.rmdir() or "y")
    assert main(["prune"]) == 0
    assert capsys.readouterr().err == ""


@contextmanager
def hold(folder):
    """As an agent that runs from there does."""
    fd = os.open(folder, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_SH)
    try:
        yield
    finally:
        os.close(fd)


def test_what_cannot_be_removed_is_named(scheduler, ended, monkeypatch, capsys):
    def refuse(path, **_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(shutil, "rmtree", refuse)
    assert main(["prune", "--yes"]) == 1
    assert f"detached://{ended} is not removed: " in capsys.readouterr().err
    monkeypatch.undo()


@pytest.mark.parametrize("age", ["", "7", "d", "1y", "1 d"])
def test_ages(age, capsys):
    with pytest.raises(SystemExit):
        main(["prune", "--older-than", age])
    assert "is not an age such as 30m, 12h, 7d or 2w" in capsys.readouterr().err


def test_sizes():
    sizes = [module.format_size(size) for size in (0, 999, 1000, 1_234_567, 9e11, 9e15)]
    assert sizes == ["0 B", "999 B", "1.0 kB", "1.2 MB", "900.0 GB", "9000.0 TB"]
