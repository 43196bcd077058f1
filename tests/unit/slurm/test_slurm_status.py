"""An app whose job waits, perhaps to go on: what is shown of it, asked of it, and what a stop says."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torchx.specs import AppDef, AppState

from muster._shared.contract import AskKind, AskOutcome
from muster._shared.control import CommandExit, ControlError
from muster._shared.job_view import JobState, JobStatus
from muster._shared.reports import Answer
from muster.schedulers.adapter import AgentReports, JobFacts, LogRequest
from muster.schedulers.runner.app_codec import dump_app
from muster.schedulers.slurm import client, create_scheduler, logs, running_apps
from muster.schedulers.slurm.client import QueueEntry
from muster.schedulers.supervision.app_folder import AppFolder, AppRecord
from muster.schedulers.supervision.machine import Machine
from muster.schedulers.supervision.state import ReplicaId, ReplicaState, SupervisedApp
from muster.schedulers.wording.reasons import Code, Reason, Reasons
from muster.schedulers.wording.words import word_all

START_S = 2000.0
SENT: Reasons = (Reason(code=Code.SLURM_SIGNALLED, signal="SIGTERM"),)
LOST: Reasons = (Reason(code=Code.NODES_LOST, hosts=("n2",)),)


@pytest.mark.parametrize(
    ("slurm_state", "written_s", "is_shown"),
    [("RUNNING", 1990.0, False), ("RUNNING", 2001.0, True), ("COMPLETING", 2001.0, True)],
)
def test_the_status_file_of_the_run_before_is_not_shown(
    tmp_path: Path, slurm_state: str, written_s: float, *, is_shown: bool
) -> None:
    entry = QueueEntry(job_id="7", state=slurm_state, start_s=START_S)
    job = JobFacts(status=JobStatus(state=JobState.ENDED, time_s=written_s))
    facts = running_apps.build_facts(build_app(tmp_path, entry), AgentReports(jobs={"w": job}), None)
    assert ("w" in facts.jobs) is is_shown


def build_app(folder: Path, entry: QueueEntry, *reasons: Reasons) -> running_apps.App:
    nodes = {}
    for index, each in enumerate(reasons):
        replica = ReplicaId("w", index)
        app = SupervisedApp(replicas={replica: ReplicaState()}, reasons=each)
        record = AppRecord(app=app, machine=Machine.here(), submitted_s=1.0)
        nodes[replica] = running_apps.NodeState(node=f"n{index}", record=record)
    description = dump_app(AppDef(name="a", roles=[]))
    spec: Any = SimpleNamespace(app_id="a", details={}, roles=(), folder=str(folder), description=description)
    return running_apps.App(
        spec=spec, folder=AppFolder(folder), entry=entry, runs=("7.0",), nodes=nodes, is_cancelled=False
    )


@pytest.mark.parametrize(
    ("reasons", "why"),
    [
        ((SENT, LOST), LOST),
        ((SENT, (Reason(code=Code.OTHER_PREEMPTED),)), SENT),
        (((), ()), ()),
        ((), ()),
    ],
)
def test_a_job_that_waits_says_why_the_run_before_ended(
    tmp_path: Path, reasons: tuple[Reasons, ...], why: Reasons
) -> None:
    entry = QueueEntry(job_id="7", state="PENDING", reason="Priority")
    facts = running_apps.build_facts(build_app(tmp_path, entry, *reasons), AgentReports(), None)
    waits, incarnation, *before = facts.reasons
    assert (waits.code, waits.job, waits.word) == (Code.SLURM_WAITS, "7", "Priority")
    assert incarnation == Reason(code=Code.INCARNATION, count=2)
    assert before == ([Reason(code=Code.BEFORE, causes=why)] if why else [])


@pytest.mark.parametrize(
    ("state", "since_s"), [("PENDING", 500.0), ("RUNNING", None), ("COMPLETED", 900.0), ("REQUEUE_HOLD", 500.0)]
)
def test_the_status_says_since_when_it_waits(tmp_path: Path, state: str, since_s: float | None) -> None:
    """A job that is queued again waits since then."""
    entry = QueueEntry(job_id="7", state=state, submitted_s=500.0, start_s=START_S, end_s=900.0)
    facts = running_apps.build_facts(build_app(tmp_path, entry), AgentReports(), 100.0)
    assert (facts.since_s, facts.submitted_s) == (since_s, 100.0)


@pytest.fixture
def scheduler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Its app waits in the queue."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    made = create_scheduler("test")
    app = build_app(tmp_path, QueueEntry(job_id="7", state="PENDING", reason="Priority"))
    app.spec.app_id, app.spec.grace_s, app.spec.roles = "app", 5.0, (SimpleNamespace(name="w", runs_agent=True),)
    monkeypatch.setattr(made, "_open_app", lambda _app_id: app)
    monkeypatch.setattr(made, "_wait_ended", lambda _app_id, _limit_s: True)
    monkeypatch.setattr(client, "list_jobs", lambda _name, _ids: [app.entry])
    yield made
    made.close()


@pytest.mark.parametrize(
    ("kept", "end"),
    [
        (['{"number": 1, "step": 9, "path": "old"}', '{"number": 2, "step": 7, "path": "/s/7"}'], "step 7 (/s/7)"),
        (["torn"], ""),
        (["[]"], ""),
        ([], ""),
    ],
)
def test_a_job_that_waits_is_cancelled_and_its_last_checkpoint_is_named(
    scheduler: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: list[str], end: str
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(client, "cancel", calls.append)
    monkeypatch.setattr(client, "update_job", lambda job_id, setting: calls.append(f"{job_id} {setting}"))
    AppFolder(tmp_path).state_dir.mkdir(parents=True)
    for index, text in enumerate(kept):
        path = AppFolder(tmp_path).role_dir("w") / f"run{index}" / "checkpoint.json"
        path.parent.mkdir(parents=True)
        path.write_text(text)
    answer = scheduler.stop_app("app", 60.0)
    assert answer.outcome is AskOutcome.DONE
    assert answer.line == "it was waiting in the queue and is cancelled" + (
        f"; its last checkpoint is {end}" if end else ""
    )
    assert calls == ["7 Requeue=0", "7"]
    app = replace(scheduler._open_app("app"), is_cancelled=True)
    assert running_apps.explain_end(app, AppState.CANCELLED) == (Reason(code=Code.STOPPED),)
    app.folder.write_request("cancel")
    assert running_apps.explain_end(app, AppState.CANCELLED) == (Reason(code=Code.CANCELLED),)


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_stop_that_cannot_be_asked_for_is_withdrawn_if_no_node_has_left(
    scheduler: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, goes_on: bool
) -> None:
    """The job was cancelled without its ranks having saved."""
    calls: list[str] = []
    monkeypatch.setattr(client, "cancel", calls.append)
    monkeypatch.setattr(client, "update_job", lambda _job_id, setting: calls.append(setting))
    app = replace(scheduler._open_app("app"), entry=QueueEntry(job_id="7", state="RUNNING"))
    app.spec.details = {"continues": "requeue"}
    app.folder.state_dir.mkdir(parents=True)
    monkeypatch.setattr(scheduler, "_open_app", lambda _app_id: app)
    monkeypatch.setattr(scheduler, "_find_app", lambda _app_id: app if goes_on else None)
    unreached = Answer(outcome=AskOutcome.UNREACHED, line="n0 cannot be asked")
    monkeypatch.setattr("muster.schedulers.slurm.scheduler._ask", lambda *_: unreached)
    monkeypatch.setattr(client, "list_jobs", lambda _name, _ids: [app.entry])
    answer = scheduler.stop_app("app", 0.0)
    assert answer.outcome is (AskOutcome.UNREACHED if goes_on else AskOutcome.DONE)
    assert calls == ["Requeue=0", "Requeue=1" if goes_on else "7"]
    assert app.folder.request_file.exists() is not goes_on


def test_a_job_that_waits_cannot_be_asked(scheduler: Any) -> None:
    with pytest.raises(ControlError) as caught:
        scheduler.ask_app("app", AskKind.STACKS, 60.0)
    waits = "job 7 waits: jobs with a higher priority are before it (Priority)"
    assert (str(caught.value), caught.value.exit_code) == (f"app is PENDING: {waits}", CommandExit.REFUSED)


@pytest.mark.parametrize(
    ("state", "runs", "shown"),
    [("FAILED", (), True), ("FAILED", ("7.0",), False), ("RUNNING", (), False)],
)
def test_what_srun_says_is_shown_if_no_task_could_start(
    scheduler: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, runs: tuple[str, ...], *, shown: bool
) -> None:
    app = replace(build_app(tmp_path, QueueEntry(job_id="7", state=state)), runs=runs)
    log = AppFolder(tmp_path).state_dir / "slurm.log"
    log.parent.mkdir(parents=True)
    log.write_text("".join(f"line {number}\n\n" for number in range(30)))
    monkeypatch.setattr(scheduler, "_find_app", lambda _app_id: app)
    asked = LogRequest(role="w", index=0, pattern=re.compile("line .9"))
    lines = list(scheduler._add_start_errors("app", iter(["said\n"]), asked))
    assert lines == ["said\n", *(["slurm.log: line 29\n"] if shown else [])]


def test_nodes_that_were_started_again_say_so_each(tmp_path: Path) -> None:
    ends = [
        (
            Reason(code=Code.AGENT_ENDED, replica=f"w/{index}", exit_code=137),
            Reason(code=Code.STARTED_AGAIN, count=1, total=2),
        )
        for index in range(2)
    ]
    app = build_app(tmp_path, QueueEntry(job_id="7", state="RUNNING"), *ends)
    assert word_all(running_apps._list_reasons(app, AppState.RUNNING, set())).count("1 of 2 retries") == 2


def test_a_log_on_a_node_that_is_no_file_is_no_log(tmp_path, monkeypatch) -> None:
    os.mkfifo(tmp_path / "a.log")
    (tmp_path / "b.log").write_text("b\n")

    def run_here(job_id: str, node: str, command: list[str], *_: object) -> tuple[int, str, str]:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
        return done.returncode, done.stdout, done.stderr

    monkeypatch.setattr(client, "run_on_node", run_here)
    app = SimpleNamespace(entry=SimpleNamespace(job_id="1"), spec=SimpleNamespace(python=sys.executable))
    wanted = [(str(tmp_path / name), 0, 9) for name in ("a.log", "b.log")]
    assert logs.read_there(app, "n1", wanted) == [(None, b""), (2, b"b\n")]
