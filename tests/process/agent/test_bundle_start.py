"""The agent as one zip: unpacked once per node and user, and run from the zip where nothing can be unpacked."""

import fcntl
import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from harness import Outcome, run_tree
from other_user import OTHER, needs_two_users

from muster.schedulers import bundle_start
from muster.schedulers.bundle import build_agent_bundle


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bundle") / "muster-agent.zip"
    path.write_bytes(build_agent_bundle())
    return path


@pytest.fixture
def run(bundle: Path, tmp_path: Path) -> Callable[..., Outcome]:
    (tmp_path / "program.py").write_text('print("program ran")\n')
    (tmp_path / "tmp").mkdir()
    (tmp_path / "home").mkdir()

    def run_bundle(*, cold: bool = True, flag: str = "-v", **env: str) -> Outcome:
        """-v prints the file of each module, -S leaves out the installed package."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "XDG"))}
        settings = {"TMPDIR": str(tmp_path / "tmp"), "HOME": str(tmp_path / "home"), **env}
        flags = ["--standalone", "--start", "cold" if cold else "auto", "program.py"]
        outcome = run_tree([sys.executable, flag, str(bundle), *flags], cwd=tmp_path, env={**kept, **settings}).check()
        assert "program ran" in outcome.stdout, outcome.explain()
        return outcome

    return run_bundle


def unpacked(base: Path) -> list[Path]:
    return sorted(base.glob("*"))


def test_the_second_start_compiles_nothing(run: Callable[..., Outcome], tmp_path: Path) -> None:
    run()
    (folder,) = unpacked(tmp_path / "tmp" / f"muster-{os.geteuid()}")
    compiled = {path: path.stat().st_mtime_ns for path in folder.rglob("*.pyc")}
    assert len(compiled) > 40
    os.utime(folder, (1e9, 1e9))
    second = run()
    assert folder.stat().st_mtime > 1e9
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*.pyc")} == compiled
    assert f"{folder}/muster/agent/node/__pycache__" in second.stderr
    assert not list((tmp_path / "home").iterdir())
    assert folder.parent.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("cold", [True, False])
def test_workers_import_muster_worker_from_there(cold: bool, run: Callable[..., Outcome], tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import muster.worker\nprint('program ran', muster.worker.__file__)\n")
    outcome = run(cold=cold, flag="-S")
    (folder,) = unpacked(tmp_path / "tmp" / f"muster-{os.geteuid()}")
    assert f"program ran {folder}/muster/worker.py\n" in outcome.stdout, outcome.explain()


def test_agents_that_start_at_once_share_one_folder(run: Callable[..., Outcome], tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: run(), range(4)))
    assert len(unpacked(tmp_path / "tmp" / f"muster-{os.geteuid()}")) == 1


def test_a_folder_that_a_power_failure_damaged_is_replaced(run: Callable[..., Outcome], tmp_path: Path) -> None:
    run()
    (folder,) = unpacked(tmp_path / "tmp" / f"muster-{os.geteuid()}")
    (folder / "muster" / "agent" / "launch.py").write_text("")
    run()
    assert unpacked(folder.parent) == [folder]


@pytest.mark.parametrize("trap", ["link", "foreign", "open", "file"])
def test_a_folder_that_is_not_the_users_own_is_not_used(trap: str, run: Callable[..., Outcome], tmp_path: Path) -> None:
    base = tmp_path / "tmp" / f"muster-{os.geteuid()}"
    other = tmp_path / "other"
    other.mkdir(mode=0o700)
    if trap == "link":
        base.symlink_to(other)
    elif trap == "file":
        base.touch()
    else:
        base.mkdir(mode=0o700)
        if trap == "open":
            base.chmod(0o777)
        elif os.geteuid() == 0:
            os.chown(base, 12345, 12345)
        else:
            pytest.skip("needs root")
    run()
    assert not list(other.iterdir())
    assert base.is_file() or not list(base.iterdir())
    assert len(unpacked(tmp_path / "home" / ".cache" / "muster")) == 1  # the next place


@needs_two_users
@pytest.mark.parametrize("trap", ["owner", "open", "link"])
def test_a_folder_that_another_user_could_replace_is_not_used(
    trap: str, run: Callable[..., Outcome], tmp_path: Path
) -> None:
    """That user could put in a `muster` of its own after the look: the agent imports some modules late."""
    tmp = tmp_path / "tmp"
    above = tmp / "above"
    above.mkdir()
    (above / "tmp").mkdir()
    if trap == "owner":
        os.chown(above, OTHER, OTHER)
    elif trap == "open":
        above.chmod(0o777)
    else:
        (tmp / "link").symlink_to(above)
        os.chown(above, OTHER, OTHER)
    run(TMPDIR=str(tmp / ("link" if trap == "link" else "above") / "tmp"))
    assert not unpacked(above / "tmp" / f"muster-{os.geteuid()}")
    assert len(unpacked(tmp_path / "home" / ".cache" / "muster")) == 1  # the next place


def test_a_volume_of_a_pod_is_used(run: Callable[..., Outcome], tmp_path: Path) -> None:
    """An emptyDir is open to all users, without the sticky bit; all of them are the job's."""
    (tmp_path / "tmp").chmod(0o777)
    run(KUBERNETES_SERVICE_HOST="10.0.0.1")
    assert len(unpacked(tmp_path / "tmp" / f"muster-{os.geteuid()}")) == 1


