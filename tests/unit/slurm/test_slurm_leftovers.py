"""When an app of Slurm's has ended, so that `muster prune` may remove it: what may still run stays."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from muster.schedulers.slurm import running_apps
from muster.schedulers.slurm.client import QueueEntry
from muster.schedulers.slurm.node import JOBS_NAME
from muster.schedulers.supervision.app_folder import AppFolder

ADDED_S = 1000.0


def find_end_s(folder: Path, entry: QueueEntry | None, ended: tuple[float | None, ...]) -> float | None:
    nodes = {rank: SimpleNamespace(record=SimpleNamespace(ended_s=each)) for rank, each in enumerate(ended)}
    return running_apps.find_end_s(SimpleNamespace(folder=AppFolder(folder), entry=entry, nodes=nodes), ADDED_S)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("entry", "end_s"),
    [
        (QueueEntry(job_id="7", state="RUNNING", end_s=5000.0), None),
        (QueueEntry(job_id="7", state="PENDING"), None),
        (QueueEntry(job_id="7", state="COMPLETED", end_s=2000.0), 2000.0),
        (QueueEntry(job_id="7", state="CANCELLED"), ADDED_S),
    ],
)
def test_slurm_says_whether_it_has_ended(tmp_path: Path, entry: QueueEntry, end_s: float | None) -> None:
    assert find_end_s(tmp_path, entry, ()) == end_s


@pytest.mark.parametrize(("ended", "end_s"), [((), None), ((3000.0, 2000.0), 3000.0), ((3000.0, None), None)])
def test_of_a_job_that_slurm_does_not_know_its_nodes_say_it(
    tmp_path: Path, ended: tuple[float | None, ...], end_s: float | None
) -> None:
    """It may be a job of another cluster with the same home folder."""
    state = AppFolder(tmp_path).state_dir
    state.mkdir(parents=True)
    (state / JOBS_NAME).write_text("7\n")
    assert find_end_s(tmp_path, None, ended) == end_s


def test_a_submission_that_was_killed_has_ended_a_day_later(tmp_path: Path) -> None:
    assert find_end_s(tmp_path, None, ()) == ADDED_S + 86400
