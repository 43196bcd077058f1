"""Today's code serves the jobs of `slurm` that version 502c44e left. A stand-in answers what Slurm answered then."""

import json
import logging
import os
import re
import sys
import threading
import time
from pathlib import Path

import golden_state
import pytest
from harness import wait_until
from torchx.runner import Runner, get_runner
from torchx.specs import AppState

from muster.schedulers.adapter import waiting_line

pytestmark = pytest.mark.torchx

QUEUE = golden_state.LATER / "slurm" / "squeue.json"
PROGRAM = """\
#!{python} -IS
import json, re, sys
name, *words = sys.argv[0].rpartition("/")[2], *sys.argv[1:]
if name == "squeue":
    told = json.load(open({queue!r})).get(words[words.index("--name") + 1])
    if told is not None:
        print(re.sub("%(.)", lambda found: told[found[1]], words[words.index("-o") + 1]))
else:
    with open({calls!r}, "a") as calls:
        print(name, *words, file=calls)
    if name in ("sacct", "scontrol") and "show" in words + ["show"] * (name == "sacct"):
        sys.exit(name + ": error: Invalid job id specified")
"""


@pytest.fixture
def runner():
    with get_runner() as made:
        yield made


@pytest.fixture
def state(tmp_path, monkeypatch):
    folder, work, programs = (tmp_path / name for name in ("state", "work", "bin"))
    for each in (folder, work, programs):
        each.mkdir()
    golden_state.restore("slurm", folder, work, data=golden_state.LATER)
    monkeypatch.setenv("XDG_STATE_HOME", str(folder))
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    say(folder, json.loads(QUEUE.read_text()))
    text = PROGRAM.format(python=sys.executable, queue=str(folder / "queue"), calls=str(folder / "calls"))
    for name in ("squeue", "scontrol", "scancel", "sacct"):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    return folder


def say(state: Path, queue: dict[str, dict[str, str]]) -> None:
    """What Slurm knows from now on."""
    (state / "queue").write_text(json.dumps(queue))


def status(runner: Runner, name: str):
    return runner.status(f"slurm://torchx/{name}-golden")


ENDED = {"succeeded": "SUCCEEDED", "failed": "FAILED", "cancelled": "CANCELLED"}
STATES = {**ENDED, "again": "RUNNING", "waiting": "PENDING"}


def test_list_and_status(runner, state):
    listed = {app.app_id: app.state.name for app in runner._scheduler("slurm").list()}
    assert listed == {f"{name}-golden": state for name, state in STATES.items()}
    assert {name: status(runner, name).state.name for name in STATES} == STATES
    failed = status(runner, "failed")
    assert '"message": "ValueError: bad batch 17"' in failed.structured_error_msg
    assert [each.hostname for each in failed.roles[0].replicas] == ["n1", "n2"]
    assert status(runner, "cancelled").msg == "cancelled"
    again = status(runner, "again").msg
    assert re.match(r"Slurm job \d+; incarnation 2; attempt 0, 1 restart left; 2 of 2 nodes run; ", again), again
    assert "its time to begin has not come (BeginTime)" in status(runner, "waiting").msg


def test_a_program_that_waits_is_told_by_logging_why_a_job_waits(runner, state, caplog, monkeypatch):
    """`torchx run --wait` prints such records. Nothing was said while a job was queued."""
    monkeypatch.setattr(waiting_line, "_SPACING_S", 0.3)
    status(runner, "waiting")
    told = "waiting-golden PENDING: job 19500073 waits: its time to begin has not come (BeginTime)"
    with caplog.at_level(logging.INFO, "muster"):
        waiter = threading.Thread(target=runner.wait, args=("slurm://torchx/waiting-golden", 0.1), daemon=True)
        waiter.start()
        wait_until(lambda: told in caplog.text, timeout_s=30, what="the reason")
        time.sleep(1)
        queue = json.loads(QUEUE.read_text())
        queue["waiting-golden"] |= {"T": "CANCELLED", "r": "None", "e": queue["failed-golden"]["e"]}
        say(state, queue)
        waiter.join(30)
    assert not waiter.is_alive()
    assert [record.levelname for record in caplog.records if "PENDING" in record.message] == ["INFO"], "once"


def test_what_slurm_has_forgotten(runner, state):
    """The nodes' records say how the last run has ended."""
    say(state, {})
    assert {name: status(runner, name).state.name for name in ENDED} == ENDED


def test_log_and_description(runner, state):
    (role,) = runner.describe("slurm://torchx/again-golden").roles
    assert (role.num_replicas, role.max_retries, role.env) == (2, 2, {"LR": "0.1", "HF_TOKEN": "***"})
    lines = list(runner.log_lines("slurm://torchx/again-golden", "trainer", 1))
    assert lines == [
        "rank 1 of 2, attempt 0: wait\n",
        "[muster] received SIGTERM: stopping, up to 30 s\n",
        "rank 1 of 2, attempt 0: wait\n",
    ], "of both incarnations"


def test_a_cancel_lets_it_save(runner, state):
    runner.cancel("slurm://torchx/again-golden")
    job_id = json.loads(QUEUE.read_text())["again-golden"]["i"]
    assert (state / "calls").read_text().splitlines() == [
        f"scontrol update JobId={job_id} Requeue=0",
        f"scancel --signal=USR1 {job_id}",
    ]
    assert (state / "muster/logs/torchx/again-golden/.muster/stop.request").read_text() == "cancel"


def test_delete(runner, state):
    runner._scheduler("slurm").delete("failed-golden")
    assert not (state / "muster/logs/torchx/failed-golden").exists()
    assert status(runner, "failed") is None
    assert status(runner, "succeeded").state is AppState.SUCCEEDED
