"""`muster rehearse --app` of a job on hosts behind real servers."""

import json
import os
import sys
from pathlib import Path

import pytest
from harness import run_tree
from ssh_jobs import wait_gone, wait_text

from muster.components import dist

MUSTER = Path(sys.executable).with_name("muster")
STEPS = (
    "import time\nfrom muster import worker\nprint('begins', flush=True)\n"
    "for i in range(100000):\n    time.sleep(0.05)\n    worker.step(i)\n"
)


@pytest.mark.long
def test_faults_are_caused_on_the_hosts_of_a_job_that_runs(world, runs, tmp_path, scheduler):
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "w.py").write_text(STEPS)
    cfg = {"hosts": ["a", "b"], "ssh": world.ssh, "python": sys.executable, "folder": str(runs)}
    app = dist.ddp(script="w.py", j="2x1", start="cold", max_retries=5)
    app_id = scheduler.submit(app, cfg, workspace=f"file://{tmp_path / 'code'}")
    try:
        for node in range(2):
            wait_text(scheduler, app_id, "begins", node)
        command = [str(MUSTER), "rehearse", "--seed", "3", "--app", f"ssh://test/{app_id}", "--json"]
        refused = run_tree(command, env=dict(os.environ))
        assert json.loads(refused.stdout)["rows"][0]["reason"] == "it was not confirmed", refused.explain()
        faults = "rank-killed,agent-killed,preempted"
        outcome = run_tree([*command, "--yes", "--faults", faults], env=dict(os.environ), timeout_s=250)
        assert outcome.exit_code == 0, outcome.explain()
        rows = json.loads(outcome.stdout)["rows"]
        assert [row["verdict"] for row in rows] == ["survived"] * 3, outcome.explain()
    finally:
        scheduler.delete(app_id)
    wait_gone(runs)
