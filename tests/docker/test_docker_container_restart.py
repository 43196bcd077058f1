"""A person restarts one container of a job through the engine: the supervisor follows it."""

import threading
from pathlib import Path

import pytest
from torchx.specs import AppState

from muster.components import dist

pytestmark = pytest.mark.docker

PROGRAMS = Path(__file__).resolve().parents[1] / "programs"
BARE = "muster-test:bare"


def test_a_container_that_is_restarted_runs_on_and_uses_no_retry(apps, app_of):
    """And its log is followed on."""
    app_id = apps.run(app_of("trap 'exit 3' TERM; hostname; while :; do sleep 0.1; done", replicas=2, image=BARE))
    lines = iter(apps.runner.log_lines(f"docker://test/{app_id}", "w", 1, should_tail=True))
    assert next(lines) == "w-1\n"
    apps.containers(app_id, replica=1)[0].restart(timeout=5)
    assert next(lines) == "w-1\n"
    status = apps.status(app_id)
    assert (status.state, status.num_restarts) == (AppState.RUNNING, 0), status.msg
    assert len(apps.containers(app_id)) == 2
    apps.cancel(app_id)
    assert list(lines) == []
    assert apps.wait(app_id).state == AppState.CANCELLED
    assert apps.containers(app_id, every=False) == []


def test_no_container_that_is_restarted_outlives_its_app(apps, app_of):
    """The app fails while the engine restarts one of its containers."""
    command = "[ $REPLICA = 0 ] || exec sleep 600; until [ -e /go ]; do sleep 0.02; done; exit 3"
    app_id = apps.run(app_of(command, replicas=2, image=BARE, env={"REPLICA": "${replica_id}"}), grace_s=1.0)
    (first,), (second,) = (apps.containers(app_id, replica=k) for k in (0, 1))
    restart = threading.Thread(target=second.restart, kwargs={"timeout": 5})
    restart.start()
    first.exec_run(["touch", "/go"])
    restart.join()
    assert apps.wait(app_id).state == AppState.FAILED
    assert apps.containers(app_id, every=False) == []


@pytest.mark.long
@pytest.mark.parametrize("replica", [0, 1])
def test_a_job_of_agents_survives_the_restart_of_one_of_its_containers(apps, volume, wait_until, replica):
    mounts = ["type=volume", f"src={volume.name}", "dst=/data"]
    how = {"image": "muster-test:torch", "name": "job", "start": "cold", "mounts": mounts}
    app = dist.ddp(script="docker_waits.py", j="2x1", **how)
    app_id = apps.run(app, workspace=str(PROGRAMS))

    def count():
        return [sum("of 2" in line for line in apps.logs(app_id, role=app.roles[0].name, replica=k)) for k in (0, 1)]

    wait_until(lambda: min(count()) >= 1, "a first round")
    before = count()
    apps.containers(app_id, replica=replica)[0].restart()
    wait_until(lambda: all(now > then for now, then in zip(count(), before, strict=True)), "another round")
    apps.containers(app_id, every=False)[0].exec_run(["touch", "/data/go"])
    status = apps.wait(app_id)
    assert (status.state, status.num_restarts) == (AppState.SUCCEEDED, 0), status.msg
    assert apps.containers(app_id, every=False) == []
