"""`muster status` and `muster top` of agents that were started by hand: their log folder says how the job is doing."""

import json
import os
import re
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from harness import AGENT, Tree, wait_until

from muster._shared.control import CommandExit
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

    def start(*words: str, run_id: str = "job7", keeps: str = "3", flags: Sequence[str] = ()) -> Tree:
        every = ["--nproc-per-node", "2", "--rdzv-id", run_id, "--log-dir", str(tmp_path / "logs"), "-r", keeps]
        return Tree([*AGENT, *every, *flags, str(script), *words])

    return start


def read(folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    capsys.readouterr()
    return commands.main(["status", str(folder)]), capsys.readouterr().out


ENDED = [
    ("TIMEOUT", 0.0, "; Slurm ended job 7: its time limit is over (TIMEOUT)"),
    ("CANCELLED", 0.0, "; Slurm ended job 7: a person or a program cancelled it with scancel (CANCELLED)"),
    ("TIMEOUT", -600.0, ""),  # of a later run: a job that is queued again keeps its id
    ("RUNNING", 0.0, ""),
]


def test_a_job_of_slurm_that_runs_and_is_stopped(start, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    logs = tmp_path / "logs"
    run = logs / "job7"
    with start("100000", "0") as agent:
        wait_until(lambda: "step 2" in read(logs, capsys)[1] if logs.exists() else False, what="a step in the status")
        code, line = read(run, capsys)
        assert code == 10
        assert line.startswith(f"{run}  RUNNING: attempt 0, ")
        assert commands.main(["top", "--once", str(logs)]) == 10
        assert "of 500" in capsys.readouterr().out
        assert commands.main(["stop", str(logs)]) == CommandExit.USAGE
        said = capsys.readouterr().err
        assert "needs an app" in said
        agent.send(signal.SIGTERM)
        agent.wait().check(143)
    for state, ended_ago_s, why in ENDED:
        entry = client.QueueEntry(job_id="7", state=state, end_s=time.time() - ended_ago_s)
        monkeypatch.setattr(client, "find_ended", {"7": entry}.__getitem__)
        code, line = read(logs, capsys)
        assert (code, f"agents received SIGTERM{why}; ended at " in line) == (7, True), line
    rest = f"`muster log {run} --attempt N` prints the output of all ranks in attempt N"
    code, printed, said = read_log(capsys, str(run), "--failed")
    assert (code, printed, f"it is CANCELLED; {rest}" in said) == (CommandExit.REFUSED, "", True)


def test_jobs_that_have_ended_the_newest_is_shown_with_the_output_of_the_rank_that_failed(start, tmp_path, capsys):
    logs = tmp_path / "logs"
    with start("3", "0", run_id="good") as agent:
        agent.wait().check()
    code, line = read(logs, capsys)
    assert code == 0
    assert line.startswith(f"{logs / 'good'}  SUCCEEDED: ended at ")
    with start("3", "9") as agent:
        agent.wait().check(1)
    code, line = read(logs, capsys)
    assert code == 1
    assert f"{logs / 'job7'}  FAILED: ranks 0-1 " in line
    assert commands.main(["status", "--json", str(logs)]) == 1
    assert json.loads(capsys.readouterr().out)["state"] == "FAILED"
    check_output_of_the_rank_that_failed(logs / "job7", capsys)


def read_log(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    capsys.readouterr()
    code = commands.main(["log", *words])
    return code, *capsys.readouterr()


def check_output_of_the_rank_that_failed(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder was refused, with advice for jobs that run."""
    run = str(path)
    for folder in (run, str(path.parent)):
        code, out, err = read_log(capsys, folder, "--failed")
        assert (code, out) == (0, "step 0\nstep 1\nstep 2\n")
        assert err in [f"muster: the root cause: rank {rank}, attempt 0\n" for rank in (0, 1)]
    assert read_log(capsys, run, "--rank", "1", "--grep", "2") == (0, "step 2\n", "")
    assert read_log(capsys, run, "-f", "--rank", "1") == (0, "step 0\nstep 1\nstep 2\n", "")
    assert "ranks 0-1" in read_log(capsys, run, "--rank", "5")[2]
    where = "the agents' own output is on the console on which they were started"
    line = f"muster: {where}; `--failed`, `--rank N` and `--attempt N` print the output of ranks\n"
    assert read_log(capsys, run) == (CommandExit.USAGE, "", line)
    code, printed, said = read_log(capsys, run, "--failed", "--role", "job7")
    assert (code, printed, "--role and --node" in said) == (CommandExit.USAGE, "", True)
    check_a_rank_of_a_node_with_a_folder_of_its_own(path, capsys)


def check_a_rank_of_a_node_with_a_folder_of_its_own(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = json.loads((run / "report.json").read_text())
    report["failures"] = [{**each, "global_rank": 7} for each in report["failures"][:1]]
    (run / "report.json").write_text(json.dumps(report))
    events = (run / "events.jsonl").read_text()
    (run / "events.jsonl").write_text(re.sub(r'"world_size": ?2\b', '"world_size": 8', events))
    code, _, err = read_log(capsys, str(run), "--failed")
    assert code == CommandExit.REFUSED
    assert err.startswith(f"muster: the root cause: rank 7, attempt 0\nmuster: {run} has no output of rank 7: ")
    assert "; this is known of the failure: ranks 0-1 f" in err


def test_a_rank_whose_output_went_to_the_console(start, tmp_path, capsys):
    run = tmp_path / "logs" / "job7"
    with start("x", "9", keeps="0") as agent:
        agent.wait()
    why = "muster-agent writes it to files only with `--tee 3` or `-r 3`, and each node to its own `--log-dir`"
    code, out, err = read_log(capsys, str(run), "--failed")
    root, missing = err.splitlines()
    rank = root.removesuffix(", attempt 0").rpartition(" ")[2]
    assert f"of rank {rank}: {why}; " in missing
    assert code == 0
    assert out.endswith("ValueError: invalid literal for int() with base 10: 'x'\n")
    (run / "report.json").unlink()
    code, _, err = read_log(capsys, str(run), "--failed")
    lines = [f"muster: {run} has no output of rank {rank}: {why}" for rank in (0, 1)]
    assert code == CommandExit.REFUSED
    assert err.splitlines()[1] in lines
    code, printed, said = read_log(capsys, str(run), "--attempt", "0")
    assert (code, printed, said.endswith(f": {why}\n")) == (CommandExit.REFUSED, "", True)


def test_agents_that_were_killed_leave_a_job_that_is_unknown(start, tmp_path, capsys):
    run = tmp_path / "logs" / "job7"
    with start("100000", "0") as agent:
        wait_until((run / "status.json").exists, what="the status")
        (child,) = agent.children()  # the guard's
        agent.send(signal.SIGKILL, child)
        agent.wait()
    for path in run.glob("*.json*"):
        os.utime(path, (time.time() - 120, time.time() - 120))
    code, line = read(run, capsys)
    assert code == 8
    assert "UNKNOWN: node 0 " in line
    assert " has ended; since " in line


@pytest.mark.parametrize("words", [["status"], ["top", "--once"], ["events"], ["timeline"], ["log", "--failed"]])
def test_a_job_without_a_record_has_a_line(tmp_path, capsys, words):
    """The commands printed a traceback."""
    path = tmp_path / "job7" / "events.jsonl"
    path.parent.mkdir()
    path.touch()
    assert commands.main([*words, str(tmp_path)]) == CommandExit.REFUSED
    printed, said = capsys.readouterr()
    assert (printed, said.count("\n"), f"{path} has no records" in said) == ("", 1, True)


def test_a_folder_without_a_job_is_refused(tmp_path, capsys):
    assert commands.main(["status", str(tmp_path)]) == CommandExit.REFUSED
    assert f"{tmp_path} has no events.jsonl" in capsys.readouterr().err
