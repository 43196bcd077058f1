"""What agents of version 19df633 wrote down of a job, and what an agent writes today: the same names and fields.

Users' own programs read `events.jsonl`, `report.json`, torch's `error.json` and the last words of a pod. A later
version may add to them; what is listed here stays.
"""

import json
import sys
from pathlib import Path

import golden_state
import pytest
from harness import run_tree

REPORTS = golden_state.DATA / "reports"
EVENT = "time_s monotonic_s node node_index round attempt what ranks duration_s detail"
DETAILS = {
    "agent_started": "pid start",
    "round_formed": "world_size nodes master restarts_left",
    "template_ready": "modules import_s rss_bytes pss_bytes",
    "workers_parked": "count duration_s",
    "worker_released": "local_rank pid how",
    "workers_started": "",
    "workers_idle": "",
    "worker_exited": "code",
    "worker_failed": "reason",
    "round_broken": "kind reason",
    "stacks_taken": "",
    "workers_stopped": "",
    "signal": "name guard_died",
    "rendezvous_lost": "reason",
    "job_ended": "succeeded",
    "agent_ended": "exit_code",
}
"""By `what`: the fields of `detail`."""
NEWER = {
    "steps_done": "done is_counted ago_s",
    "clock_compared": "member leader ahead_s uncertainty_s",
    "nodes_awaited": "reason",
}
"""Since schema 2: the golden records have none."""

STORIES = {
    "succeeded": "agent_started round_formed worker_released workers_started worker_exited job_ended agent_ended",
    "restarted": "worker_exited worker_failed round_broken workers_stopped round_formed workers_started job_ended",
    "warm": "template_ready workers_parked worker_released workers_started job_ended agent_ended",
    "failed": "worker_failed round_broken workers_stopped round_formed workers_started worker_failed job_ended",
    "hung": "workers_started workers_idle round_broken stacks_taken workers_stopped job_ended agent_ended",
    "node-lost": "workers_started round_broken workers_stopped round_formed workers_started job_ended agent_ended",
    "node-gone": "workers_started signal round_broken workers_stopped rendezvous_lost agent_ended",
    "preempted": "workers_started signal workers_stopped agent_ended",
    "oom": "workers_started worker_exited worker_failed round_broken workers_stopped job_ended agent_ended",
}
"""What must be found in this order; of all nodes together."""

REPORT = "run_id reason attempt max_restarts failures stacks schema"
FAILURE = (
    "node node_index host local_rank global_rank attempt round pid time_s age_s exit_code signal reason exception "
    "traceback error_file stderr_tail log_path oom stopped_by_us collateral early"
)
ROOT_CAUSES = {
    "failed": {"global_rank": 1, "node_index": 1, "exit_code": 1, "exception": "ValueError: bad batch 17"},
    "hung": {"global_rank": 0, "reason": "used no CPU time and wrote no line for 1 s (--hang-timeout)"},
    "oom": {"global_rank": 1, "exit_code": None, "signal": "SIGKILL"},
}


def read_events(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]


def check_events(records: list[dict]) -> None:
    for record in records:
        assert set(EVENT.split()) <= record.keys()
        assert set((DETAILS | NEWER)[record["what"]].split()) <= record["detail"].keys(), record


def check_story(records: list[dict], story: str) -> None:
    told = iter(record["what"] for record in records)
    assert all(what in told for what in story.split()), [record["what"] for record in records]


def check_report(report: dict, root_cause: dict) -> None:
    """Whole, the root cause first."""
    assert set(REPORT.split()) <= report.keys()
    assert report["schema"] == 1
    root, *others = report["failures"]
    assert all(set(FAILURE.split()) <= failure.keys() for failure in report["failures"])
    assert {key: root[key] for key in root_cause} == root_cause
    assert (root["collateral"], [each["collateral"] for each in others]) == (False, [True])


@pytest.mark.parametrize("job", STORIES)
def test_golden_events(job):
    records = read_events(golden_state.read_report(job, "events.jsonl"))
    check_events(records)
    check_story(records, STORIES[job])


def test_every_record_is_in_the_golden_events():
    found = {record["what"] for path in REPORTS.glob("*/events.jsonl") for record in read_events(path.read_text())}
    assert found == DETAILS.keys()


@pytest.mark.parametrize("job", ROOT_CAUSES)
def test_golden_reports(job):
    check_report(json.loads(golden_state.read_report(job, "report.json")), ROOT_CAUSES[job])


@pytest.mark.parametrize(
    ("job", "message"),
    [
        ("failed", "ValueError: bad batch 17"),
        ("hung", "used no CPU time and wrote no line for 1 s (--hang-timeout)"),
        ("oom", "killed by SIGKILL"),
    ],
)
def test_golden_error_files(job, message):
    check_error(json.loads(golden_state.read_report(job, "error.json")), message)


def check_error(error: dict, message: str) -> None:
    """In torch's format."""
    assert error["message"]["message"] == message
    assert {"py_callstack", "timestamp"} <= error["message"]["extraInfo"].keys()


@pytest.fixture
def job(tmp_path, monkeypatch):
    """Runs one node of two workers, as for the golden jobs of that name; returns its folder and its log folder."""
    monkeypatch.setenv("MUSTER_TERMINATION_LOG", str(tmp_path / "message"))
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))

    def run(word: str, *flags: str, exit_code: int) -> tuple[Path, Path]:
        words = ["--standalone", "--nproc-per-node", "2", "--log-dir", str(tmp_path), "--tee", "3"]
        script = str(golden_state.GOLDEN / "train.py")
        outcome = run_tree([sys.executable, "-m", "muster.agent", *words, *flags, script, word], cwd=tmp_path)
        assert (outcome.exit_code, outcome.leftovers) == (exit_code, ()), outcome.explain()
        return tmp_path, next(tmp_path.glob("*/events.jsonl")).parent

    return run


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("succeeded", ["--start", "cold"]),
        ("restarted", ["--start", "cold", "--max-restarts", "1"]),
        ("warm", ["--start", "warm", "--preload", "json"]),
    ],
)
def test_todays_events_tell_the_same(job, name, flags):
    _, logs = job("crash-once" if name == "restarted" else "done", *flags, exit_code=0)
    records = read_events((logs / "events.jsonl").read_text())
    check_events(records)
    check_story(records, STORIES[name])


def test_todays_failure_is_told_the_same(job):
    folder, logs = job("raise", "--start", "cold", exit_code=1)
    root_cause = {"global_rank": 1, "exit_code": 1, "exception": "ValueError: bad batch 17"}
    check_report(json.loads((logs / "report.json").read_text()), root_cause)
    check_error(json.loads((folder / "error.json").read_text()), "ValueError: bad batch 17")
    message = json.loads((folder / "message").read_text())
    golden = json.loads(golden_state.last_words("failed"))
    assert golden.keys() <= message.keys()
    # the optional ones are there only if they say something
    assert {key for key in golden["failures"][0] if key != "node_index"} <= message["failures"][0].keys()
