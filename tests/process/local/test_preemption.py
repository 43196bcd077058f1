"""A node of a local_cwd job is preempted: all ranks stop at one step, and the job goes on there without a retry."""

import os
import re
from pathlib import Path

from harness import BIN, PROGRAMS, run_tree

PROGRAM = str(PROGRAMS / "drain_steps.py")
NODES = 3


def test_a_preempted_job_goes_on_without_retries(tmp_path: Path) -> None:
    """All ranks stop at one step."""
    env = os.environ | {"XDG_STATE_HOME": str(tmp_path / "state"), "VIRTUAL_ENV": str(BIN.parent)}
    command = [str(BIN / "torchx"), "run", "-s", "local_cwd", "dist.ddp", "-j", f"{NODES}x1", "--max_retries", "0"]
    command += ["--start", "cold", "--rdzv_conf", "last_call_timeout=60"]  # the first world has all nodes
    outcome = run_tree([*command, "--script", PROGRAM, "--", str(tmp_path), "200"], env=env, cwd=tmp_path).check()
    console = outcome.stdout + outcome.stderr
    stops = re.findall(r"rank \d stops at step (\d+)", console)
    assert len(stops) == NODES, outcome.explain()
    [step] = set(stops)
    assert re.search(rf"at step {step}, .* \d+ ms; rank \d ", console)
    assert f"all ranks: step {step}, {tmp_path}" in console, outcome.explain()
    assert not list((tmp_path / "state").rglob("checkpoint.json*"))  # the job has succeeded
    resumed = rf"rank \d begins at step {int(step) + 1}, resumes from {re.escape(str(tmp_path))}\n"
    assert len(re.findall(resumed, console)) == NODES, console
    assert len(re.findall(r"rank \d is done", console)) == NODES, console
