"""`muster log` of a job of this machine: its files, while it runs and afterwards, from another shell."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from harness import wait_until

from muster.components import dist
from muster.schedulers.local import create_detached_scheduler

MUSTER = Path(sys.executable).with_name("muster")
PROGRAM = """
import os, sys, time
rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
print(f"rank {rank}, attempt {attempt}", flush=True)
while not os.path.exists("go"):
    time.sleep(0.05)
if attempt == 0:
    time.sleep(0.2 * (3 - rank))
    raise ValueError(f"rank {rank} has failed")
"""


@pytest.fixture
def app_id(tmp_path, state_home):
    Path("train.py").write_text(PROGRAM)
    scheduler = create_detached_scheduler("torchx")
    app = dist.ddp(script="train.py", j="2x2", start="cold", max_retries=1)
    app_id = scheduler.submit(app, {})
    yield app_id
    scheduler.delete(app_id)
    scheduler.close()
    assert not os.path.lexists(tmp_path / "state/muster/logs/torchx/latest"), "it goes with its job"


def test_ranks_attempts_and_the_root_cause(app_id, tmp_path, muster):
    def log(*words):
        code, told, _ = muster("log", *words)
        assert code == 0
        return told

    logs = tmp_path / "state/muster/logs/torchx"
    assert os.readlink(logs / "latest") == app_id
    wait_until(lambda: log().count(", attempt 0\n") == 4, what="all ranks")
    following = subprocess.Popen([str(MUSTER), "log", "--rank", "3", "-f"], stdout=subprocess.PIPE, text=True)
    assert following.stdout.readline() == "rank 3, attempt 0\n"
    (tmp_path / "go").touch()
    rest, _ = following.communicate(timeout=120)
    assert "ValueError: rank 3 has failed\n" in rest
    assert rest.endswith("rank 3, attempt 1\n"), "it goes on in the next attempt, to the end of the job"
    assert following.returncode == 0
    assert log("last", "--rank", "1") == "rank 1, attempt 1\n"
    told = log(app_id)
    assert told.index("rank 3 has failed") < told.index("rank 0, attempt 1"), "by time, not node after node"
    assert log(app_id, "--attempt", "0", "--stream", "stdout") == "".join(
        f"[r{rank}]:rank {rank}, attempt 0\n" for rank in range(4)
    )
    assert "ValueError: rank 3 has failed" in log(app_id, "--failed", "--grep", "Error")
    assert log(app_id, "--node", "1", "--grep", "rank 2, attempt 1").endswith("rank 2, attempt 1\n")
