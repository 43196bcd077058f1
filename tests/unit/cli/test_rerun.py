"""`muster rerun`: the last line of a folder, and which changes of a workspace start a run again."""

import os
import signal
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from muster._shared.control import CommandExit, ControlError
from muster.cli import rerun_command as rerun
from muster.cli.commands import main
from muster.cli.run_command import find_workspace_folder
from muster.cli.workspace_watch import WorkspaceWatch, describe_changes, is_temporary


@pytest.fixture(autouse=True)
def _same_signals() -> Iterator[None]:
    """A command sets handlers for its process, which is this one."""
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


@pytest.fixture(autouse=True)
def _own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("state", "here", "there"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path / "here")


def test_each_folder_has_its_last_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rerun.record_line(["run", "one"])
    rerun.record_line(["run", "-s", "ssh", "two words"])
    assert rerun.read_line() == ["run", "-s", "ssh", "two words"]
    [path] = (tmp_path / "state").rglob("*.json")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600, "it may hold a secret"
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    monkeypatch.chdir(tmp_path / "there")
    with pytest.raises(ControlError, match="no `muster run`") as error:
        rerun.read_line()
    assert error.value.exit_code is CommandExit.REFUSED


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"words": 1}'])
def test_a_damaged_line_is_one_line(content: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    rerun.record_line(["run"])
    [path] = (tmp_path / "state").rglob("*.json")
    path.write_text(content)
    assert main(["rerun"]) == 1
    told = capsys.readouterr().err
    assert told.startswith("muster: the last ")
    assert told.count("\n") == 1


def test_a_run_is_recorded_and_a_dry_run_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--dryrun", "dist.ddp", "-j", "1x1", "--script", "main.py"]) == 0
    with pytest.raises(SystemExit, match="0"):
        main(["run", "dist.ddp", "--help-all"])
    assert main(["rerun"]) == 1
    assert main(["run", "-s", "no-such", "dist.ddp"]) == 2
    capsys.readouterr()
    assert main(["rerun"]) == 2
    assert capsys.readouterr().err.splitlines()[0].endswith("-s no-such dist.ddp")


def test_the_workspace_is_the_one_of_the_line(tmp_path: Path) -> None:
    assert find_workspace_folder(None) == os.getcwd()
    assert find_workspace_folder("") == os.getcwd()
    assert find_workspace_folder(f"file://{tmp_path}/there") == f"{tmp_path}/there"
    assert find_workspace_folder(f"{tmp_path}/there") == f"{tmp_path}/there"


@pytest.fixture
def files(tmp_path: Path) -> Iterator[WorkspaceWatch]:
    here = tmp_path / "here"
    (here / "data").mkdir()
    (here / "main.py").write_text("1")
    (here / "conf.yaml").write_text("1")
    (here / "data" / "big.bin").write_text("1")
    (here / ".torchxignore").write_text("data/\n*.log\n")
    with WorkspaceWatch(here) as made:
        made.begin_run()
        yield made


def change(name: str, text: str = "changed") -> None:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_name(f"{path.name}~").write_text(text)
    path.with_name(f"{path.name}~").replace(path)  # as editors do it


def test_a_change_of_what_travels_is_seen(files: WorkspaceWatch) -> None:
    assert not files.wait(0.0)
    change("main.py")
    assert files.wait(5.0)
    assert files.find_changes(is_running=True) == ["main.py"]
    change("conf.yaml")
    assert files.find_changes(is_running=True) == ["conf.yaml", "main.py"]
    files.begin_run()
    assert files.find_changes(is_running=True) == []
    os.unlink("conf.yaml")
    assert files.wait(5.0)
    assert files.find_changes(is_running=True) == ["conf.yaml"]
    files.begin_run()
    os.utime("main.py", (1, 1))
    assert files.wait(5.0)
    assert files.find_changes(is_running=False) == ["main.py"]


def test_what_does_not_travel_and_what_tools_write_is_no_change(files: WorkspaceWatch) -> None:
    names = ["data/big.bin", "x.log", ".git/index", ".env", "main.py~", ".main.py.swp", ".#main.py", "4913"]
    names += ["__pycache__/main.cpython-311.pyc", "pkg/__pycache__/a.pyc"]
    for name in names:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text("new")
    assert files.find_changes(is_running=False) == []


def test_what_a_run_writes_does_not_end_it(files: WorkspaceWatch) -> None:
    Path("out.txt").write_text("1")
    assert files.find_changes(is_running=True) == []
    Path("out.txt").write_text("12")
    assert files.find_changes(is_running=True) == []
    files.begin_run()
    Path("out.txt").write_text("123")
    assert files.find_changes(is_running=False) == [], "it is the output of a run"
    Path("new.py").write_text("1")
    assert files.find_changes(is_running=True) == ["new.py"], "it is source"
    files.begin_run()
    Path("other.txt").write_text("1")
    assert files.find_changes(is_running=False) == ["other.txt"], "no run has written it"


def test_a_new_folder_is_followed(files: WorkspaceWatch) -> None:
    Path("package").mkdir()
    assert files.wait(5.0)
    assert files.find_changes(is_running=True) == []
    Path("package", "part.py").write_text("1")
    assert files.wait(5.0)
    assert files.find_changes(is_running=True) == ["package/part.py"]


def test_a_file_that_each_run_writes_is_not_watched_after_three(files: WorkspaceWatch) -> None:
    for number in range(3):
        change("conf.yaml", f"written by run {number}")
        assert files.find_changes(is_running=True) == ["conf.yaml"]
        assert files.end_run("conf.yaml") == ("conf.yaml" if number == 2 else "")
        files.begin_run()
    change("conf.yaml", "again")
    assert files.find_changes(is_running=True) == []
    for number in range(4):
        change("main.py", f"typed {number}")
        assert files.find_changes(is_running=True) == ["main.py"]
        assert files.end_run("main.py") == "", "a program does not write itself"
        files.begin_run()


def test_changes_in_words() -> None:
    assert describe_changes(["a.py"]) == "a.py has changed"
    assert describe_changes(["a.py", "b", "c"]).endswith(", and 2 more")
    assert not is_temporary("main.py")


def test_which_jobs_may_outlive_their_command() -> None:
    handles = {"local_cwd://torchx/a": False, "local_held://torchx/a": False, "held://torchx/a": True}
    handles |= {"kubernetes://torchx/ns:a": True, "another://torchx/a": True, "": False}
    assert {handle: rerun.may_outlive_command(handle) for handle in handles} == handles
