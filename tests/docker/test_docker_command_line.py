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

COMMAND = "trap 'echo asked; exit 3' TERM; echo begun; while :; do sleep 0.1; done"


@pytest.fixture
def torchx(state_home, tmp_path, apps):
    """Starts `torchx` in an empty folder; kills what is left of it."""
    started = []

    def start(*words, program=None):
        command = [*(program or [Path(sys.executable).with_name("torchx")]), *words]
        env = {**os.environ, "TORCHX_CONFIG": "", "PYTHONWARNINGS": "", "PYTHONUNBUFFERED": "1"}  # the handle is read
        process = subprocess.Popen(
            command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def shell(scheduler, command=COMMAND):
    return (
        "run",
        "-s",
        scheduler,
        "--workspace",
        "",
        "utils.sh",
        "--image",
        "muster-test:bare",
        "exec",
        "sh",
        "-c",
        command,
    )


def begin(torchx, apps, wait_until, scheduler, command=COMMAND):
    """Start an app; returns once the command line waits for it and the app has printed something."""
    process = torchx(*shell(scheduler, command))
    app_id = process.stdout.readline().strip().rsplit("/", 1)[-1]
    apps.ids.append(app_id)
    wait_until(lambda: apps.logs(app_id, role="sh"), "output")
    return process, app_id


def test_interrupt_stops_politely(torchx, apps, wait_until):
    process, app_id = begin(torchx, apps, wait_until, "local_docker")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert "Traceback" not in err, err
    assert apps.status(app_id).state == AppState.CANCELLED
    assert apps.logs(app_id, role="sh") == ["begun\n", "asked\n"]


def test_second_interrupt_kills(torchx, apps, wait_until):
    stubborn = "trap 'echo asked' TERM; echo begun; while :; do sleep 0.1; done"
    process, app_id = begin(torchx, apps, wait_until, "local_docker", stubborn)
    process.send_signal(signal.SIGINT)
    wait_until(lambda: "asked\n" in apps.logs(app_id, role="sh"), "polite signal")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=25)  # the grace period is 30 s
    assert "Traceback" not in err, err
    assert apps.status(app_id).state == AppState.CANCELLED


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_nothing_runs_after_a_killed_command(torchx, apps, wait_until, signum):
    process, app_id = begin(torchx, apps, wait_until, "local_docker")
    process.send_signal(signum)
    process.communicate(timeout=60)
    assert apps.wait(app_id).state == AppState.CANCELLED
    assert apps.containers(app_id, every=False) == []


def test_detached_app_stays(torchx, apps, wait_until):
    process, app_id = begin(torchx, apps, wait_until, "docker")
    process.communicate(timeout=60)
    assert process.returncode == 0
    assert apps.status(app_id).state == AppState.RUNNING


@pytest.fixture
def list_running(client, state_home):
    """Lists the running containers of this test's commands."""
    label = f"io.muster.state_dir={state_home / 'muster'}"
    return lambda: client.containers.list(filters={"label": label}, ignore_removed=True)


def test_interrupted_submission_leaves_nothing(torchx, apps, wait_until, list_running):
    process = torchx(*shell("local_docker"))
    (found,) = wait_until(list_running, "a container")
    apps.ids.append(found.labels["io.muster.app"])
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    status = apps.status(apps.ids[0])
    assert status is None or status.state == AppState.CANCELLED  # it may just have been through
    assert apps.containers(apps.ids[0], every=False) == []


@pytest.mark.parametrize("function", ["ensure_images", "create_app", "now_s", "read_words"])
def test_ctrl_c_is_kept_while_a_response_ends(torchx, apps, list_running, function):
    """Python drops the exception there: the command went on as if there had been no Ctrl-C."""
    program = [sys.executable, Path(__file__).parents[1] / "programs" / "torchx_interrupted.py", function]
    process = torchx(*shell("local_docker"), program=program)
    out, err = process.communicate(timeout=60)
    if handle := out.strip():  # it came while the command waited
        apps.ids.append(handle.rsplit("/", 1)[-1])
        assert apps.status(apps.ids[0]).state == AppState.CANCELLED
    assert process.returncode == -signal.SIGINT, err
    assert list_running() == []


@pytest.mark.parametrize(
    "moment", ["muster.schedulers.supervision.client:submit", "muster.schedulers.docker.live.submissions:Mark.remove"]
)
def test_ctrl_c_at_the_end_of_a_submission(torchx, apps, state_home, list_running, moment):
    """The app was nobody's then: the command ended before it, and its supervisor ended it later."""
    program = [sys.executable, Path(__file__).parents[1] / "programs" / "torchx_interrupted_after.py", moment]
    process = torchx(*shell("local_docker"), program=program)
    _, err = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT, err
    apps.ids.extend(AppRegistry(state_home / "muster", "docker"))
    # Nothing is left of what was still being submitted.
    assert [apps.status(app_id).state for app_id in apps.ids] in ([], [AppState.CANCELLED])
    assert list_running() == []


def test_console_shows_the_logs_and_the_exit_code(torchx, apps):
    process = torchx(*shell("local_docker", "echo to the console; exit 5"))
    out, err = process.communicate(timeout=60)
    apps.ids.append(out.strip().rsplit("/", 1)[-1])
    assert process.returncode == 1
    assert "to the console" in err
    assert "sh/0 exited with code 5" in err


def test_dry_run_needs_no_engine(torchx, monkeypatch):
    monkeypatch.setenv("DOCKER_HOST", "unix:///no/engine")
    words = shell("local_docker", "true")
    process = torchx("run", "--dryrun", *words[1:])
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "image: muster-test:bare" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("-cfg", "shm_size=lots"), "shm_size='lots'"),
        (("-cfg", "sham=1"), "no option 'sham'"),
    ],
)
def test_mistakes_are_one_line(torchx, words, message):
    run, *rest = shell("local_docker", "true")
    process = torchx(run, *rest[:2], *words, *rest[2:])
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert message in err
    assert "Traceback" not in err, err


def test_no_engine_is_one_line(torchx, monkeypatch):
    monkeypatch.setenv("DOCKER_HOST", "unix:///no/engine")
    process = torchx(*shell("local_docker", "true"))
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "no Docker engine answers at unix:///no/engine" in err
    assert "Traceback" not in err, err
