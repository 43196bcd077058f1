"""Today's code serves the jobs of `ssh` that version 502c44e left; see tests/golden."""

import os

import golden_state
import pytest
from torchx.runner import Runner, get_runner
from torchx.specs import AppState

from muster.cli import operations

pytestmark = pytest.mark.torchx

STATES = {"succeeded": "SUCCEEDED", "failed": "FAILED", "cancelled": "CANCELLED", "running": "UNKNOWN"}


@pytest.fixture
def runner():
    with get_runner() as made:
        yield made


@pytest.fixture
def state(tmp_path, monkeypatch):
    folder, work = tmp_path / "state", tmp_path / "work"
    for each in (folder, work):
        each.mkdir()
    golden_state.restore("ssh", folder, work, data=golden_state.LATER)
    monkeypatch.setenv("XDG_STATE_HOME", str(folder))
    return folder


def folder_of(state, name):
    return state / "muster/logs/torchx" / f"{name}-golden"


def status(runner: Runner, name: str):
    return runner.status(f"ssh://torchx/{name}-golden")


def test_list_and_status(runner, state):
    listed = {app.app_id: app.state.name for app in runner._scheduler("ssh").list()}
    assert listed == {f"{name}-golden": state for name, state in STATES.items()}
    assert {name: status(runner, name).state.name for name in STATES} == STATES
    failed = status(runner, "failed")
    assert '"message": "ValueError: bad batch 17"' in failed.structured_error_msg
    assert status(runner, "cancelled").msg == "cancelled"
    assert "its supervisor was lost" in status(runner, "running").msg


def test_log_and_description(runner, state):
    (role,) = runner.describe("ssh://torchx/failed-golden").roles
    assert (role.num_replicas, role.max_retries, role.env) == (2, 2, {"LR": "0.1", "HF_TOKEN": "***"})
    lines = list(runner.log_lines("ssh://torchx/failed-golden", "trainer", 1))
    assert "rank 1 of 2, attempt 1: raise\n" in lines


def test_a_supervisor_of_that_version_is_told_in_its_words(runner, state):
    golden_state.edit(folder_of(state, "running") / ".muster/state.json", supervisor=golden_state.this_process())
    assert status(runner, "running").msg.startswith("attempt 0, 1 restart left; 2 of 2 nodes run")
    pipe = os.open(folder_of(state, "running") / ".muster/control", os.O_RDONLY | os.O_NONBLOCK)
    try:
        runner.cancel("ssh://torchx/running-golden")
        assert os.read(pipe, 4096) == b"cancel\n"
    finally:
        os.close(pipe)


def test_a_stop_ends_what_has_lost_its_supervisor(runner, state):
    assert operations.stop("running-golden").line.startswith("its supervisor was lost; the job is cancelled")
    assert status(runner, "running").state is AppState.CANCELLED


def test_delete(runner, state):
    for name in ("failed", "running"):
        runner._scheduler("ssh").delete(f"{name}-golden")
        assert not folder_of(state, name).exists()
        assert status(runner, name) is None
    assert status(runner, "succeeded").state is AppState.SUCCEEDED
