"""Today's code serves the holds that version 6c89ce3 left, and the runs on them; see tests/golden."""

import contextlib
import fcntl
import os
import re
from collections.abc import Iterator
from pathlib import Path

import golden_state
import pytest
from torchx.runner import Runner, get_runner
from torchx.specs import AppState

from muster._shared.holds import default as default_hold
from muster._shared.holds.connection import listen
from muster.cli import default_hold_command
from muster.cli.overview import read_app
from muster.schedulers.errors import EngineError, SchedulerError
from muster.schedulers.held import holds
from muster.schedulers.held.lending import lend_node

pytestmark = pytest.mark.torchx

BUSY, IDLE, THERE = "local_cwd://busy-golden", "local_cwd://idle-golden", "ssh://there-golden"
RUNS = {"succeeded": "SUCCEEDED", "failed": "FAILED", "carried": "SUCCEEDED", "running": "UNKNOWN"}


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder, work = tmp_path / "state", tmp_path / "work"
    for each in (folder, work):
        each.mkdir()
    golden_state.restore("holds", folder, work, data=golden_state.HOLDS)
    monkeypatch.setenv("XDG_STATE_HOME", str(folder))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder / "run"))
    return folder


@pytest.fixture
def supervised(state: Path) -> Path:
    """The supervisors of all that runs are this process."""
    for name in ("busy", "idle", "there", "running"):
        golden_state.edit(folder_of(state, name) / ".muster/state.json", supervisor=golden_state.this_process())
    return state


@pytest.fixture
def runner() -> Iterator[Runner]:
    with get_runner() as made:
        yield made


def folder_of(state: Path, name: str) -> Path:
    return state / "muster/logs/torchx" / f"{name}-golden"


def status(runner: Runner, name: str):
    return runner.status(f"held://torchx/{name}-golden")


@contextlib.contextmanager
def locked(state: Path) -> Iterator[None]:
    """The hold `busy`, as the supervisor of its run has it."""
    with (folder_of(state, "busy") / ".muster/hold.lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def test_the_index_names_holds_that_go_on(supervised: Path) -> None:
    found = {each.handle: each for each in holds.find_all(supervised / "muster")}
    assert {handle: (each.nodes, each.find_run()) for handle, each in found.items() if handle != THERE} == {
        BUSY: (2, ""),
        IDLE: (2, ""),
    }
    there = found[THERE]
    assert isinstance(there, holds.RemoteHold)
    assert (there.role, there.nodes, there.processes, there.version) == ("hold", 2, 1, "0.1.0")
    assert there.shares_folders is False
    assert sorted(os.listdir(supervised / "muster/holds"))[-3:] == ["busy-golden", "idle-golden", "there-golden"]


def test_what_holders_have_told_is_read(supervised: Path) -> None:
    told = next(iter(read_app(IDLE)[1].messages))
    assert re.fullmatch(r"held: idle for .+, ends after 1 h 30 min without a run", told), told
    (idle,) = [each for each in holds.find_all(supervised / "muster") if each.handle == IDLE]
    assert [state["nproc"] for state in idle.read_states()] == [1, 1]
    assert [Path(each).is_dir() for each in idle.list_folders()] == [True, True]


def test_a_run_that_goes_on_has_its_hold(supervised: Path) -> None:
    with locked(supervised):
        assert next(iter(read_app(BUSY)[1].messages)) == "held: it runs running-golden"
        with pytest.raises(EngineError, match=f"^{BUSY} runs running-golden now$"):
            lend_node("busy", "a job", 1)
    lent = lend_node("busy", "a job", 1)
    assert lent.folder == str(next(folder_of(supervised, "busy").glob("*/hold-0")))
    os.close(lent.lock_fd)
    with pytest.raises(SchedulerError, match=r"nproc=2: local_cwd://busy-golden holds at most 1"):
        lend_node("busy", "a job", 2)


def test_holds_without_supervisor_are_no_choice_and_are_not_forgotten(state: Path) -> None:
    assert holds.find_all(state / "muster") == []
    with pytest.raises(SchedulerError, match=r"^nothing is held here"):
        holds.choose_hold(state / "muster", None)
    with pytest.raises(EngineError, match=f"^{THERE}: its supervisor was lost"):
        holds.choose_hold(state / "muster", THERE)
    assert {name for name, _ in holds.local.list_entries(state / "muster")} == {
        "busy-golden",
        "idle-golden",
        "there-golden",
    }


def test_a_hold_ends_by_the_words_of_its_supervisor(runner: Runner, supervised: Path) -> None:
    for scheduler, name in (("local_cwd", "idle"), ("ssh", "there")):
        pipe = os.open(folder_of(supervised, name) / ".muster/control", os.O_RDONLY | os.O_NONBLOCK)
        try:
            runner.cancel(f"{scheduler}://torchx/{name}-golden")
            assert os.read(pipe, 4096) == b"cancel\n"
        finally:
            os.close(pipe)


def test_runs_are_apps(runner: Runner, state: Path) -> None:
    assert {name: status(runner, name).state.name for name in RUNS} == RUNS
    listed = {app.app_id: app.state.name for app in runner._scheduler("held").list()}
    assert listed == {f"{name}-golden": state for name, state in RUNS.items()}
    assert '"message": "ValueError: bad batch 17"' in status(runner, "failed").structured_error_msg
    assert "its supervisor was lost" in status(runner, "running").msg
    for name in ("succeeded", "carried"):
        lines = list(runner.log_lines(f"held://torchx/{name}-golden", "train", 1))
        assert any("rank 1 of 2, attempt 0: done\n" in line for line in lines), lines


def test_a_run_is_deleted(runner: Runner, state: Path) -> None:
    for name in RUNS:
        runner._scheduler("held").delete(f"{name}-golden")
        assert not folder_of(state, name).exists()
        assert status(runner, name) is None
    assert runner.status("local_cwd://torchx/released-golden").state is AppState.CANCELLED


def test_the_default_hold_is_wanted_and_told(state: Path) -> None:
    assert default_hold.read_idle_limit_s(os.environ) == 1800
    assert default_hold_command.describe() == [
        "default hold: on; the next job of local_cwd or muster-agent starts it, it ends after 30 min without one"
    ]
    (folder,) = default_hold.list_folders(os.environ)
    with listen(folder):
        (line,) = default_hold_command.describe()
    assert re.fullmatch(
        r"default hold: on; 1 agent waits, idle for .+; it ends after 30 min without a job \(.+\)", line
    )
    default_hold_command.switch_off()
    assert [*(state / "run").iterdir()] == []
    assert default_hold_command.build_facts()["is_on"] is False
