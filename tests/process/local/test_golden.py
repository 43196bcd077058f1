"""Today's code serves the jobs of `local_cwd` and `detached` that version 19df633 left; see tests/golden."""

import os
import re
import shutil
from datetime import datetime, timedelta
from pathlib import Path

import golden_state
import pytest
from harness import wait_until
from torchx.runner import Runner, get_runner
from torchx.schedulers.api import Stream
from torchx.specs import AppState, Resource, RetryPolicy, Role

from muster._shared.control import ControlError
from muster.cli import operations

pytestmark = pytest.mark.torchx

ENDED = ("succeeded-golden", "failed-golden", "cancelled-golden")
AGENT = ["-m", "muster.agent", "--nnodes", "2", "--nproc-per-node", "1", "--rank0-env", "${rank0_env}"]
AGENT += ["--node-rank", "${replica_id}", "--rdzv-id", "${app_id}"]
METADATA = {"team": "vision"}
TINY = Resource(cpu=1, gpu=0, memMB=128)


@pytest.fixture
def runner():
    with get_runner() as made:
        yield made


@pytest.fixture
def state(tmp_path, monkeypatch):
    folder = tmp_path / "state"
    folder.mkdir()
    monkeypatch.setenv("XDG_STATE_HOME", str(folder))
    return folder


@pytest.fixture
def work(tmp_path):
    folder = tmp_path / "work"
    folder.mkdir()
    shutil.copy(golden_state.GOLDEN / "train.py", folder)
    return folder


def detached(app_id: str) -> str:
    return f"detached://torchx/{app_id}"


def folder_of(state: Path, app_id: str) -> Path:
    return state / "muster/logs/torchx" / app_id


def wait_for(runner: Runner, handle: str, wanted: AppState) -> None:
    wait_until(lambda: runner.status(handle).state == wanted, timeout_s=60, what=f"{handle} {wanted.name}")


class TestEnded:
    @pytest.fixture(autouse=True)
    def _restored(self, state, work):
        golden_state.restore("local_cwd", state, work, apps=ENDED)

    def test_list(self, runner):
        assert {app.app_id: app.state for app in runner._scheduler("detached").list()} == {
            "succeeded-golden": AppState.SUCCEEDED,
            "failed-golden": AppState.FAILED,
            "cancelled-golden": AppState.CANCELLED,
        }
        assert runner._scheduler("local_cwd").list() == []

    def test_status(self, runner, state):
        succeeded = runner.status(detached("succeeded-golden"))
        assert (succeeded.state, succeeded.num_restarts, succeeded.msg) == (AppState.SUCCEEDED, 0, "<NONE>")
        assert succeeded.ui_url == f"file://{state}/muster/logs/torchx/succeeded-golden"
        assert [(role.role, [each.state for each in role.replicas]) for role in succeeded.roles] == [
            ("trainer", [AppState.SUCCEEDED, AppState.SUCCEEDED])
        ]
        cancelled = runner.status(detached("cancelled-golden"))
        assert (cancelled.state, cancelled.msg) == (AppState.CANCELLED, "cancelled")

    def test_status_names_the_root_cause(self, runner):
        failed = runner.status(detached("failed-golden"))
        assert failed.state == AppState.FAILED
        assert failed.msg == "trainer/0 exited with 1: its workers failed for good; see its log for the report"
        assert '"message": "ValueError: bad batch 17"' in failed.structured_error_msg
        assert [each.state for each in failed.roles[0].replicas] == [AppState.FAILED, AppState.FAILED]

    def test_describe(self, runner):
        (role,) = runner.describe(detached("failed-golden")).roles
        assert role == Role(
            name="trainer",
            image="",
            entrypoint="python3",
            args=[*AGENT, "--start", "cold", "--max-restarts", "1", "train.py", "raise"],
            env={"LR": "0.1", "HF_TOKEN": "***"},
            num_replicas=2,
            max_retries=2,
            resource=TINY,
        )
        response = runner._scheduler("detached").describe("failed-golden")
        assert getattr(response, "metadata", METADATA) == METADATA  # 0.7 has no room for it

    def test_log(self, runner):
        handle = detached("cancelled-golden")
        assert sorted(runner.log_lines(handle, "side", 1)) == ["careful\n", "working\n"]
        assert list(runner.log_lines(handle, "side", 1, streams=Stream.STDERR)) == ["careful\n"]
        assert list(runner.log_lines(handle, "side", 0, regex="work", should_tail=True)) == ["working\n"]
        assert "rank 1 of 2, attempt 1: raise\n" in list(runner.log_lines(detached("failed-golden"), "trainer", 1))

    def test_log_of_a_time(self, runner, state):
        """`combined.times` says when."""
        handle = detached("succeeded-golden")
        ended = (folder_of(state, "succeeded-golden") / "state.json").read_text()
        ended_s = float(ended.partition('"ended_s": ')[2].split("\n")[0])
        end = datetime.fromtimestamp(ended_s)  # noqa: DTZ006 - TorchX passes naive local times
        assert list(runner.log_lines(handle, "trainer", 0, since=end)) == []
        assert list(runner.log_lines(handle, "trainer", 0, until=end)) == ["rank 0 of 2, attempt 0: done\n"]
        assert list(runner.log_lines(handle, "trainer", 0, until=end - timedelta(minutes=1))) == []

    def test_log_between_two_attempts(self, runner):
        between = datetime.fromtimestamp(1795329454.19)  # noqa: DTZ006 - as above; read from `stdout.times`
        lines = runner.log_lines(detached("failed-golden"), "trainer", 1, since=between, streams=Stream.STDOUT)
        assert list(lines) == ["rank 1 of 2, attempt 1: raise\n"]
        lines = runner.log_lines(detached("failed-golden"), "trainer", 1, until=between, streams=Stream.STDOUT)
        assert list(lines) == ["rank 1 of 2, attempt 0: raise\n"]

    def test_cancel_changes_nothing(self, runner):
        runner.cancel(detached("succeeded-golden"))
        assert runner.status(detached("succeeded-golden")).state == AppState.SUCCEEDED

    def test_delete(self, runner, state):
        runner._scheduler("detached").delete("failed-golden")
        assert not folder_of(state, "failed-golden").exists()
        assert not (state / "muster/detached/failed-golden").is_symlink()
        assert runner.status(detached("failed-golden")) is None
        assert runner.status(detached("succeeded-golden")).state == AppState.SUCCEEDED


