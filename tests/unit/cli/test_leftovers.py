"""Which log folders of agents that were started by hand `muster prune` removes."""

import os
import tempfile
from pathlib import Path

import pytest

from muster._shared.contract import LogNames
from muster.agent.logs.files import RunFolder
from muster.cli import leftovers


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def find(folder: Path) -> list[leftovers.Leftover]:
    return list(leftovers._find_logs_of_agents(folder))


def make_run(*, fails: bool = True) -> tuple[RunFolder, Path]:
    """What an agent makes for a job whose first attempt has begun."""
    run = RunFolder(None, "run")
    attempt = Path(run.run_dir) / LogNames.ATTEMPT_DIR.format(attempt=0) / "0"
    attempt.mkdir(parents=True)
    (attempt / LogNames.STDERR).write_text("text")
    if fails:
        (Path(run.run_dir) / LogNames.REPORT).write_text("{}")
    return run, Path(run.run_dir).parent


@pytest.mark.parametrize(("fails", "what"), [(True, "failed: logs of"), (False, "logs of")])
def test_the_logs_of_a_job_that_has_ended_go(folder: Path, fails: bool, what: str) -> None:
    run, path = make_run(fails=fails)
    assert find(folder) == []  # its agent lives
    run.close()
    (found,) = find(folder)
    assert (found.name, found.what) == (str(path), f"{what} a job started by hand")
    assert found.size_bytes >= 4
    found.remove()
    assert list(folder.iterdir()) == []


def test_logs_that_are_in_use_again_stay(folder: Path) -> None:
    run, path = make_run()
    run.close()
    (found,) = find(folder)
    (path / "run" / ".lock").touch()
    again = RunFolder(str(path), "run")
    assert again._lock(again.run_dir)
    with pytest.raises(BlockingIOError):
        found.remove()
    assert find(folder) == []
    again.close()


def test_folders_that_are_not_an_agents_or_not_the_users_own_stay(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "muster_notebook" / "data").mkdir(parents=True)
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "run" / "attempt_0").mkdir(parents=True)
    (folder / "muster_abcdefgh").symlink_to(elsewhere)
    (folder / "muster_job_abcdefgh").mkdir()
    assert find(folder) == []
    run, _ = make_run()
    run.close()
    assert len(find(folder)) == 1
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert find(folder) == []
