"""What `muster prune` removes in folders where other users can write: logs of agents, unpacked agents."""

import os
from pathlib import Path

import pytest
from other_user import needs_two_users, shared_dir

from muster._shared.contract import LogNames
from muster.agent.logs.files import RunFolder
from muster.cli import prune

__all__ = ["shared_dir"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def find(folder: Path) -> list[prune.Leftover]:
    return list(prune._find_logs_of_agents(folder))


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


@needs_two_users
def test_a_folder_that_another_user_can_have_renamed_stays(shared_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be any folder of this user, with runs of torchrun in it."""
    monkeypatch.setenv("TMPDIR", str(shared_dir))
    run, _ = make_run()
    run.close()
    shared_dir.chmod(0o777)
    assert find(shared_dir) == []
    shared_dir.chmod(0o1777)
    assert len(find(shared_dir)) == 1


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


def test_unpacked_agents_are_found_in_folders_that_only_this_user_can_have_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link that another user has made there may lead to folders of the user whose names are alike: runs, say."""
    runs, temporary, cache = tmp_path / "runs", tmp_path / "tmp", tmp_path / "cache"
    (runs / "0123456789abcdef0123456789abcdef").mkdir(parents=True)
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    base = temporary / f"muster-{os.geteuid()}"
    base.symlink_to(runs)
    assert list(prune._find_unpacked_agents()) == []
    base.unlink()
    (base / "0123456789abcdef0123456789abcdef").mkdir(parents=True)
    base.chmod(0o777)
    assert list(prune._find_unpacked_agents()) == []
    base.chmod(0o700)
    [found] = prune._find_unpacked_agents()
    found.remove()
    assert list(base.iterdir()) == []
    assert len(list(runs.iterdir())) == 1
