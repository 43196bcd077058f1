"""Jobs of our agent in containers of an image that does not contain muster."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from other_user import OTHER, needs_two_users
from torchx.specs import AppState, BindMount

from muster.components import dist

pytestmark = pytest.mark.docker

ROOT = Path(__file__).resolve().parents[2]
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


def test_a_report_comes_after_the_last_line(apps, tmp_path):
    """The engine keeps up to 1 MiB of each stream in memory, and has no common order of the two."""
    program = "for line in range(3000):\n    print('line', line, '.' * 1200)\nraise ValueError('bad')\n"
    (tmp_path / "main.py").write_text(program)
    app_id = apps.run(ddp("main.py", "1x1", max_retries=0), workspace=str(tmp_path))
    assert apps.wait(app_id).state == AppState.FAILED
    log = read_log(apps, app_id)
    assert log.index("line 2999 ") < log.index("JOB FAILED")


def test_digits_from_the_command_line(apps):
    what = ["dist.ddp", "-j", "2x1", "--image", IMAGE, "--script", "digits/train.py", "--", "--epochs", "2"]
    done = subprocess.run(
        [sys.executable, "-m", "torchx.cli.main", "run", "-s", "local_docker", *what],
        cwd=ROOT / "examples",
        capture_output=True,
        text=True,
        timeout=170,
    )
    apps.ids.append(done.stdout.strip().rsplit("/", 1)[-1])
    assert done.returncode == 0, done.stderr
    assert "test accuracy" in done.stderr


LONG_JOB = """
import time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
for _ in range(45):
    dist.all_reduce(torch.ones(1))
    time.sleep(1)
dist.destroy_process_group()
"""


@pytest.mark.long
def test_a_long_job_of_two_warm_nodes_is_left_alone(apps, tmp_path):
    """Longer than the store's process may stand still: its socket listens at the container's address alone."""
    (tmp_path / "main.py").write_text(LONG_JOB)
    app = dist.ddp(script="main.py", j="2x1", image=IMAGE, name="job", start="warm")
    app_id = apps.run(app, workspace=str(tmp_path))
    status = apps.wait(app_id)
    log = "".join(read_log(apps, app_id, replica) for replica in (0, 1))
    assert status.state == AppState.SUCCEEDED, log
    assert "stood still" not in log


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


@pytest.mark.long
def test_a_killed_leader_is_replaced(apps, run, wait_until):
    app_id = run("docker_waits.py", "1:2x1", max_retries=1)
    wait_until(lambda: "of 2" in read_log(apps, app_id, 1), "both nodes")
    node(apps, app_id, 0).kill("SIGKILL")
    wait_until(lambda: read_log(apps, app_id, 1).count("of 2") >= 2, "both nodes again")
    assert apps.status(app_id).num_restarts == 1
    node(apps, app_id, 1).exec_run(["touch", "/data/go"])
    assert apps.wait(app_id).state == AppState.SUCCEEDED


@pytest.mark.long
def test_a_job_that_is_suspended_stands_still_goes_on_and_can_be_cancelled(apps, run, wait_until):
    app_id = run("docker_ticks.py", "2x1")
    wait_until(lambda: all("step 5\n" in read_log(apps, app_id, index) for index in (0, 1)), "both nodes run")
    folder = apps.scheduler.find_folder(app_id)
    role = apps.containers(app_id)[0].labels["io.muster.role"]

    def read_states():
        """Of the worker of each node, which stands still on its own while its agent looks after the lease."""
        look = "for d in /proc/[0-9]*; do grep -qs docker_ticks.py $d/cmdline && cut -d' ' -f3 $d/stat; done; true"
        return ["T" in apps.inside(app_id, look, role=role, replica=index).split() for index in (0, 1)]

    def suspend():
        assert folder.send_request("suspend")
        wait_until(lambda: read_states() == [True, True], "all workers stand still")
        return [read_log(apps, app_id, index).count("step ") for index in (0, 1)]

    seen = suspend()
    assert folder.send_request("continue")
    wait_until(lambda: all(read_log(apps, app_id, k).count("step ") > seen[k] for k in (0, 1)), "they go on")
    assert [read_log(apps, app_id, index).count("step 0\n") for index in (0, 1)] == [1, 1], "not started again"
    suspend()
    apps.cancel(app_id)
    assert apps.wait(app_id, deadline_s=25).state == AppState.CANCELLED  # the grace period is 45 s


def test_memory_limit_ends_in_an_out_of_memory_report(apps):
    app_id = apps.run(ddp("docker_eats.py", "1x1", memMB=128), workspace=str(PROGRAMS))
    status = apps.wait(app_id)
    assert status.state == AppState.FAILED
    assert "memory, limit 128Mi" in status.msg


def test_job_goes_on_when_its_supervisor_was_killed(apps, run, wait_until):
    app_id = run("docker_waits.py", "2x1")
    wait_until(lambda: "of 2" in read_log(apps, app_id, 1), "both nodes")
    first = apps.scheduler.find_folder(app_id).read_record().supervisor
    os.kill(first.pid, signal.SIGKILL)
    wait_until(lambda: not first.is_alive(), "death of the supervisor")
    node(apps, app_id, 0).exec_run(["touch", "/data/go"])
    wait_until(lambda: not apps.containers(app_id, every=False), "end of both nodes")
    assert apps.wait(app_id).state == AppState.SUCCEEDED  # looking at it started another supervisor
