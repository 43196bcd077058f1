"""Hosts in network namespaces of their own, and networks that are cut."""

import os
import sys
import time

import pytest
from netns_world import World
from ssh_jobs import read, wait_gone, wait_state, wait_text
from sshd_world import SshWorld, find_reason
from torchx.specs import AppState

from muster.testing.contract_apps import COUNTS, build_agents

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
        assert steps == [f"at {step}\n" for step in range(len(steps))]
        assert len(steps) == stopped.step
    wait_gone(runs)
