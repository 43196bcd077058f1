"""Faults of jobs that a program starts: whichever process is killed, nothing is left, and the caller learns why."""

import os
import signal
import sys
from pathlib import Path

import pytest
from harness import PROGRAMS, Tree
from launchers import run_api

CALLS = PROGRAMS / "elastic" / "calls.py"


def start(scenario: str, *args: str, folder: Path) -> Tree:
    env = {**os.environ, "TMPDIR": str(folder)}
    return Tree([sys.executable, str(CALLS), scenario, *args], env=env, cwd=folder)


def find_pids(tree: Tree) -> dict[str, int]:
    """The agent's, its guard's and one worker's process, once both workers run."""
    tree.wait_for_line("idle", count=2)
    (agent,) = tree.wait_for_line("^agent ")
    worker = tree.wait_for_line("^worker ", count=2)[0]
    pid = int(agent.split()[1])
    status = Path(f"/proc/{pid}/status").read_text()
    guard = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("PPid"))
    return {"agent": pid, "guard": guard, "worker": int(worker.split()[1])}


@pytest.mark.soak
def test_a_caller_that_is_killed_takes_the_job_along(tmp_path: Path) -> None:
    with start("idle", folder=tmp_path) as tree:
        find_pids(tree)
        tree.send(signal.SIGKILL)
        outcome = tree.wait()
    assert outcome.leftovers == (), outcome.explain()
    assert list(tmp_path.glob("muster_job_*")) == []


@pytest.mark.soak
@pytest.mark.parametrize(
    ("who", "line"),
    [
        *(
            (who, "AgentLost the job's muster process was killed; no process of the job is left")
            for who in ("agent", "guard")
        ),
        ("worker", "LaunchFailed the job failed: rank "),
    ],
)
def test_who_is_killed(who: str, line: str, tmp_path: Path) -> None:
    with start("idle", folder=tmp_path) as tree:
        tree.send(signal.SIGKILL, find_pids(tree)[who])
        outcome = tree.wait().check()
    assert outcome.stdout.splitlines()[-1].startswith(line), outcome.explain()
    assert list(tmp_path.glob("muster_job_*")) == []


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_result_of_a_gibibyte_does_not_pass_through_the_agent(tmp_path: Path) -> None:
    outcome = run_api("calls.py", "large", "1024", folder=tmp_path, timeout_s=500)
    assert outcome.stdout == "1024 MiB; the agent took less than 35 MB: True\n", outcome.explain()
    assert list(tmp_path.iterdir()) == []


def test_a_worker_that_is_killed_while_it_sends_its_result(tmp_path: Path) -> None:
    outcome = run_api("calls.py", "sending", folder=tmp_path)
    assert outcome.stdout.splitlines() == ["{0: 1, 1: 1} 1", "[(1, 'SIGKILL')]"], outcome.explain()
    assert list(tmp_path.glob("muster_job_*")) == []
