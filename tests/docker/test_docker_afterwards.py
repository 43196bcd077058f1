"""`muster timeline` and `muster events` of a job of the engine that has ended, from the containers that are left."""

import json
import subprocess
import sys

import pytest
from harness import wait_until
from torchx.specs import AppState

from muster.components import dist

pytestmark = pytest.mark.docker

PROGRAM = """
import time
from muster import worker
for i in range(1_000_000):
    time.sleep(0.05)
    worker.step(i)
"""
IMAGE = "muster-test:torch"


def muster(*words):
    command = [sys.executable, "-m", "muster", *words]
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=170)


def read_timeline(app_id, folder):
    done = muster("timeline", app_id, "--json", "-o", str(folder / "page.html"))
    assert done.returncode == 0, done
    return json.loads(done.stdout), done.stderr


@pytest.mark.timeout(400)
def test_a_cancelled_job_with_a_lost_node_is_told_until_its_containers_are_gone(apps, client, tmp_path):
    (tmp_path / "train.py").write_text(PROGRAM)
    patient = {"start": "cold", "max_retries": 2, "rdzv_conf": "keep_alive_max_attempt=60"}
    app = dist.ddp(script="train.py", j="1:2x1", image=IMAGE, name="job", **patient)
    app_id = apps.run(app, workspace=str(tmp_path))

    def list_node(index):
        found = apps.containers(app_id)
        return [each for each in found if each.labels["io.muster.replica"] == str(index)]

    def read_events():
        return [json.loads(line) for line in muster("events", app_id, "--json").stdout.splitlines()]

    def count(what, node):
        return sum(each.get("what") == what and each["node_index"] == node for each in read_events())

    def list_agents(node):
        """Those that have started workers."""
        return {
            each["agent"]
            for each in read_events()
            if each["node_index"] == node and each.get("what") == "workers_started"
        }

    wait_until(lambda: count("workers_started", 1) >= 1, timeout_s=120, what="both nodes")
    wait_until(lambda: count("steps_done", 0) > 1, timeout_s=60, what="steps")
    list_node(1)[0].kill()
    wait_until(lambda: len(list_agents(1)) == 2, timeout_s=120, what="a new node 1")
    assert apps.runner.cancel(f"docker://test/{app_id}") is None
    ended = apps.wait(app_id)
    assert ended.state == AppState.CANCELLED, ended

    facts, errors = read_timeline(app_id, tmp_path)
    assert (facts["has_ended"], facts["succeeded"], facts["failures"]) == (True, False, {"node": 1}), (
        facts,
        read_events(),
    )
    assert (facts["missing"], errors.count("missing")) == ("", 0), (facts, errors)
    assert sum(facts["seconds"].values()) == pytest.approx(facts["duration_s"], abs=1.0), facts
    assert len(list_agents(1)) == 2, "of both of its containers"

    for container in list_node(1):
        container.remove(force=True)
    facts, errors = read_timeline(app_id, tmp_path)
    assert facts["failures"] == {"node": 1}, (facts, read_events())
    assert facts["missing"].startswith("Records are missing of 1 of 2 nodes in rounds 1 to ")
    assert facts["missing"] in errors
    assert facts["missing"] in (tmp_path / "page.html").read_text()

    for container in apps.containers(app_id):
        container.remove(force=True)
    done = muster("events", app_id)
    assert done.returncode != 0
    assert "cannot be read" in done.stderr
