"""Ctrl-C while torchx on the command line waits for the engine."""

import os
import signal
import subprocess
import sys

import pytest
from harness import PROGRAMS
from torchx.specs import AppState

from muster.schedulers.supervision.registry import AppRegistry

pytestmark = pytest.mark.docker

COMMAND = "trap 'echo asked' TERM; echo begun; while :; do sleep 0.1; done"


@pytest.fixture
def torchx(state_home, tmp_path, apps):
    """Starts `torchx run` in an empty folder; kills what is left of it."""
    started = []

    def start(*program):
        words = ["run", "-s", "local_docker", "--workspace", ""]
        words += ["utils.sh", "--image", "muster-test:bare", "exec", "sh", "-c", COMMAND]
        env = {**os.environ, "TORCHX_CONFIG": "", "PYTHONWARNINGS": "", "PYTHONUNBUFFERED": "1"}  # the handle is read
        process = subprocess.Popen(
            [sys.executable, *program, *words],
            cwd=tmp_path,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def list_running(client, state_home):
    """Lists the running containers of this test's commands."""
    label = f"io.muster.state_dir={state_home / 'muster'}"
    return lambda: client.containers.list(filters={"label": label}, ignore_removed=True)


@pytest.mark.torchx
@pytest.mark.parametrize(
    "function",
    [
        "create_app",
        *(pytest.param(each, marks=pytest.mark.long) for each in ("now_s", "ensure_images", "read_reports")),
    ],
)
def test_ctrl_c_is_kept_while_a_response_ends(torchx, apps, list_running, function):
    """Python drops the exception there: the command went on as if there had been no Ctrl-C."""
    process = torchx(PROGRAMS / "torchx_interrupted.py", function)
    out, err = process.communicate(timeout=200)
    if handle := out.strip():  # it came while the command waited
        apps.ids.append(handle.rsplit("/", 1)[-1])
        assert apps.status(apps.ids[0]).state == AppState.CANCELLED
    assert process.returncode == -signal.SIGINT, err
    assert list_running() == []


@pytest.mark.long
@pytest.mark.parametrize(
    "moment",
    ["muster.schedulers.supervision.client:submit", "muster.schedulers.docker.running_apps.orphaned_apps:Mark.remove"],
)
def test_ctrl_c_at_the_end_of_a_submission(torchx, apps, state_home, list_running, moment):
    """The app was nobody's then: the command ended before it, and its supervisor ended it later."""
    process = torchx(PROGRAMS / "torchx_interrupted_after.py", moment)
    _, err = process.communicate(timeout=200)
    assert process.returncode == -signal.SIGINT, err
    apps.ids.extend(AppRegistry(state_home / "muster", "docker"))
    # Nothing is left of what was still being submitted.
    assert [apps.status(app_id).state for app_id in apps.ids] in ([], [AppState.CANCELLED])
    assert list_running() == []
