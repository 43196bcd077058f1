"""An app whose supervisor was killed: a look starts nothing, and `muster recover` continues it."""

import os
import re
import signal
from pathlib import Path

import pytest
from harness import wait_until
from torchx.runner import get_runner
from torchx.specs import AppDef, AppState, Resource, Role

from muster._shared.control import ControlError
from muster.cli import operations
from muster.schedulers.local import create_detached_scheduler
from muster.schedulers.supervision.registry import AppRegistry, find_state_dir

LOST = r".* \d{4}-\d\d-\d\d \d\d:\d\d:\d\d, .* 2 replicas .*; `muster recover .*"


@pytest.fixture
def runner(state_home):
    with get_runner() as made:
        yield made


def lose(runner):
    """Submit an app of two replicas without retries, and kill its supervisor; return its handle and its folder."""
    script = "echo up; until test -e go; do sleep 0.1; done"
    role = Role(name="r", image="", entrypoint="sh", args=["-c", script], num_replicas=2)
    role.resource = Resource(cpu=1, gpu=0, memMB=1)
    submitter = create_detached_scheduler("torchx")  # what has submitted an app starts a lost supervisor again
    app_id = submitter.submit(AppDef("app", roles=[role]), {})
    submitter.close()
    folder = AppRegistry(find_state_dir(os.environ), "detached").open(app_id)
    handle = f"detached://torchx/{app_id}"
    for index in range(2):
        wait_until(lambda k=index: list(runner.log_lines(handle, "r", k)) == ["up\n"], what="the replicas")
    record = folder.read_record()
    os.kill(record.supervisor.pid, signal.SIGKILL)
    ended = [record.supervisor.pid, *(each["pid"] for each in record.handles.values())]
    wait_until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in ended), what="the end of all processes")
    return handle, folder


def test_looking_reports_it_and_starts_nothing(runner):
    handle, folder = lose(runner)
    status = runner.status(handle)
    assert status.state == AppState.UNKNOWN
    assert re.fullmatch(LOST, status.msg)
    assert {each.state for role in status.roles for each in role.replicas} == {AppState.UNKNOWN}
    assert [each.state for each in runner._scheduler("detached").list()] == [AppState.UNKNOWN]
    assert list(runner.log_lines(handle, "r", 0, should_tail=True)) == ["up\n"]
    with pytest.raises(ControlError, match="supervisor was lost"):
        operations.checkpoint(handle)
    assert folder.log_file.read_text() == ""
    runner._scheduler("detached").delete(folder.path.name)
    assert runner.status(handle) is None
    assert not folder.path.exists()


def test_recover_continues_it_without_a_retry(runner, tmp_path: Path):
    handle, folder = lose(runner)
    assert ": 2 replicas started again" in operations.recover(handle).line
    with pytest.raises(ControlError, match="nothing was changed"):
        operations.recover(handle)
    assert runner.status(handle).state == AppState.RUNNING
    (tmp_path / "go").touch()
    assert "by `muster recover`" in runner.status(handle).msg
    wait_until(lambda: runner.status(handle).state == AppState.SUCCEEDED, what="the end")
    assert list(runner.log_lines(handle, "r", 0)) == ["up\n", "up\n"]
    assert not folder.private_file.exists()
    with pytest.raises(ControlError, match="has ended already"):
        operations.recover(handle)


def test_a_stop_ends_it_and_starts_nothing(runner):
    handle, _ = lose(runner)
    assert "job is cancelled" in operations.stop(handle).line
    assert runner.status(handle).state == AppState.CANCELLED
    assert list(runner.log_lines(handle, "r", 0)) == ["up\n"]
