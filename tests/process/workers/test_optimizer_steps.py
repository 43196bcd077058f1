"""Steps by optimizer, with torch itself: what the agent shows of workers that never call `muster.worker.step`."""

import json
import signal
import sys
from pathlib import Path

import pytest
from harness import Tree, run_tree
from launchers import MOSTLY_WARM

pytestmark = pytest.mark.torch

PROGRAM = Path(__file__).parents[2] / "programs" / "optimizer_steps.py"
RANKS = 6


def build_command(nproc: int, *words: str) -> list[str]:
    return [sys.executable, "-m", "muster.agent", "--standalone", "--nproc-per-node", str(nproc), *words]


@pytest.mark.parametrize("start", MOSTLY_WARM)
def test_each_rank_is_as_far_as_its_busiest_optimizer_unless_it_says_so_itself(start: str) -> None:
    with Tree(build_command(RANKS, "--start", start, "--tee", "3", str(PROGRAM))) as tree:
        tree.wait_for_line("trained", count=RANKS, timeout_s=180)
        tree.send(signal.SIGUSR2, next(pid for pid in tree.children() if pid))
        tree.wait_for_line(r"rank 4: step 7 \(by optimizer\)", stream="stderr")
        shown = [line for line in tree.stderr.splitlines() if ": step " in line]
    expected = ["0: step 5 (by", "1: step 6 (by", "2: step 2 of 9", "3: step 4 (by", "4: step 7 (by"]
    assert all(any(f"rank {each}" in line for line in shown) for each in expected), shown
    assert len(shown) == len(expected), shown  # rank 5 has no torch


@pytest.mark.long
@pytest.mark.parametrize(
    "words",
    [
        ["--start", "cold"],
        ["--no-python", sys.executable],
        ["--hang-timeout", "0", "--no-python", sys.executable],
    ],
    ids=["script", "command", "command-unwatched"],
)
def test_the_report_of_a_failure_has_the_step(words: list[str], tmp_path: Path) -> None:
    outcome = run_tree(build_command(1, "--log-dir", str(tmp_path), *words, str(PROGRAM), "raise"))
    assert outcome.exit_code == 1, outcome.explain()
    assert "(by optimizer)" in outcome.stderr, outcome.explain()
    (report,) = tmp_path.glob("*/report.json")
    (failure,) = json.loads(report.read_text())["failures"]
    assert (failure["step"], failure["optimizer_steps"]) == (None, 5)
