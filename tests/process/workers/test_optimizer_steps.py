"""Steps by optimizer, with torch itself: what the agent shows of workers that never call `muster.worker.step`."""

import signal

import pytest
from harness import AGENT, PROGRAMS, Tree
from launchers import MOSTLY_WARM

pytestmark = pytest.mark.torch

PROGRAM = PROGRAMS / "optimizer_steps.py"
RANKS = 6


def build_command(nproc: int, *words: str) -> list[str]:
    return [*AGENT, "--standalone", "--nproc-per-node", str(nproc), *words]


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
