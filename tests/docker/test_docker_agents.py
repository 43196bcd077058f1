"""Jobs of our agent in containers of an image that does not contain muster."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from other_user import OTHER, needs_two_users
from torchx.specs import AppDef, AppState, BindMount

from muster.components import dist

pytestmark = pytest.mark.docker

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ROOT / "tests" / "programs"
IMAGE = "muster-test:torch"


def ddp(script, j, volume=None, **how):
    mounts = [] if volume is None else ["type=volume", f"src={volume.name}", "dst=/data"]
    how.setdefault("rdzv_conf", "keep_alive_max_attempt=60")  # on a busy machine an agent gets no CPU for seconds
    return dist.ddp(script=script, j=j, image=IMAGE, name="job", mounts=mounts, **how)


def count_in_log(apps, app_id, replica, text):
    """How often a text appears in a replica's log so far."""
    return sum(text in line for line in apps.logs(app_id, role=_role(apps, app_id), replica=replica))


def _role(apps, app_id):
    return apps.containers(app_id)[0].labels["io.muster.role"]


def node(apps, app_id, replica):
    """The running container of a replica."""
    return next(iter(apps.containers(app_id, every=False, replica=replica)), None)


def test_a_report_comes_after_the_last_line(apps, tmp_path):
    """The engine keeps up to 1 MiB of each stream in memory, and has no common order of the two."""
    (tmp_path / "main.py").write_text("for line in range(300_000):\n    print('line', line)\nraise ValueError('bad')\n")
    app_id = apps.run(ddp("main.py", "1x1", start="cold", max_retries=0), workspace=str(tmp_path))
    assert apps.wait(app_id).state == AppState.FAILED
    log = "".join(apps.logs(app_id, role=_role(apps, app_id)))
    assert log.index("line 299999\n") < log.index("JOB FAILED")


def test_image_does_not_contain_muster(client):
    said = client.containers.run(
        IMAGE, ["python3", "-c", "import importlib.util as u; print(u.find_spec('muster'))"], remove=True
    )
    assert said == b"None\n"


def test_digits_from_the_command_line(apps):
    what = ["dist.ddp", "-j", "2x2", "--image", IMAGE, "--script", "digits/train.py"]
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
    app_id = apps.run(ddp("main.py", "2x1", start="warm", rdzv_conf=""), workspace=str(tmp_path))
    status = apps.wait(app_id)
    log = "".join(line for replica in (0, 1) for line in apps.logs(app_id, role=_role(apps, app_id), replica=replica))
    assert status.state == AppState.SUCCEEDED, log
    assert "stood still" not in log


@pytest.mark.parametrize("network", [None, "host"])
def test_two_agent_roles_of_one_app_are_two_jobs(apps, tmp_path, app_of, network):
    (tmp_path / "main.py").write_text(
        "import os\n"
        "print('ids', *(os.environ[name] for name in ('RANK', 'WORLD_SIZE', 'TORCHELASTIC_RUN_ID', 'MASTER_ADDR')))\n"
    )
    roles = app_of("echo beside", role="ps").roles  # first: nothing of the others' is where it is
    for name in ("actor", "critic"):
        (role,) = ddp("/code/main.py", "2x1", start="cold").roles
        role.name = name
        role.mounts = [BindMount(src_path=str(tmp_path), dst_path="/code", read_only=True)]  # a workspace is role 0's
        roles.append(role)
    app_id = apps.run(AppDef(name="two", roles=roles), **{"network": network} if network else {})
    status = apps.wait(app_id)
    assert status.state == AppState.SUCCEEDED, status.msg
    masters = set()
    for name in ("actor", "critic"):
        lines = [line for k in (0, 1) for line in apps.logs(app_id, role=name, replica=k) if "ids " in line]
        printed = [line.split("ids ")[1].split() for line in lines]
        assert sorted(words[:3] for words in printed) == [[str(k), "2", f"{app_id}-{name}"] for k in (0, 1)]
        masters |= {words[3] for words in printed}
    assert len(masters) == (1 if network else 2), "each meets at its own node 0"


