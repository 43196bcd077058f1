"""`muster status` and `muster top` of agents that were started by hand: their log folder says how the job is doing."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from harness import Tree, wait_until

from muster._shared.control import ExitCode
from muster.cli import commands
from muster.schedulers.slurm import client

SCRIPT = """\
import sys, time
from muster import worker
for step in range(int(sys.argv[1])):
    worker.step(step, total=500)
    print(f"step {step}", flush=True)
    time.sleep(0.02)
raise SystemExit(int(sys.argv[2]))
"""


@pytest.fixture
def start(tmp_path: Path):
    script = tmp_path / "steps.py"
    script.write_text(SCRIPT)

    def start(*words: str, run_id: str = "job7") -> Tree:
        flags = ["--nproc-per-node", "2", "--rdzv-id", run_id, "--log-dir", str(tmp_path / "logs"), "-r", "3"]
        return Tree([sys.executable, "-m", "muster.agent", *flags, str(script), *words])

    return start


def read(folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    capsys.readouterr()
    return commands.main(["status", str(folder)]), capsys.readouterr().out


def test_a_job_that_runs_and_is_stopped(start, tmp_path, capsys):
    logs = tmp_path / "logs"
    with start("500", "0") as agent:
        wait_until(lambda: "step 2" in read(logs, capsys)[1] if logs.exists() else False, what="a step in the status")
        code, line = read(logs / "job7", capsys)
        assert code == 10
        assert line.startswith(f"{logs / 'job7'}  RUNNING: attempt 0, no restarts allowed; 1 of 1 node runs; step ")
        assert commands.main(["top", "--once", str(logs)]) == 10
        assert "of 500" in capsys.readouterr().out
        assert commands.main(["stop", str(logs)]) == ExitCode.USAGE
        said = capsys.readouterr().err
        assert "is a folder, not an app; only `muster status`, `top`, `events` and `timeline` read a folder" in said
        agent.send(signal.SIGTERM)
        assert agent.wait().exit_code == 143
    assert read(logs, capsys)[0] == 7
    assert "CANCELLED: its agents received SIGTERM; ended at " in read(logs, capsys)[1]


@pytest.mark.parametrize(
    ("state", "ended_ago_s", "why"),
    [
        ("TIMEOUT", 0.0, "; Slurm ended job 7: its time limit is over (TIMEOUT)"),
        ("CANCELLED", 0.0, "; Slurm ended job 7: a person or a program cancelled it with scancel (CANCELLED)"),
        ("TIMEOUT", -600.0, ""),  # of a later run: a job that is queued again keeps its id
        ("RUNNING", 0.0, ""),
    ],
)
def test_a_slurm_job_by_hand_says_why_slurm_ended_it(start, tmp_path, capsys, monkeypatch, state, ended_ago_s, why):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    with start("500", "0") as agent:
        wait_until((tmp_path / "logs").exists, what="the log folder")
        wait_until(lambda: "step 2" in read(tmp_path / "logs", capsys)[1], what="a step")
        agent.send(signal.SIGTERM)
        assert agent.wait().exit_code == 143
    asked = []

    def find_ended(job_id):
        asked.append(job_id)
        return client.QueueEntry(job_id=job_id, state=state, end_s=time.time() - ended_ago_s)

    monkeypatch.setattr(client, "find_ended", find_ended)
    assert f"CANCELLED: its agents received SIGTERM{why}; ended at " in read(tmp_path / "logs", capsys)[1]
    assert asked == ["7"]


def test_jobs_that_have_ended_and_the_newest_is_shown(start, tmp_path, capsys):
    logs = tmp_path / "logs"
    with start("3", "0", run_id="good") as agent:
        assert agent.wait().exit_code == 0
    code, line = read(logs, capsys)
    assert code == 0
    assert line.startswith(f"{logs / 'good'}  SUCCEEDED: ended at ")
    with start("3", "9", run_id="bad") as agent:
        assert agent.wait().exit_code == 1
    code, line = read(logs, capsys)
    assert code == 1
    assert f"{logs / 'bad'}  FAILED: ranks 0-1 failed in the same way: exited with code 9; " in line
    assert commands.main(["status", "--json", str(logs)]) == 1
    assert json.loads(capsys.readouterr().out)["state"] == "FAILED"


def test_agents_that_were_killed_leave_a_job_that_is_unknown(start, tmp_path, capsys):
    run = tmp_path / "logs" / "job7"
    with start("500", "0") as agent:
        wait_until((run / "status.json").exists, what="the status")
        (child,) = agent.children()  # the guard's
        agent.send(signal.SIGKILL, child)
        agent.wait()
    for path in run.glob("*.json*"):
        os.utime(path, (time.time() - 120, time.time() - 120))
    code, line = read(run, capsys)
    assert code == 8
    assert "UNKNOWN: node 0 has written nothing for 2 min" in line
    assert ", and no record says that its agent has ended; since " in line


def test_a_folder_without_a_job_is_refused(tmp_path, capsys):
    assert commands.main(["status", str(tmp_path)]) == ExitCode.REFUSED
    assert f"{tmp_path} has no events.jsonl of a job" in capsys.readouterr().err
