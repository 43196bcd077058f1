"""`python -m muster prune`: says what it would remove, asks, removes what has ended and nothing else."""

import fcntl
import io
import os
import shutil
import sys
import time
from contextlib import ExitStack, contextmanager

import pytest

from muster.cli.commands import main
from muster.schedulers.supervision.app_folder import AppFolder, AppRecord, AppSpec, ProcessId
from muster.schedulers.supervision.machine import Machine
from muster.schedulers.supervision.registry import AppRegistry, find_state_dir
from muster.schedulers.supervision.state import AppPhase, Outcome, SupervisedApp


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    # Docker's SDK leaves its socket open when no engine answers; tests/docker has an engine.
    monkeypatch.setattr("muster.schedulers.docker.running_apps.orphaned_apps.find_without_app", lambda *_: iter(()))


def make_app(app_id, phase, **ends):
    """The files of a detached app of this machine, whose supervisor is this process while it runs."""
    state = find_state_dir(os.environ)
    spec = AppSpec(
        app_id=app_id,
        scheduler="detached",
        folder=str(state / "logs" / app_id),
        driver="x:y",
        roles=(),
        grace_s=1.0,
        description={"name": "app", "roles": [], "metadata": {}},
    )
    folder = AppFolder(spec.folder)
    folder.create(spec)
    app = SupervisedApp(replicas={}, phase=phase, **ends)
    folder.write_record(
        AppRecord(
            app=app,
            machine=Machine.here(),
            supervisor=ProcessId.of(os.getpid()),
            submitted_s=time.time(),
            ended_s=time.time() if ends else None,
        )
    )
    AppRegistry(state, "detached").add(app_id, folder.path)
    return folder.path


@pytest.fixture
def ended():
    return make_app("app-ended", AppPhase.ENDED, outcome=Outcome.FAILED)


def test_only_what_has_ended_goes(ended, capsys):
    running = make_app("app-running", AppPhase.RUNNING)
    assert main(["prune", "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert "detached://app-ended" in text
    assert "failed: logs" in text
    assert "app-running" not in text
    assert ended.exists()
    assert main(["prune", "--yes"]) == 0
    assert (ended.exists(), running.exists()) == (False, True)
    assert main(["prune", "--yes"]) == 0
    assert capsys.readouterr().out.endswith("nothing to remove\n")


def test_young_jobs_stay(ended, capsys):
    assert main(["prune", "--yes", "--older-than", "1h"]) == 0
    assert capsys.readouterr().out == "nothing to remove\n"
    assert ended.exists()


def test_without_a_terminal_it_needs_yes(ended, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    assert main(["prune"]) == 1
    assert "use --yes" in capsys.readouterr().err
    assert ended.exists()


@pytest.mark.parametrize(("answer", "goes"), [("y", True), ("yes", True), ("", False), ("n", False)])
def test_it_asks(ended, monkeypatch, answer, goes):
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda _: answer)
    assert main(["prune"]) == (0 if goes else 1)
    assert ended.exists() is not goes


def test_unpacked_agents_that_no_job_uses_go(tmp_path, capsys):
    base = tmp_path / f"muster-{os.geteuid()}"
    used, unused = base / ("a" * 32), base / ("b" * 32)
    for folder in (used, unused):
        folder.mkdir(parents=True)
        (folder / "x.py").write_text("x = 1\n")
    with hold(used):
        assert main(["prune", "--yes"]) == 0
    text = capsys.readouterr().out
    assert f"{unused}" in text
    assert "an unpacked agent" in text
    assert str(used) not in text
    assert [path.name for path in base.iterdir()] == [used.name]


def test_what_a_job_has_begun_to_use_stays_and_is_no_error(tmp_path, monkeypatch, capsys):
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
    assert f"{folder} stays: " in said.out
    assert said.err == ""
    assert folder.exists()


def test_what_another_command_has_removed_is_no_error(tmp_path, monkeypatch, capsys):
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


def test_what_cannot_be_removed_is_named(ended, monkeypatch, capsys):
    def refuse(path, **_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(shutil, "rmtree", refuse)
    assert main(["prune", "--yes"]) == 1
    assert "detached://app-ended is not removed: " in capsys.readouterr().err
    monkeypatch.undo()


@pytest.mark.parametrize("age", ["", "7", "d", "1y", "1 d"])
def test_ages(age, capsys):
    with pytest.raises(SystemExit):
        main(["prune", "--older-than", age])
    assert "30m, 12h, 7d or 2w" in capsys.readouterr().err
