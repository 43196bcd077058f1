"""An app's folder: roles of any name beside the supervisor's state."""

import os

import pytest
from harness import wait_until
from torchx.specs import AppDef, Resource, Role

from muster.schedulers.local import create_scheduler
from muster.schedulers.supervision.app_folder import AppFolder, AppSpec
from muster.schedulers.supervision.client import SupervisorError, start_supervisor
from muster.schedulers.supervision.registry import AppRegistry, find_state_dir

FILES = ("spec.json", "private.json", "state.json", "control", "stop.request", "lock", "supervisor.log")
TINY = Resource(cpu=1, gpu=0, memMB=1)


pytestmark = pytest.mark.usefixtures("state_home")


@pytest.fixture
def scheduler():
    made = create_scheduler("torchx")
    yield made
    made.close()


def shell(name, script):
    return Role(name=name, image="", entrypoint="sh", args=["-c", script], resource=TINY)


def folder_of(app_id, name):
    return AppFolder(AppRegistry(find_state_dir(os.environ), name).find(app_id))


def wait_for(scheduler, app_id, *states):
    wait_until(lambda: scheduler.describe(app_id).state.name in states, what=f"{app_id} being {states}")


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