@pytest.mark.parametrize("why", ["nowhere", "unwanted"])
def test_without_a_folder_the_agent_runs_from_the_zip(
    why: str, run: Callable[..., Outcome], bundle: Path, tmp_path: Path
) -> None:
    nowhere = {"TMPDIR": "/proc", "HOME": "/proc", "XDG_CACHE_HOME": "/proc"}
    outcome = run(**(nowhere if why == "nowhere" else {"PYTHONDONTWRITEBYTECODE": "1"}))
    assert f"import 'muster.agent.launch' # <zipimporter object \"{bundle}" in outcome.stderr
    assert not list((tmp_path / "tmp").iterdir())


def test_old_versions_go_but_for_the_last_ones_and_those_that_jobs_run_from(
    run: Callable[..., Outcome], tmp_path: Path
) -> None:
    """A version was unpacked for each change of muster, and none was ever removed."""
    base = tmp_path / "tmp" / f"muster-{os.geteuid()}"
    folders = [base / f"{number:032x}" for number in range(8)]
    foreign, left, young = base / "theirs", base / "unfinished-old", base / "unfinished-young"
    base.mkdir(mode=0o700)
    for age, folder in enumerate([*folders, foreign, left, young]):
        folder.mkdir()
        (folder / "x.py").write_text("x = 1\n")
        used_s = time.time() - (0 if folder == young else 86400 * (100 - age))  # the last of them was used last
        os.utime(folder, (used_s, used_s))
    fd = os.open(folders[1], os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_SH)
    try:
        run()
    finally:
        os.close(fd)
    new = set(unpacked(base)) - {*folders, foreign, left, young}
    assert len(new) == 1
    assert set(unpacked(base)) - new == {folders[1], *folders[-3:], foreign, young}
    run()
    assert len(unpacked(base)) == 7  # the second start unpacks nothing and removes nothing


def test_a_folder_that_is_being_removed_is_not_used(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another agent removes it between the look and the lock: the next place is used."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    name = "d" * 32
    first = bundle_start.find_import_folder(str(bundle), name, 1)
    assert first == str(tmp_path / f"muster-{os.geteuid()}" / name)
    fd = os.open(first, os.O_RDONLY)
    try:
        # The lock of this process, from `find_import_folder`, is shared; a remover's is not.
        with pytest.raises(BlockingIOError):
            bundle_start.remove_unused(first)
        assert bundle_start.is_used(first)
    finally:
        os.close(fd)
    monkeypatch.setattr(bundle_start, "_lock", lambda folder: _lock_after_removal(folder, first))
    assert bundle_start.find_import_folder(str(bundle), name, 1) == str(tmp_path / "cache" / "muster" / name)


_LOCK = bundle_start._lock


def _lock_after_removal(folder: str, removed: str) -> None:
    if folder == removed:
        os.rename(folder, f"{folder}-gone")
    _LOCK(folder)


def test_a_full_disk_leaves_nothing_behind(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(zipfile.ZipFile, "extractall", fail)
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert bundle_start.find_import_folder(str(bundle), "d1", 1) == str(bundle)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    assert list(tmp_path.rglob("unfinished*")) == []


def test_a_cleaner_of_temporary_folders_finds_it_locked(bundle: Path, tmp_path: Path) -> None:
    program = (
        "import sys; sys.path[0] = sys.argv[1]; from muster_bundle_start import find_import_folder; "
        "print(find_import_folder(sys.argv[1], 'd', 1), flush=True); input()"
    )
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    command = [sys.executable, "-c", program, str(bundle)]
    with subprocess.Popen(
        command, env={**env, "TMPDIR": str(tmp_path)}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        folder = holder.stdout.readline().strip()
        fd = os.open(folder, os.O_RDONLY)
        try:
            with pytest.raises(BlockingIOError):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            os.close(fd)
        holder.communicate("\n")
