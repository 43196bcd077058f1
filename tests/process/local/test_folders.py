"""An app's folder: roles of any name beside the supervisor's state, and folders that an earlier version made."""

import os
import signal
import sys
from pathlib import Path

import pytest
from harness import run_tree, wait_until
from torchx.specs import AppDef, Resource, Role

from muster.schedulers.local import create_detached_scheduler, create_scheduler
from muster.schedulers.supervision.app_folder import AppFolder, AppSpec
from muster.schedulers.supervision.client import SupervisorError, start_supervisor
from muster.schedulers.supervision.registry import AppRegistry, find_state_dir

pytestmark = pytest.mark.torchx

TORCHX = str(Path(sys.executable).with_name("torchx"))
FILES = ("spec.json", "private.json", "state.json", "control", "stop.request", "lock", "supervisor.log")
TINY = Resource(cpu=1, gpu=0, memMB=1)


@pytest.fixture(autouse=True)
def state_home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    for name in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def scheduler():
    made = create_scheduler("torchx")
    yield made
    made.close()


@pytest.fixture
def detached():
    made = create_detached_scheduler("torchx")
    yield made
    for app in made.list():
        made.delete(app.app_id)
    made.close()


def shell(name, script):
    return Role(name=name, image="", entrypoint="sh", args=["-c", script], resource=TINY)


def folder_of(app_id, name):
    return AppFolder(AppRegistry(find_state_dir(os.environ), name).find(app_id))


def wait_for(scheduler, app_id, *states):
    wait_until(lambda: scheduler.describe(app_id).state.name in states, timeout_s=60, what=f"{app_id} being {states}")


def test_a_supervisor_without_a_log_says_why(tmp_path, capfd):
    """It wrote a traceback to the terminal, and the command said only that the log is empty."""
    spec = AppSpec(app_id="a", scheduler="s", folder=str(tmp_path / "a"), driver="none", roles=(), grace_s=1.0)
    folder = AppFolder(spec.folder)
    folder.create(spec)
    folder.log_file.mkdir()
    with pytest.raises(SupervisorError, match=rf"^the supervisor of a ended early: {folder.log_file}: Is a directory$"):
        start_supervisor(folder, spec)
    assert capfd.readouterr() == ("", "")


def test_roles_named_like_files_in_the_folder(scheduler):
    names = [*FILES, ".muster", "..muster", "muster-agent.zip", "torchelastic", "0"]
    roles = [shell(name, f"echo {name}; echo $PET_LOG_DIR") for name in names]
    app_id = scheduler.submit(AppDef("app", roles=roles), {})
    wait_for(scheduler, app_id, "SUCCEEDED", "FAILED")
    assert scheduler.describe(app_id).state.name == "SUCCEEDED"
    said = [list(scheduler.log_iter(app_id, name)) for name in names]
    assert [lines[0] for lines in said] == [f"{name}\n" for name in names]
    assert len({lines[1] for lines in said}) == len(names)
    folder = folder_of(app_id, "local_cwd")
    assert (folder.path / "lock" / "0" / "stdout.log").read_text().startswith("lock\n")
    scheduler.delete(app_id)
    assert not folder.path.exists()


@pytest.mark.parametrize("name", ["control", "lock"])
def test_a_script_named_like_a_file_of_the_supervisor(tmp_path, name):
    (tmp_path / f"{name}.py").write_text("print('it runs')\n")
    words = ["run", "-s", "local_cwd", "dist.ddp", "-j", "1x1", "--start", "cold", "--script", f"{name}.py"]
    outcome = run_tree([TORCHX, *words], cwd=tmp_path, timeout_s=120)
    assert outcome.exit_code == 0, outcome.explain()
    assert "it runs" in outcome.stderr, outcome.explain()


@pytest.fixture
def as_earlier(monkeypatch):
    """Submissions lay out the app's folder as versions before `.muster` did."""
    create = AppFolder.create

    def create_as_earlier(self, spec):
        create(self, spec)
        for file in self.state_dir.iterdir():
            file.rename(self.path / file.name)
        self.state_dir.rmdir()
        AppFolder.__init__(self, self.path)

    with monkeypatch.context() as patch:
        patch.setattr(AppFolder, "create", create_as_earlier)
        yield


class TestFoldersOfAnEarlierVersion:
    SCRIPT = "echo begun; while ! test -e go; do sleep 0.05; done; echo ended"

    @pytest.fixture
    def app_id(self, detached, as_earlier):
        app_id = detached.submit(AppDef("app", roles=[shell("r", self.SCRIPT)]), {"grace_s": 1.0})
        assert {path.name for path in folder_of(app_id, "detached").path.iterdir()} > {
            "spec.json",
            "state.json",
            "lock",
        }
        return app_id

    def test_it_goes_on_and_is_read_and_deleted(self, detached, app_id, tmp_path):
        assert detached.describe(app_id).state.name == "RUNNING"
        assert [app.app_id for app in detached.list()] == [app_id]
        lines = detached.log_iter(app_id, "r", should_tail=True)
        assert next(lines) == "begun\n"
        (tmp_path / "go").touch()
        assert list(lines) == ["ended\n"]
        assert detached.describe(app_id).state.name == "SUCCEEDED"
        folder = folder_of(app_id, "detached")
        assert not (folder.path / ".muster").exists()
        detached.delete(app_id)
        assert not folder.path.exists()
        assert detached.describe(app_id) is None

    def test_it_is_cancelled(self, detached, app_id):
        detached.cancel(app_id)
        wait_for(detached, app_id, "CANCELLED")

    def test_a_dead_supervisor_is_started_again(self, detached, app_id):
        supervisor = folder_of(app_id, "detached").read_record().supervisor
        os.kill(supervisor.pid, signal.SIGKILL)
        wait_until(lambda: not supervisor.is_alive(), what="the supervisor's end")
        wait_for(detached, app_id, "FAILED")  # what ran is lost with it, and there are no retries
        record = folder_of(app_id, "detached").read_record()
        assert record.supervisor != supervisor
        assert "its supervisor had died" in record.app.reason
