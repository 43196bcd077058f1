"""A node of a local_cwd job is preempted: all ranks stop at one step, and the job goes on there without a retry."""

import os
import re
import sys
from pathlib import Path

import pytest
from harness import run_tree

PROGRAM = str(Path(__file__).parents[2] / "programs" / "drain_steps.py")
TORCHX = Path(sys.executable).with_name("torchx")


NODES = 3


def run(tmp_path: Path, nodes: str) -> tuple[str, str]:
    """Run the job to its success: the console, and the step at which all ranks stopped."""
    env = os.environ | {"XDG_STATE_HOME": str(tmp_path / "state"), "VIRTUAL_ENV": str(TORCHX.parent.parent)}
    command = [str(TORCHX), "run", "-s", "local_cwd", "dist.ddp", "-j", nodes, "--max_retries", "0", "--start", "cold"]
    command += ["--rdzv_conf", "last_call_timeout=60"]  # the first world has all nodes
    outcome = run_tree(
        [*command, "--script", PROGRAM, "--", str(tmp_path), "200"], env=env, cwd=tmp_path, timeout_s=150
    )
    assert (outcome.exit_code, outcome.leftovers) == (0, ()), outcome.explain()
    console = outcome.stdout + outcome.stderr
    stops = re.findall(r"rank \d stops at step (\d+)", console)
    assert len(stops) == NODES, outcome.explain()
    [step] = set(stops)
    assert re.search(rf"at step {step}, .* \d+ ms; rank \d ", console)
    assert f"all ranks: step {step}, {tmp_path}" in console, outcome.explain()
    assert len(re.findall(r"rank \d is done", console)) >= NODES - 1, outcome.explain()
    assert not list((tmp_path / "state").rglob("checkpoint.json*"))  # the job has succeeded
    return console, step


def test_a_preempted_job_goes_on_without_retries(tmp_path: Path) -> None:
    console, step = run(tmp_path, f"{NODES}x1")
    resumed = rf"rank \d begins at step {int(step) + 1}, resumes from {re.escape(str(tmp_path))}\n"
    assert len(re.findall(resumed, console)) == NODES, console
    assert len(re.findall(r"rank \d is done", console)) == NODES, console


@pytest.mark.long
def test_the_others_of_an_elastic_job_go_on_while_the_node_is_replaced(tmp_path: Path) -> None:
    console, step = run(tmp_path, f"1:{NODES}x1")
    assert f"after step {step}: the " in " ".join(console.split()), console
    resumed = rf"rank [01] begins at step {int(step) + 1}, resumes from {re.escape(str(tmp_path))}\n"
    assert len(re.findall(resumed, console)) >= NODES - 1, console
