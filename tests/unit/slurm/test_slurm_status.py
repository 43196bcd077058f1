"""What is shown of an app whose job Slurm has queued again: nothing that agents said of the run before."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from muster._shared.job_view import JobState, JobStatus
from muster.schedulers.adapter import AgentWords, JobFacts
from muster.schedulers.slurm import live
from muster.schedulers.slurm.client import QueueEntry
from muster.schedulers.supervision.app_folder import AppFolder, AppRecord
from muster.schedulers.supervision.machine import Machine
from muster.schedulers.supervision.state import ReplicaId, ReplicaState, SupervisedApp

START_S = 2000.0


@pytest.mark.parametrize(
    ("slurm_state", "written_s", "is_shown"),
    [("RUNNING", 1990.0, False), ("RUNNING", 2001.0, True), ("COMPLETING", 2001.0, True)],
)
def test_the_status_file_of_the_run_before_is_not_shown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, slurm_state: str, written_s: float, *, is_shown: bool
) -> None:
    combined: dict[str, Any] = {}
    monkeypatch.setattr(live, "combine_facts", lambda _spec, told, **_more: combined.update(told.jobs))
    entry = QueueEntry(job_id="7", state=slurm_state, start_s=START_S)
    job = JobFacts(status=JobStatus(state=JobState.ENDED, time_s=written_s))
    live.build_facts(build_app(tmp_path, entry), AgentWords(jobs={"w": job}), None)
    assert ("w" in combined) is is_shown


def build_app(folder: Path, entry: QueueEntry, *reasons: str) -> live.App:
    nodes = {}
    for index, reason in enumerate(reasons):
        replica = ReplicaId("w", index)
        app = SupervisedApp(replicas={replica: ReplicaState()}, reason=reason)
        record = AppRecord(app=app, machine=Machine.here(), submitted_s=1.0)
        nodes[replica] = live.NodeState(node=f"n{index}", record=record)
    spec: Any = SimpleNamespace(details={}, roles=())
    return live.App(spec=spec, folder=AppFolder(folder), entry=entry, runs=("7.0",), nodes=nodes, is_cancelled=False)


@pytest.mark.parametrize(
    ("reasons", "why"),
    [
        (("Slurm sent SIGTERM", "Slurm has lost node n2"), "; the one before ended: Slurm has lost node n2"),
        (("Slurm sent SIGUSR1", "preempted: another node was"), "; the one before ended: Slurm sent SIGUSR1"),
        (("", ""), ""),
        ((), ""),
    ],
)
def test_a_job_that_waits_says_why_the_run_before_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, reasons: tuple[str, ...], why: str
) -> None:
    messages: list[str] = []
    monkeypatch.setattr(live, "combine_facts", lambda _spec, _told, **more: messages.extend(more["messages"]))
    entry = QueueEntry(job_id="7", state="PENDING", reason="Priority")
    live.build_facts(build_app(tmp_path, entry, *reasons), AgentWords(), None)
    waits = "job 7 waits: jobs with a higher priority are before it (Priority)"
    assert "; ".join(messages) == f"{waits}; incarnation 2{why}"
