"""`muster top` of a job of this machine, without a terminal: a line per change, one page, JSON."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from harness import wait_until

from muster.components import dist
from muster.schedulers.local import create_detached_scheduler

pytestmark = pytest.mark.torchx

MUSTER = Path(sys.executable).with_name("muster")
PROGRAM = """
import os, time
from muster import worker
at = 0
while not os.path.exists("go"):
    worker.step(at, total=1_000_000, loss=0.5)
    at += 1
    time.sleep(0.02)
"""
ICE = """
import os, time
from muster.elastic import Events
events = Events("spawn")
if os.environ["LOCAL_RANK"] == "0":
    events.progress_bar_total.value = 1_000_000
step = 0
while not os.path.exists("go"):
    step += 1
    if os.environ["LOCAL_RANK"] == "0":
        events.progress_bar_iter.value = step
    time.sleep(0.02)
"""


def top(*words):
    return subprocess.run([str(MUSTER), "top", *words], capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture
def app_id(tmp_path, monkeypatch, request):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(getattr(request, "param", PROGRAM))
    scheduler = create_detached_scheduler("torchx")
    app_id = scheduler.submit(dist.ddp(script="train.py", j="1x2", start="cold"), {})
    yield app_id
    scheduler.delete(app_id)
    scheduler.close()


def read_json(app_id):
    done = top(app_id, "--json")
    return done.returncode, json.loads(done.stdout)


def test_a_job_that_runs_and_ends(app_id, tmp_path):
    wait_until(lambda: "train" in read_json(app_id)[1].get("statuses", {}), timeout_s=120, what="a status")
    code, told = read_json(app_id)
    assert (code, told["exit_code"], told["state"]) == (10, 10, "RUNNING")
    assert told["statuses"]["train"]["total"] == 1_000_000
    following = subprocess.Popen([str(MUSTER), "top", app_id], stdout=subprocess.PIPE, text=True)
    assert following.stdout.readline()
    (tmp_path / "go").touch()
    rest, _ = following.communicate(timeout=120)
    assert "SUCCEEDED" in rest.splitlines()[-1]
    assert following.returncode == 0
    assert read_json(app_id)[0] == 0


def test_one_page(app_id):
    pytest.importorskip("rich")
    wait_until(lambda: "of 1000000" in top(app_id, "--once").stdout, timeout_s=120, what="a page with steps")
    page = top("last", "--once")
    assert page.returncode == 10
    assert f"detached://torchx/{app_id}  RUNNING" in page.stdout
    assert "loss 0.5" in page.stdout
    assert "\x1b" not in page.stdout


@pytest.mark.parametrize("app_id", [ICE], indirect=True, ids=["ice-learn"])
def test_ice_learns_progress_is_that_of_the_job(app_id):
    """Its loop: local rank 0 of each node sets both values, no other rank does."""
    pytest.importorskip("rich")
    wait_until(lambda: "of 1000000" in top(app_id, "--once").stdout, timeout_s=120, what="a page with steps")
    status = read_json(app_id)[1]["statuses"]["train"]
    assert status["total"] == 1_000_000
    assert [rank.get("step") is None for rank in status["ranks"]] == [False, True]
    torchx = [str(MUSTER.with_name("torchx")), "status", f"detached://torchx/{app_id}"]
    wait_until(
        lambda: re.search(
            r"step \d+ of 1000000, [\d.]+ a second; ETA ",  # a first status has no rate yet
            subprocess.run(torchx, capture_output=True, text=True, timeout=120, check=False).stdout,
        ),
        timeout_s=120,
        what="a rate",
    )


def test_a_job_that_is_not_there():
    done = top("detached://torchx/no-such-job")
    assert (done.returncode, done.stdout) == (3, "")
    assert "no-such-job" in done.stderr
