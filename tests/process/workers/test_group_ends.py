"""Workers end whatever their process groups still do: torch alone hangs, or aborts the interpreter.

Without the wait of `hooks.groups`, `destroy_with_model` hangs each time in warm workers, `fail_and_destroy` each time,
and every second `leave_group` of cold workers aborts. The others do it now and then, on a busy machine.
"""

import os
import sys

import pytest
from harness import AGENT, PROGRAMS, Outcome, run_tree

pytest.importorskip("torch")

PROGRAM = PROGRAMS / "group_ends.py"
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
    return run_tree([*AGENT, *flags, *program, way], env=env, timeout_s=150)


SOAK = (pytest.mark.long, pytest.mark.soak, pytest.mark.slow)
FAILS = ("fail", "fail_and_destroy", "fail_and_exit")
SOONER = {
    ("warm", "destroy_with_model"): (),
    **dict.fromkeys([("cold", "leave_group"), ("cold", "fail_and_destroy")], SOAK[:1]),
}
ENDS = [
    *(
        (start, way)
        for start in STARTS
        for way in ("destroy_with_model", "leave_group", "leave_reduced", "gather_and_destroy")
    ),
    *((start, way) for start in ("cold", "warm") for way in ("accelerate", *FAILS)),
    *(("no-python", way) for way in FAILS[:2]),  # what `sys.exit` was called with is not seen
]


@pytest.mark.parametrize(("start", "way"), [pytest.param(*each, marks=SOONER.get(each, SOAK)) for each in ENDS])
def test_workers_end_with_a_collective_on_its_way(start: str, way: str) -> None:
    if way == "accelerate":
        pytest.importorskip("accelerate")
    outcome = run(start, way).check(1 if way in FAILS else 0)
    assert ("hung" if way in FAILS else "terminate called") not in outcome.stderr, outcome.explain()
    assert (way != "fail_and_destroy") or "ValueError: expected" in outcome.stderr, outcome.explain()
