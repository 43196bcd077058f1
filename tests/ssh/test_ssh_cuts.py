"""Hosts in network namespaces of their own, and networks that are cut."""

import os
import sys
import time

import held_runs
import pytest
from held_runs import Commands
from netns_world import World
from ssh_jobs import read, wait_gone, wait_state, wait_text
from sshd_world import SshWorld, find_reason
from torchx.specs import AppState

from muster.schedulers.adapter import ReplicaId
from muster.testing.contract_apps import COUNTS, ROLE, build_agents

CUT_S = float(os.environ.get("MUSTER_SSH_CUT_S", "30"))
CLIENT = 4
"""Index of the namespace of the command line; the hosts come before it."""
TELLS = COUNTS.replace(
    "    worker.step(step)\n", "    worker.step(step)\n    print(f'at {step}\\n', end='', flush=True)\n"
)
"""Each line is one write: the agent's lines come from another process."""

pytestmark = [pytest.mark.netns, pytest.mark.long]


@pytest.fixture
def net(tmp_path):
    with World(tmp_path) as made:  # it skips where there can be none
        for _ in range(CLIENT + 1):
            made.net.add_node()
        yield made.net


@pytest.fixture
def hosts(net, tmp_path):
    reason = find_reason()
    if reason is not None:
        pytest.skip(reason)
    made = SshWorld(tmp_path / "hosts", spaces=net.spaces)
    yield made
    made.close()


@pytest.fixture
def cfg(hosts, runs):
    return {"hosts": hosts.names, "ssh": hosts.ssh, "python": sys.executable, "folder": str(runs)}


def test_a_job_does_not_notice_a_cut_of_half_a_minute(net, hosts, scheduler, cfg, runs):
    app_id = scheduler.submit(build_agents(TELLS, nodes=4), cfg)
    for index in range(4):
        wait_text(scheduler, app_id, "at 5\n", index)
    net.set_link(CLIENT, "down")
    time.sleep(CUT_S)
    net.set_link(CLIENT, "up")
    hosts.wait("a")
    stopped = scheduler.stop_app(app_id, 60.0)
    described = wait_state(scheduler, app_id, AppState.CANCELLED)
    assert stopped.step is not None, stopped.line
    assert described.num_restarts == 0
    for index in range(4):
        steps = [line for line in read(scheduler, app_id, index) if line.startswith("at ")]
        assert steps == [f"at {step}\n" for step in range(len(steps))], "each line once"
        assert len(steps) == stopped.step
    wait_gone(runs)


def test_a_host_that_is_cut_off_for_ever_is_replaced(net, scheduler, cfg, runs):
    options = {**cfg, "hosts": ["a", "b", "c"], "spares": 1, "lost_s": 6.0}
    app_id = scheduler.submit(build_agents(TELLS, retries=1), options)
    for index in range(2):
        wait_text(scheduler, app_id, "at 5\n", index)
    net.set_link(1, "down")
    wait_text(scheduler, app_id, "rank 1 of 2 counts", 1, times=2)
    record = scheduler.find_folder(app_id).read_record()
    assert record.handles[ReplicaId(ROLE, 1)]["host"] == "c"
    assert scheduler.describe(app_id).num_restarts >= 1
    assert scheduler.stop_app(app_id, 60.0).step is not None
    wait_state(scheduler, app_id, AppState.CANCELLED)
    wait_gone(runs)


@pytest.fixture
def commands(tmp_path):
    made = Commands(tmp_path)
    yield made
    made.call("muster", "release", "--now")


def test_a_run_on_a_hold_notices_no_short_cut_and_names_a_long_one(net, hosts, commands, runs):
    options = f"hosts=a,b,ssh={hosts.ssh},python={sys.executable},folder={runs},lost_s=90"
    held = commands.hold("-s", "ssh", "-cfg", options, "dist.ddp", "-j", "2x1")
    counts = "import time, torch\nfor step in range(6000):\n    print('up' if step == 0 else step, flush=True)\n"
    with commands.started(f"{counts}    time.sleep(0.1)\n", "main") as run:
        net.set_link(CLIENT, "down")
        time.sleep(3)
        net.set_link(CLIENT, "up")
        hosts.wait("a")
        run.wait_line("]:100")
        net.set_link(CLIENT, "down")
        assert run.wait_end() == 1, run.text
        assert "came for 40 s" in commands.call("muster", "status", run.app_id).stdout
        time.sleep(10)  # the nodes give this side up as well
        net.set_link(CLIENT, "up")
        hosts.wait("a")
    held.wait_idle()
    held_runs.check_two_runs(held, nodes=1)  # the hosts have one name, so gloo connects to this one
