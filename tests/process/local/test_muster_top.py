"""`muster top` of a job of this machine, without a terminal: a line per change, one page, JSON."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from harness import wait_until

from muster.components import dist
from muster.schedulers.local import create_detached_scheduler

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


def read_json(muster, app_id):
    code, told, _ = muster("top", app_id, "--json")
    return code, json.loads(told)


def test_a_job_that_runs_and_ends(app_id, tmp_path, muster):
    pytest.importorskip("rich")
    wait_until(lambda: "of 1000000" in muster("top", app_id, "--once")[1], what="a page with steps")
    code, page, _ = muster("top", "last", "--once")
    assert (code, f"detached://torchx/{app_id}  RUNNING" in page, "loss 0.5" in page) == (10, True, True), page
    assert "\x1b" not in page
    code, told = read_json(muster, app_id)
    assert (code, told["exit_code"], told["state"]) == (10, 10, "RUNNING")
    assert told["statuses"]["train"]["total"] == 1_000_000
    following = subprocess.Popen([str(MUSTER), "top", app_id], stdout=subprocess.PIPE, text=True)
    assert following.stdout.readline()
    (tmp_path / "go").touch()
    rest, _ = following.communicate(timeout=120)
    assert "SUCCEEDED" in rest.splitlines()[-1]
    assert following.returncode == 0
    assert read_json(muster, app_id)[0] == 0
