"""Workers end whatever their process groups still do: torch alone hangs, or aborts the interpreter.

Without the wait of `hooks.groups`, `destroy_with_model` hangs each time in warm workers, `fail_and_destroy` each time,
and every second `leave_group` of cold workers aborts. The others do it now and then, on a busy machine.
"""

import os
import sys
from pathlib import Path

import pytest
from harness import Outcome, run_tree

pytest.importorskip("torch")

PROGRAM = Path(__file__).parents[2] / "programs" / "group_ends.py"
STARTS = {
    "cold": ("--start", "cold"),
    "warm": ("--start", "warm"),
    "run-path": ("--run-path",),
    "no-python": ("--no-python",),
    "unwatched": ("--start", "cold", "--hang-timeout", "0"),
}


def run(start: str, way: str) -> Outcome:
    program = (sys.executable, str(PROGRAM)) if start == "no-python" else (str(PROGRAM),)
    flags = ("--standalone", "--nproc-per-node", "2", "--shutdown-timeout", "2", *STARTS[start])
    env = {**os.environ, "ACCELERATE_USE_CPU": "1", "OMP_NUM_THREADS": "1"}
    return run_tree([sys.executable, "-m", "muster.agent", *flags, *program, way], env=env, timeout_s=150)


def check_success(outcome: Outcome) -> None:
    assert outcome.exit_code == 0, outcome.explain()
    assert "terminate called" not in outcome.stderr, outcome.explain()


@pytest.mark.parametrize(
    ("start", "way"), [("warm", "destroy_with_model"), pytest.param("cold", "leave_group", marks=pytest.mark.long)]
)
def test_a_group_with_a_collective_on_its_way_ends(start: str, way: str) -> None:
    check_success(run(start, way))


@pytest.mark.long
def test_a_failing_rank_ends_with_a_collective_that_is_never_joined() -> None:
    outcome = run("cold", "fail_and_destroy")
    assert outcome.exit_code == 1, outcome.explain()
    assert "ValueError: expected" in outcome.stderr, outcome.explain()


@pytest.mark.long
@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("way", ["destroy_with_model", "leave_group", "leave_reduced", "gather_and_destroy"])
def test_whatever_the_start_and_the_way(start: str, way: str) -> None:
    check_success(run(start, way))


@pytest.mark.long
@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.parametrize("start", ["cold", "warm"])
def test_accelerate_ends(start: str) -> None:
    pytest.importorskip("accelerate")
    check_success(run(start, "accelerate"))


@pytest.mark.long
@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.parametrize(
    ("start", "way"),
    [
        *((start, way) for start in ("cold", "warm") for way in ("fail", "fail_and_destroy", "fail_and_exit")),
        *(("no-python", way) for way in ("fail", "fail_and_destroy")),  # what `sys.exit` was called with is not seen
    ],
)
def test_a_failing_rank_ends(start: str, way: str) -> None:
    outcome = run(start, way)
    assert outcome.exit_code == 1, outcome.explain()
    assert "hung" not in outcome.stderr, outcome.explain()
