"""An agent inside a TrainJob of Kubeflow posts how far a script is that reports its steps."""

import os
from pathlib import Path
from typing import Any

from harness import AGENT, run_tree

PROGRAM = """
import time
from muster import worker
for step in range(40):
    worker.step(step, total=40, loss=0.5)
    time.sleep(0.05)
"""


def test_the_progress_of_a_script_without_a_trainer(tmp_path: Path, collector: Any) -> None:
    (tmp_path / "main.py").write_text(PROGRAM)
    (tmp_path / "token").write_text("secret")
    env = {
        **os.environ,
        "KUBEFLOW_TRAINER_SERVER_URL": f"http://127.0.0.1:{collector.server_port}/status",
        "KUBEFLOW_TRAINER_SERVER_TOKEN": str(tmp_path / "token"),
        "http_proxy": "http://127.0.0.1:1",
    }
    flags = ["--standalone", "--nproc-per-node", "2", "--start", "cold", "--log-dir", str(tmp_path / "logs")]
    run_tree([*AGENT, *flags, "main.py"], cwd=tmp_path, env=env).check()
    assert {headers["Authorization"] for *_, headers in collector.got} == {"Bearer secret"}
    first, last = (collector.got[place][1]["trainerStatus"] for place in (0, -1))
    assert 0 <= first["progressPercentage"] < 100
    assert {"name": "total_steps", "value": "40"} in first["metrics"]
    assert (last["progressPercentage"], last["estimatedRemainingSeconds"]) == (100, 0)
    assert {"name": "current_step", "value": "39"} in last["metrics"]
    assert {"name": "loss", "value": "0.5"} in last["metrics"]
