"""The main job with a real process group, again and again (`make soak`: with both cores busy)."""

import os
import re
import sys
from pathlib import Path

import pytest
from harness import run_tree
from launchers import START_FLAGS

REDUCE = str(Path(__file__).parent.parent / "programs" / "agent" / "reduce.py")
ALARMING = re.compile(r"Error|Exception|Traceback|frame #")

pytestmark = [pytest.mark.soak, pytest.mark.torch]


def test_two_nodes_of_two_workers_succeed_and_leave_nothing(tmp_path: Path) -> None:
    torchx = Path(sys.executable).with_name("torchx")
    environment = os.environ | {"XDG_STATE_HOME": str(tmp_path), "VIRTUAL_ENV": str(torchx.parent.parent)}
    command = [str(torchx), "run", "-s", "local_cwd", "dist.ddp", "-j", "2x2", "--script", REDUCE, *START_FLAGS]
    outcome = run_tree(command, env=environment, cwd=tmp_path, timeout_s=170)
    assert (outcome.exit_code, outcome.leftovers) == (0, ()), outcome.explain()
    console = outcome.stdout + outcome.stderr
    for rank in range(4):
        assert f"rank {rank} of 4 got 10" in console, outcome.explain()
    assert [line for line in console.splitlines() if ALARMING.search(line)] == []
