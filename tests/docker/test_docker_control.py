"""What people are told of a job of the engine: while it runs, when it has ended, and when its containers are gone."""

import json
import re

import pytest
from torchx.specs import AppState

from muster.components import dist

pytestmark = pytest.mark.docker

PROGRAM = """
import os, time
from muster import worker
print("rank", os.environ["RANK"], "begins", flush=True)
for i in range(1_000_000):
    time.sleep(0.05)
    worker.step(i)
"""
PATIENT = {"image": "muster-test:torch", "name": "job", "start": "cold", "rdzv_conf": "keep_alive_max_attempt=60"}


@pytest.mark.timeout(400)
def test_a_job_with_a_lost_node_is_told_until_its_containers_are_gone(apps, shell, tmp_path, wait_until):
    (tmp_path / "train.py").write_text(PROGRAM)
    app = dist.ddp(script="train.py", j="1:2x1", max_retries=2, **PATIENT)
    app_id = apps.run(app, workspace=str(tmp_path))
    handle = f"docker://test/{app_id}"

    def list_node(index):
        return [each for each in apps.containers(app_id) if each.labels["io.muster.replica"] == str(index)]

    def read_events(node, what):
        events = map(json.loads, shell("events", app_id, "--json").out.splitlines())
        return [each for each in events if (each.get("node_index"), each.get("what")) == (node, what)]

    def list_agents(node):
        return {each["agent"] for each in read_events(node, "workers_started")}

    def read_timeline():
        done = shell("timeline", app_id, "--json", "-o", str(tmp_path / "page.html"))
        assert done.code == 0, done
        return json.loads(done.out), done.err

    wait_until(lambda: list_agents(1), "both nodes")
    wait_until(lambda: read_events(0, "steps_done"), "steps")
    listed = shell("list", "-s", "docker").out
    assert re.search(rf"^docker://torchx/{app_id} .* RUNNING: attempt 0, .* 2 of 2 nodes ", listed, re.MULTILINE)
    rank = shell("log", handle, "--rank", "1", "--grep", "begins")
    assert (rank.code, rank.out, rank.err) == (0, "rank 1 begins\n", ""), "it is the file: without a prefix"
    list_node(1)[0].kill()
    wait_until(lambda: len(list_agents(1)) == 2, "a new node 1")
    apps.cancel(app_id)
    assert apps.wait(app_id).state == AppState.CANCELLED
    assert "rank 1 begins\n" in shell("log", handle, "--rank", "1").out, "of a container that has ended, too"

    facts, errors = read_timeline()
    assert (facts["has_ended"], facts["succeeded"], facts["failures"]) == (True, False, {"node": 1}), facts
    assert (facts["missing"], errors.count("missing")) == ("", 0), (facts, errors)
    assert sum(facts["seconds"].values()) == pytest.approx(facts["duration_s"], abs=1.0), facts
    assert len(list_agents(1)) == 2, "of both of its containers"

    for container in list_node(1):
        container.remove(force=True)
    facts, errors = read_timeline()
    assert facts["failures"] == {"node": 1}, facts
    assert facts["missing"].startswith("Records are missing ")
    assert facts["missing"] in errors
    assert facts["missing"] in (tmp_path / "page.html").read_text()

    for container in apps.containers(app_id):
        container.remove(force=True)
    done = shell("events", app_id)
    assert done.code != 0
    assert "no node has records of " in done.err
    assert f"docker://torchx/{app_id} " in shell("list", "-s", "docker").out
    assert "CANCELLED" in shell("status", app_id).out
    for words in ((), ("-f",)):
        assert "containers were removed" in shell("log", app_id, *words).out, words