@needs_two_users
def test_logs_in_another_users_volume_are_written_and_its_owner_can_read_them(apps, tmp_path):
    """The container's user is root, and the folder's owner on the host another."""
    (tmp_path / "main.py").write_text("print('trains')\n")
    logs = tmp_path / "logs"
    logs.mkdir()
    os.chown(logs, OTHER, OTHER)
    app = ddp("/code/main.py", "1x1", start="cold", env={"MUSTER_LOG_DIR": "/logs"})
    app.roles[0].mounts = [
        BindMount(src_path=str(tmp_path), dst_path="/code", read_only=True),
        BindMount(src_path=str(logs), dst_path="/logs", read_only=False),
    ]
    app_id = apps.run(app)
    assert apps.wait(app_id).state == AppState.SUCCEEDED
    assert (logs / app_id / "events.jsonl").exists()
    assert (logs / app_id).stat().st_mode & 0o005 == 0o005


def test_killed_container_of_an_elastic_job_is_replaced(apps, volume, wait_until):
    app_id = apps.run(ddp("docker_waits.py", "1:2x1", volume, max_retries=1, start="cold"), workspace=str(PROGRAMS))
    wait_until(lambda: count_in_log(apps, app_id, 1, "of 2"), "both nodes")
    node(apps, app_id, 1).kill("SIGKILL")
    wait_until(lambda: count_in_log(apps, app_id, 0, "of 2") >= 2, "both nodes again")
    assert apps.status(app_id).num_restarts == 1
    node(apps, app_id, 0).exec_run(["touch", "/data/go"])
    assert apps.wait(app_id).state == AppState.SUCCEEDED


def test_docker_stop_of_one_container_loses_no_step_and_uses_no_retry(apps, volume, wait_until):
    """All containers are replaced, and the new ones, whose log folders are empty, resume where the old ones stopped."""
    app = ddp("docker_resumes.py", "3x1", volume, max_retries=0, start="cold")
    app_id = apps.run(app, workspace=str(PROGRAMS))
    wait_until(lambda: all(count_in_log(apps, app_id, index, "asks") for index in range(3)), "all nodes")
    node(apps, app_id, 1).stop()
    assert apps.wait(app_id).state == AppState.SUCCEEDED
    lines = [line for replica in range(3) for line in apps.logs(app_id, role=_role(apps, app_id), replica=replica)]
    [step] = {line.split("stops at step ")[1].strip() for line in lines if "stops at step " in line}
    assert sum(f"resumes from /data/{step}" in line for line in lines) == 3, lines


def test_elastic_job_goes_on_without_a_container(apps, volume, wait_until):
    app_id = apps.run(ddp("docker_waits.py", "1:2x1", volume, start="cold"), workspace=str(PROGRAMS))
    wait_until(lambda: count_in_log(apps, app_id, 1, "of 2"), "both nodes")
    node(apps, app_id, 1).kill("SIGKILL")
    wait_until(lambda: count_in_log(apps, app_id, 0, "of 1"), "one node")
    node(apps, app_id, 0).exec_run(["touch", "/data/go"])
    assert apps.wait(app_id).state == AppState.SUCCEEDED


def test_killed_leader_is_replaced(apps, volume, wait_until):
    app_id = apps.run(ddp("docker_waits.py", "1:2x1", volume, max_retries=1, start="cold"), workspace=str(PROGRAMS))
    wait_until(lambda: count_in_log(apps, app_id, 1, "of 2"), "both nodes")
    node(apps, app_id, 0).kill("SIGKILL")
    wait_until(lambda: count_in_log(apps, app_id, 1, "of 2") >= 2, "both nodes again")
    node(apps, app_id, 1).exec_run(["touch", "/data/go"])
    assert apps.wait(app_id).state == AppState.SUCCEEDED


def test_fixed_job_ends_completely_when_a_container_is_lost(apps, volume, wait_until):
    quick = {"grace_s": 5.0, "env": {"PET_SHUTDOWN_TIMEOUT": "2"}}
    app_id = apps.run(ddp("docker_waits.py", "2x1", volume, start="cold"), workspace=str(PROGRAMS), **quick)
    wait_until(lambda: count_in_log(apps, app_id, 1, "of 2"), "both nodes")
    node(apps, app_id, 1).kill("SIGKILL")
    status = apps.wait(app_id)
    assert status.state == AppState.FAILED
    assert "/1 was ended by SIGKILL; no retries" in status.msg
    assert apps.containers(app_id, every=False) == []