class TestSupervisorOfThatVersionStillRuns:
    """It is this process, as far as the folder says: nothing may be started, and it must be asked in its own words."""

    @pytest.fixture(autouse=True)
    def _restored(self, state, work):
        golden_state.restore("local_cwd", state, work, apps=["running-golden"])
        golden_state.edit(folder_of(state, "running-golden") / "state.json", supervisor=golden_state.this_process())

    def test_status(self, runner, state):
        status = runner.status(detached("running-golden"))
        assert (status.state, status.num_restarts) == (AppState.RUNNING, 0)
        told = r"attempt 0, 1 restart left; 3 of 3 nodes run; since 20\d\d-\d\d-\d\d \d\d:\d\d"
        assert re.fullmatch(told, status.msg)
        assert {role.role: [each.state for each in role.replicas] for role in status.roles} == {
            "trainer": [AppState.RUNNING, AppState.RUNNING],
            "side": [AppState.RUNNING],
        }
        assert (folder_of(state, "running-golden") / "supervisor.log").read_text() == ""

    def test_describe(self, runner):
        trainer, side = runner.describe(detached("running-golden")).roles
        assert (trainer.num_replicas, trainer.max_retries, trainer.args[-2:]) == (2, 2, ["train.py", "wait"])
        assert side == Role(
            name="side",
            image="",
            entrypoint="sh",
            args=["-c", "echo beside; test -e go || sleep 1000"],
            max_retries=1,
            retry_policy=RetryPolicy.REPLICA,
            resource=TINY,
        )

    def test_cancel_is_said_in_its_words(self, runner, state):
        folder = folder_of(state, "running-golden")
        pipe = os.open(folder / "control", os.O_RDONLY | os.O_NONBLOCK)
        try:
            runner.cancel(detached("running-golden"))
            assert os.read(pipe, 4096) == b"cancel\n"
        finally:
            os.close(pipe)
        assert (folder / "stop.request").read_text() == "cancel"


WHERE = ({}, {"BOOT": "the boot before"}, {"HOST": "before"})
"""The same machine, after a reboot, under another host name."""


