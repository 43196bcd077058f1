"""torchx on the command line: what ends with it, what stays, what it prints."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from torchx.specs import AppState

from muster.schedulers.supervision.registry import AppRegistry

pytestmark = pytest.mark.docker

PROGRAMS = Path(__file__).parents[1] / "programs"
COMMAND = "trap 'echo asked' TERM; echo begun; while :; do sleep 0.1; done"


@pytest.fixture
def torchx(state_home, tmp_path, apps):
    """Starts `torchx run` in an empty folder; kills what is left of it."""
    started = []

    def start(*, command=COMMAND, program=("-m", "torchx.cli.main")):
        words = ["run", "-s", "local_docker", "--workspace", ""]
        words += ["utils.sh", "--image", "muster-test:bare", "exec", "sh", "-c", command]
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


@pytest.fixture
def begin(torchx, apps, wait_until):
    """Starts an app, until the command line waits for it and the app has printed something."""

    def start():
        process = torchx()
        app_id = process.stdout.readline().strip().rsplit("/", 1)[-1]
        apps.ids.append(app_id)
        wait_until(lambda: apps.logs(app_id, role="sh"), "output")
        return process, app_id

    return start


def test_an_interrupt_stops_politely_and_a_second_one_kills(begin, apps, wait_until):
    process, app_id = begin()
    process.send_signal(signal.SIGINT)
    wait_until(lambda: "asked\n" in apps.logs(app_id, role="sh"), "polite signal")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=25)  # the grace period is 30 s
    assert "Traceback" not in err, err
    assert apps.status(app_id).state == AppState.CANCELLED


def test_nothing_runs_after_a_killed_command(begin, apps):
    process, app_id = begin()
    process.kill()
    process.communicate(timeout=200)
    assert apps.wait(app_id).state == AppState.CANCELLED
    assert apps.containers(app_id, every=False) == []


@pytest.mark.torchx
@pytest.mark.parametrize(
    "function",
    ["create_app", *(pytest.param(each, marks=pytest.mark.long) for each in ("now_s", "ensure_images", "read_words"))],
)
def test_ctrl_c_is_kept_while_a_response_ends(torchx, apps, list_running, function):
    """Python drops the exception there: the command went on as if there had been no Ctrl-C."""
    process = torchx(program=(PROGRAMS / "torchx_interrupted.py", function))
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
    process = torchx(program=(PROGRAMS / "torchx_interrupted_after.py", moment))
    _, err = process.communicate(timeout=200)
    assert process.returncode == -signal.SIGINT, err
    apps.ids.extend(AppRegistry(state_home / "muster", "docker"))
    # Nothing is left of what was still being submitted.
    assert [apps.status(app_id).state for app_id in apps.ids] in ([], [AppState.CANCELLED])
    assert list_running() == []


@pytest.mark.torchx
def test_console_shows_the_logs_and_the_exit_code(torchx, apps):
    process = torchx(command="echo to the console; exit 5")
    out, err = process.communicate(timeout=200)
    apps.ids.append(out.strip().rsplit("/", 1)[-1])
    assert process.returncode == 1
    assert "to the console" in err
    assert "sh/0 exited with code 5" in err


def test_no_engine_is_one_line(torchx, monkeypatch):
    monkeypatch.setenv("DOCKER_HOST", "unix:///no/engine")
    process = torchx(command="true")
    _, err = process.communicate(timeout=200)
    assert process.returncode == 1
    assert "answers at unix:///no/engine" in err
    assert "Traceback" not in err, err
