"""The engine stops and starts while jobs run. Only an engine that .ci/docker-engine started is restarted."""

import os
import subprocess
from pathlib import Path

import pytest
from harness import ROOT
from torchx.specs import AppState

from muster.components import dist
from muster.schedulers.supervision.state import AppPhase

pytestmark = [pytest.mark.docker, pytest.mark.alone]

SCRIPT = ROOT / ".ci" / "docker-engine"
PID_FILE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "muster" / "dockerd.pid"


@pytest.fixture
def engine():
    """Stops, kills and starts our own engine."""
    try:
        pid = int(PID_FILE.read_text())
        ours = Path(f"/proc/{pid}/comm").read_text().strip() == "dockerd"
    except (OSError, ValueError):
        ours = False
    if not ours:
        pytest.skip("the engine was not started by .ci/docker-engine: it is not ours to restart")

    def control(word):
        subprocess.run([SCRIPT, word], check=True, timeout=150)

    yield control
    control("start")


def test_a_plain_app_survives_a_restart_of_the_engine(apps, app_of, engine, wait_until):
    """And its log is followed through it."""
    app_id = apps.run(app_of("hostname; sleep 600", replicas=2))
    lines = iter(apps.runner.log_lines(f"docker://test/{app_id}", "w", 1, should_tail=True))
    assert next(lines) == "w-1\n"
    engine("restart")
    wait_until(lambda: len(apps.containers(app_id, every=False)) == 2, "second start")
    status = apps.status(app_id)
    assert (status.state, status.num_restarts) == (AppState.RUNNING, 0), "a stop of the engine uses no retries"
    assert next(lines) == "w-1\n"
    apps.cancel(app_id)
    assert list(lines) == []


def test_job_of_agents_survives_a_killed_engine(apps, engine, wait_until):
    app = dist.ddp(script="docker_waits.py", j="2x1", image="muster-test:torch", name="job", start="cold")
    role = app.roles[0].name
    app_id = apps.run(app, workspace=str(ROOT / "tests" / "programs"))

    def formed():
        return sum("of 2" in line for line in apps.logs(app_id, role=role, replica=0))

    wait_until(formed, "first round")
    pid = int(PID_FILE.read_text())
    os.kill(pid, 9)
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), "end of the engine")
    engine("start")
    wait_until(lambda: formed() >= 2, "second round")
    assert apps.status(app_id).num_restarts == 0
    for container in apps.containers(app_id, every=False):
        container.exec_run(["sh", "-c", "mkdir -p /data && touch /data/go"])
    assert apps.wait(app_id).state == AppState.SUCCEEDED


def test_apps_are_cancelled_and_supervised_again_while_the_engine_is_down(apps, app_of, engine, wait_until):
    cancelled, adopted = (apps.run(app_of("sleep 600", replicas=2)) for _ in range(2))
    supervisor = apps.scheduler.find_folder(adopted).read_record().supervisor
    os.kill(supervisor.pid, 9)
    engine("stop")
    wait_until(lambda: not supervisor.is_alive(), "death of the supervisor")
    assert apps.status(adopted).state == AppState.RUNNING  # this starts another one
    folder = apps.scheduler.find_folder(cancelled)
    apps.cancel(cancelled)
    wait_until(lambda: folder.read_record().app.phase is AppPhase.ENDING, "the request")
    status = apps.status(cancelled)
    assert (status.state, "no Docker engine " in status.msg) == (AppState.RUNNING, True), status.msg
    engine("start")
    assert apps.wait(cancelled).state == AppState.CANCELLED
    assert apps.containers(cancelled, every=False) == []
    wait_until(lambda: len(apps.containers(adopted, every=False)) == 2, "second start")