class TestSupervisorDied:
    @pytest.mark.parametrize("where", WHERE, ids=["here", "rebooted", "renamed"])
    def test_looking_reports_it_and_starts_nothing(self, runner, state, work, where):
        golden_state.restore("local_cwd", state, work, apps=["running-golden"], **where)
        handle = detached("running-golden")
        status = runner.status(handle)
        assert status.state == AppState.UNKNOWN
        assert re.fullmatch(
            r"its supervisor was lost after \d{4}-\d\d-\d\d \d\d:\d\d:\d\d, when 3 replicas ran; "
            "`muster recover running-golden` continues it",
            status.msg,
        )
        assert {each.state for role in status.roles for each in role.replicas} == {AppState.UNKNOWN}
        (listed,) = runner._scheduler("detached").list()
        assert (listed.app_id, listed.state) == ("running-golden", AppState.UNKNOWN)
        assert list(runner.log_lines(handle, "side", 0, should_tail=True)) == ["beside\n"]
        with pytest.raises(ControlError, match="running-golden: its supervisor was lost"):
            operations.checkpoint(handle)
        assert (folder_of(state, "running-golden") / "supervisor.log").read_text() == ""

    def test_recover_continues_it(self, runner, state, work):
        golden_state.restore("local_cwd", state, work, apps=["running-golden"], BOOT="the boot before")
        handle = detached("running-golden")
        (work / "go").touch()
        answer = operations.recover("running-golden")
        assert answer.line == "running-golden goes on: 3 replicas started again, 0 still ran"
        assert runner.status(handle).msg.startswith("its supervisor was lost; continued by `muster recover`")
        wait_for(runner, handle, AppState.SUCCEEDED)
        again = "rank 0 of 2, attempt 0: wait\n"
        *lines, last = runner.log_lines(handle, "trainer", 0)
        assert [line for line in lines if not line.startswith("[muster] ")] == [again, again]
        assert last.startswith("[muster] succeeded after ")
        assert list(runner.log_lines(handle, "side", 0)) == ["beside\n", "beside\n"]
        assert not (folder_of(state, "running-golden") / "private.json").exists()
        with pytest.raises(ControlError, match="has ended already"):
            operations.recover("running-golden")

    def test_recover_needs_no_retries_and_no_owner(self, runner, state, work):
        golden_state.restore("local_cwd", state, work, apps=["owned-golden"])
        handle = "local_cwd://torchx/owned-golden"
        assert operations.recover(handle).line == "owned-golden goes on: 1 replica started again, 0 still ran"
        assert runner.status(handle).state == AppState.RUNNING
        with pytest.raises(ControlError, match="owned-golden has a supervisor, which runs: nothing was changed"):
            operations.recover(handle)
        runner.cancel(handle)
        wait_for(runner, handle, AppState.CANCELLED)

    def test_what_waits_starts_it_again(self, runner, state, work):
        golden_state.restore("local_cwd", state, work, apps=["running-golden"])
        (work / "go").touch()
        status = runner.wait(detached("running-golden"), wait_interval=0.2)
        assert (status.state, status.num_restarts) == (AppState.SUCCEEDED, 3)  # every replica once

    def test_a_stop_ends_it(self, runner, state, work):
        golden_state.restore("local_cwd", state, work, apps=["running-golden"])
        answer = operations.stop("running-golden")
        assert answer.line.startswith("its supervisor was lost; the job is cancelled")
        assert runner.status(detached("running-golden")).state == AppState.CANCELLED
        assert list(runner.log_lines(detached("running-golden"), "side", 0)) == ["beside\n"]

    def test_what_was_asked_of_it_is_done(self, runner, state, work):
        golden_state.restore("local_cwd", state, work, apps=["running-golden"])
        runner.cancel(detached("running-golden"))
        wait_for(runner, detached("running-golden"), AppState.CANCELLED)
        assert list(runner.log_lines(detached("running-golden"), "side", 0)) == ["beside\n"], "nothing was started"

    def test_delete(self, runner, state, work):
        golden_state.restore("local_cwd", state, work, apps=["running-golden"])
        runner._scheduler("detached").delete("running-golden")
        assert runner.status(detached("running-golden")) is None
        assert not folder_of(state, "running-golden").exists()

    def test_the_owner_has_ended_too(self, runner, state, work):
        golden_state.restore("local_cwd", state, work, apps=["owned-golden"])
        handle = "local_cwd://torchx/owned-golden"
        assert runner.status(handle).state == AppState.UNKNOWN
        assert runner.wait(handle, wait_interval=0.2).state == AppState.CANCELLED
        assert "the command that started it (pid 41000" in runner.status(handle).msg

    def test_without_retries_the_app_has_failed(self, runner, state, work):
        golden_state.restore("local_cwd", state, work, apps=["owned-golden"])
        golden_state.edit(folder_of(state, "owned-golden") / "spec.json", owner=golden_state.this_process())
        handle = "local_cwd://torchx/owned-golden"
        status = runner.wait(handle, wait_interval=0.2)
        assert status.state == AppState.FAILED
        assert status.msg == "side/0 vanished (its supervisor had died); no retries by the scheduler (--max_retries 0)"
        assert list(runner.log_lines(handle, "side", 0)) == ["up\n"]


def test_a_shared_folder_of_another_machine_is_only_read(runner, state, work):
    golden_state.restore("local_cwd", state, work, apps=["running-golden"], HOST="elsewhere", BOOT="another")
    status = runner.status(detached("running-golden"))
    assert status.state == AppState.RUNNING
    assert {each.hostname for role in status.roles for each in role.replicas} == {"elsewhere"}
    assert (folder_of(state, "running-golden") / "supervisor.log").read_text() == ""