def test_failure_names_what_the_worker_raised(apps):
    app_id = apps.run(ddp("docker_raises.py", "2x1", start="cold", max_retries=0), workspace=str(PROGRAMS))
    status = apps.wait(app_id)
    assert status.state == AppState.FAILED
    assert "exited with code 1" in status.msg
    assert "ValueError: the data set is empty" in status.msg
    assert "the data set is empty" in status.structured_error_msg
    assert status.num_restarts == 0  # an agent's exit 1 is never tried again


def test_restarts_in_place_are_counted(apps, volume, wait_until):
    app = ddp("docker_fails_once.py", "2x1", volume, start="cold", max_retries=2)
    app_id = apps.run(app, workspace=str(PROGRAMS))
    wait_until(lambda: count_in_log(apps, app_id, 1, "attempt 1"), "the second attempt")
    assert apps.status(app_id).num_restarts == 1, "while it runs"
    node(apps, app_id, 0).exec_run(["touch", "/data/go"])
    assert apps.wait(app_id).num_restarts == 1


def test_a_suspended_job_stands_still_on_all_nodes(apps, volume, wait_until):
    """For longer than the lease of its two nodes and their hang timeout; then it goes on where it was."""
    app_id = apps.run(
        ddp("docker_ticks.py", "2x1", volume, start="cold", hang_timeout=2), workspace=str(PROGRAMS), keep="all"
    )
    wait_until(lambda: all(count_in_log(apps, app_id, index, "step 5\n") for index in (0, 1)), "both nodes run")
    folder = apps.scheduler.find_folder(app_id)
    assert folder.send_request("suspend")
    role, shown = _role(apps, app_id), []

    def stand_still():
        last, shown[:] = shown[:], [apps.logs(app_id, role=role, replica=index) for index in (0, 1)]
        time.sleep(2)
        return last == shown

    wait_until(stand_still, "no node prints")
    time.sleep(7)
    assert [apps.logs(app_id, role=role, replica=index) for index in (0, 1)] == shown
    assert folder.send_request("continue")
    node(apps, app_id, 0).exec_run(["touch", "/data/go"])
    status = apps.wait(app_id)
    assert (status.state, status.num_restarts) == (AppState.SUCCEEDED, 0)
    for index in (0, 1):
        assert count_in_log(apps, app_id, index, "step 0\n") == 1, "workers started again"


def test_a_suspended_job_can_be_cancelled(apps, volume, wait_until):
    app_id = apps.run(ddp("docker_ticks.py", "2x1", volume, start="cold"), workspace=str(PROGRAMS))
    wait_until(lambda: count_in_log(apps, app_id, 1, "step 1\n"), "both nodes run")
    apps.scheduler.find_folder(app_id).send_request("suspend")
    apps.cancel(app_id)
    assert apps.wait(app_id, deadline_s=25).state == AppState.CANCELLED  # the grace period is 45 s


def test_memory_limit_ends_in_an_out_of_memory_report(apps):
    app = ddp("docker_eats.py", "1x1", memMB=128, start="cold")
    app_id = apps.run(app, workspace=str(PROGRAMS))
    status = apps.wait(app_id)
    assert status.state == AppState.FAILED
    assert "out of memory, limit 128 MiB" in status.msg


def test_no_memory_limit_unless_requested(apps, client):
    app_id = apps.run(ddp("docker_raises.py", "1x1", start="cold"), workspace=str(PROGRAMS))
    (container,) = apps.containers(app_id)
    assert container.attrs["HostConfig"]["Memory"] == 0
    apps.cancel(app_id)
    assert apps.wait(app_id).state == AppState.CANCELLED


def test_job_goes_on_when_its_supervisor_was_killed(apps, volume, wait_until):
    app_id = apps.run(ddp("docker_waits.py", "2x1", volume, start="cold"), workspace=str(PROGRAMS))
    wait_until(lambda: count_in_log(apps, app_id, 1, "of 2"), "both nodes")
    first = apps.scheduler.find_folder(app_id).read_record().supervisor
    os.kill(first.pid, signal.SIGKILL)
    wait_until(lambda: not first.is_alive(), "death of the supervisor")
    node(apps, app_id, 0).exec_run(["touch", "/data/go"])
    wait_until(lambda: not apps.containers(app_id, every=False), "end of both nodes")
    assert apps.wait(app_id).state == AppState.SUCCEEDED  # looking at it started another supervisor
