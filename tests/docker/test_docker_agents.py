"""Jobs of our agent in containers of an image that does not contain muster."""

import os

import pytest
from harness import ROOT
from other_user import OTHER, needs_two_users
from torchx.specs import AppState, BindMount

from muster.components import dist

pytestmark = pytest.mark.docker

PROGRAMS = ROOT / "tests" / "programs"
IMAGE = "muster-test:torch"


def ddp(script, j, volume=None, **how):
    mounts = [] if volume is None else ["type=volume", f"src={volume.name}", "dst=/data"]
    how.setdefault("rdzv_conf", "keep_alive_max_attempt=60")  # on a busy machine an agent gets no CPU for seconds
    return dist.ddp(script=script, j=j, image=IMAGE, name="job", start="cold", mounts=mounts, **how)


@pytest.fixture
def run(apps, volume):
    """Submits a program of `tests/programs`; it finds the test's volume in /data."""
    return lambda script, j, **how: apps.run(ddp(script, j, volume, **how), workspace=str(PROGRAMS))


def read_log(apps, app_id, replica=0):
    role = apps.containers(app_id)[0].labels["io.muster.role"]
    return "".join(apps.logs(app_id, role=role, replica=replica))


def node(apps, app_id, replica):
    """The running container of a replica."""
    return next(iter(apps.containers(app_id, every=False, replica=replica)), None)


@needs_two_users
def test_logs_in_another_users_volume_are_written_and_its_owner_can_read_them(apps, tmp_path):
    """The container's user is root, and the folder's owner on the host another."""
    (tmp_path / "main.py").write_text("print('trains')\n")
    logs = tmp_path / "logs"
    logs.mkdir()
    os.chown(logs, OTHER, OTHER)
    app = ddp("/code/main.py", "1x1", env={"MUSTER_LOG_DIR": "/logs"})
    app.roles[0].mounts = [
        BindMount(src_path=str(tmp_path), dst_path="/code", read_only=True),
        BindMount(src_path=str(logs), dst_path="/logs", read_only=False),
    ]
    app_id = apps.run(app)
    assert apps.wait(app_id).state == AppState.SUCCEEDED
    assert (logs / app_id / "events.jsonl").exists()
    assert (logs / app_id).stat().st_mode & 0o005 == 0o005


def test_docker_stop_of_one_container_loses_no_step_and_uses_no_retry(apps, run, wait_until):
    """All containers are replaced, and the new ones, whose log folders are empty, resume where the old ones stopped."""
    app_id = run("docker_resumes.py", "2x1", max_retries=0)
    wait_until(lambda: all("asks" in read_log(apps, app_id, index) for index in range(2)), "all nodes")
    node(apps, app_id, 1).stop()
    assert apps.wait(app_id).state == AppState.SUCCEEDED
    log = "".join(read_log(apps, app_id, index) for index in range(2))
    [step] = {line.split("stops at step ")[1].strip() for line in log.splitlines() if "stops at step " in line}
    assert log.count(f"resumes from /data/{step}\n") == 2, log


def test_memory_limit_ends_in_an_out_of_memory_report(apps):
    app_id = apps.run(ddp("docker_eats.py", "1x1", memMB=128), workspace=str(PROGRAMS))
    status = apps.wait(app_id)
    assert status.state == AppState.FAILED
    assert "memory, limit 128Mi" in status.msg
