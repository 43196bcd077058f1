"""Jobs that keep snapshots, disturbed in every way that a seed chooses: see `snapshot_runs`.

MUSTER_SNAPSHOT_RUNS=0:200 python -m pytest -n 4 tests/fault/test_snapshot_runs.py   # seeds 0 to 199, under load
MUSTER_SNAPSHOT_RUNS=17:1 python -m pytest tests/fault/test_snapshot_runs.py         # seed 17 again
"""

import os
from pathlib import Path

import pytest
from snapshot_runs import KINDS, Run, choose_plan

FIRST, COUNT = map(int, os.environ.get("MUSTER_SNAPSHOT_RUNS", "0:10").split(":"))

pytestmark = [pytest.mark.long, pytest.mark.torch, pytest.mark.timeout(400)]


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(seed, id=f"{seed}-{KINDS[seed % len(KINDS)].replace(' ', '-')}")
        for seed in range(FIRST, FIRST + COUNT)
    ],
)
def test_a_disturbed_job_ends_with_the_bits_of_one_that_was_not(seed: int, tmp_path: Path) -> None:
    Run(tmp_path, choose_plan(seed)).go()
