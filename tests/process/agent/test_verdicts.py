"""What follows from failures of real workers: what a rank asks for itself, and causes that are seen late."""

import json
import re
import runpy
from pathlib import Path

import pytest
from harness import AGENT, PROGRAMS, run_tree
from launchers import MOSTLY_WARM

FAILING = PROGRAMS / "failing_programs.py"
SCRIPT = """\
import os, sys, time
from muster import worker

what, attempt = sys.argv[1], int(os.environ["TORCHELASTIC_RESTART_COUNT"])
print("attempt", attempt, flush=True)
if os.environ["RANK"] == "0":
    time.sleep(60)
if what == "give up":
    worker.give_up("no learning rate works")
if what == "leave":
    worker.leave_node("the GPU is slow")
raise ValueError("bad")
"""


@pytest.mark.parametrize(
    ("what", "attempts", "said"),
    [
        ("give up", 1, "(muster.worker.give_up: no learning rate works); rank 1 has given up: a restart is not wanted"),
        ("leave", 2, "the GPU is slow); no other node can take the place of its node; restart 1 of 1"),
    ],
)
def test_what_a_rank_asks_for_follows(tmp_path: Path, what: str, attempts: int, said: str) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    agent = [*AGENT, "--standalone", "--nproc-per-node", "2", "--start", "cold"]
    done = run_tree([*agent, "--tee", "3", "--max-restarts", "1", "train.py", what], cwd=tmp_path)
    text = " ".join(done.stderr.split())
    assert done.exit_code == 1, done.explain()
    assert said in text, done.explain()
    assert len(set(re.findall(r"default1\]:attempt (\d)", done.stdout))) == attempts, done.explain()
    assert ("program gave up" in text) is (what == "give up"), done.explain()


LATE_CAUSE = """\
import atexit, os, sys, time

if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    if os.environ["RANK"] == "1":
        atexit.register(time.sleep, 30)  # an interpreter with torch may take a second
        open("about to", "w").close()
        WHAT
    while not os.path.exists("about to"):
        time.sleep(0.01)
    time.sleep(0.5)
    raise RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:4711")
"""


@pytest.mark.parametrize("start", MOSTLY_WARM)
@pytest.mark.parametrize(
    ("what", "cause"),
    [("sys.exit(77)", "exited with code 77"), ("raise ValueError('bad')", "failed (ValueError: bad)")],
)
def test_a_consequence_that_is_seen_first_is_told_with_its_cause(
    tmp_path: Path, start: str, what: str, cause: str
) -> None:
    """The signal that ends the workers hits the one that is already ending; the rule is about that one."""
    (tmp_path / "train.py").write_text(LATE_CAUSE.replace("WHAT", what))
    agent = [*AGENT, "--standalone", "--nproc-per-node", "2", "--start", start]
    agent += ["--max-restarts", "1", "--on", "network: stop", "--log-dir", str(tmp_path / "logs"), "train.py"]
    done = run_tree(agent, cwd=tmp_path).check()
    expected = f"rank 1 on node 0 .* {re.escape(cause)}"
    [told] = [line for line in done.stderr.splitlines() if "restart 1 of 1" in line]
    assert re.search(f"{expected}; restart 1 of 1", told), done.explain()
    [path] = (tmp_path / "logs").rglob("events.jsonl")
    records = [json.loads(line) for line in path.read_text().splitlines()]
    [broken] = [each["detail"] for each in records if each["what"] == "round_broken"]
    assert re.search(expected, broken["reason"]), broken
    assert broken["cause"] != "network", broken


@pytest.mark.torch
@pytest.mark.long
def test_the_class_of_each_real_program(tmp_path: Path) -> None:
    """Rows of `unit/diagnosis/test_classes.py` as what Python, torch and the system really say."""
    agent = [*AGENT, "--standalone", "--start", "warm", "--on", "any: restart free"]
    run_tree([*agent, "--log-dir", str(tmp_path / "logs"), str(FAILING)], cwd=tmp_path, timeout_s=170).check()
    [path] = (tmp_path / "logs").glob("*/events.jsonl")
    records = [json.loads(line) for line in path.read_text().splitlines()]
    found = [each["detail"]["cause"] for each in records if each["what"] == "round_broken"]
    wanted = runpy.run_path(str(FAILING))["PROGRAMS"]
    assert list(zip(found, (text for _, text in wanted), strict=True)) == list(wanted)
