"""What follows from failures of real workers: rules of `--on`, what a rank says itself, and what is known of steps."""

import contextlib
import json
import os
import re
import runpy
import sys
from pathlib import Path

import pytest
from harness import Outcome, Tree, find_free_port, run_tree
from launchers import STARTS

PROGRAMS = Path(__file__).parents[2] / "programs" / "failing_programs.py"
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
if what == "exit":
    sys.exit(33 if attempt < 2 else 34)
if what == "repeats" and attempt == 0:
    worker.step(4)
raise ValueError("bad")
"""


def run(tmp_path: Path, what: str, *flags: str, is_managed: bool = False):
    """Run two ranks, of which the second one fails; the outcome, and what was printed in one line."""
    (tmp_path / "train.py").write_text(SCRIPT)
    agent = [sys.executable, "-m", "muster.agent", "--standalone", "--nproc-per-node", "2", "--start", "cold"]
    agent += ["--tee", "3", "--restart-backoff", "0", *flags]
    env = {**os.environ, **({"MUSTER_ADAPTER": "local_cwd"} if is_managed else {})}
    done = run_tree([*agent, "train.py", what], cwd=tmp_path, env=env)
    return done, " ".join(done.stderr.split())


@pytest.mark.parametrize(
    ("what", "flags", "attempts", "said"),
    [
        (
            "give up",
            ("--max-restarts", "3"),
            1,
            "(muster.worker.give_up: no learning rate works); rank 1 has given up: a restart is not wanted",
        ),
        (
            "leave",
            ("--max-restarts", "1"),
            2,
            "the GPU is slow); no other node can take the place of its node; restart 1 of 1",
        ),
        ("exit", ("--on", "exit 33: restart free", "--on", "exit 34: stop"), 3, "code 34; --on 'exit 34: stop'"),
        ("raises", ("--on", "ValueError: restart 2"), 3, "restarted 2 times without progress since"),
        ("raises", ("--on", "crash: stop", "--max-restarts", "3"), 1, "(ValueError: bad); --on 'crash: stop'"),
        ("repeats", ("--max-restarts", "3"), 4, "all 3 restarts are used"),  # as torchrun has it
        ("repeats", ("--max-restarts", "3", "--on", "repeat: stop"), 3, "--on 'repeat: stop'"),
    ],
)
def test_what_follows(tmp_path: Path, what: str, flags: tuple[str, ...], attempts: int, said: str) -> None:
    done, text = run(tmp_path, what, *flags)
    assert done.exit_code == 1, done.explain()
    assert said in text, done.explain()
    assert len(set(re.findall(r"default1\]:attempt (\d)", done.stdout))) == attempts, done.explain()
    assert ("cause : the program gave up" in text) is (what == "give up"), done.explain()


def test_what_a_scheduler_has_started_stops_when_the_same_comes_twice_without_a_step(tmp_path: Path) -> None:
    """The first attempt has done a step, so that the script is known to report them."""
    done, text = run(tmp_path, "repeats", "--max-restarts", "9", is_managed=True)
    assert done.exit_code == 1, done.explain()
    assert "the same failure at the same place twice in a row: not retried" in text, done.explain()
    assert "--on 'repeat: restart'" in text, done.explain()
    assert "after 2 of 9 restarts" in text, done.explain()


def test_a_node_that_its_scheduler_can_replace_leaves(tmp_path: Path) -> None:
    done, text = run(tmp_path, "exit", "--max-restarts", "9", "--on", "exit 33: elsewhere", is_managed=True)
    assert done.exit_code == 69, done.explain()
    assert "this node leaves the job: rank 1 on node 0 (" in text, done.explain()
    assert "exited with code 33; its scheduler is to start another" in text, done.explain()


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


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize(
    ("what", "cause"),
    [("sys.exit(77)", "exited with code 77"), ("raise ValueError('bad')", "failed (ValueError: bad)")],
)
def test_a_consequence_that_is_seen_first_is_told_with_its_cause(
    tmp_path: Path, start: str, what: str, cause: str
) -> None:
    """The signal that ends the workers hits the one that is already ending; the rule is about that one."""
    (tmp_path / "train.py").write_text(LATE_CAUSE.replace("WHAT", what))
    agent = [sys.executable, "-m", "muster.agent", "--standalone", "--nproc-per-node", "2", "--start", start]
    agent += ["--max-restarts", "1", "--on", "network: stop", "--log-dir", str(tmp_path / "logs"), "train.py"]
    done = run_tree(agent, cwd=tmp_path)
    check_cause(done, tmp_path / "logs", f"rank 1 on node 0 .* {re.escape(cause)}")


def check_cause(done: Outcome, logs: Path, cause: str) -> None:
    """The one line about the break, and the record of each node, are about the cause."""
    assert done.exit_code == 0, done.explain()
    [told] = [line for line in done.stderr.splitlines() if "restart 1 of 1" in line]
    assert re.search(f"{cause}; restart 1 of 1", told), done.explain()
    records = [json.loads(line) for path in logs.rglob("events.jsonl") for line in path.read_text().splitlines()]
    broken = [each["detail"] for each in records if each["what"] == "round_broken"]
    assert broken
    for each in broken:
        assert re.search(cause, each["reason"]), each
        assert each["cause"] != "network", each


def test_also_where_the_cause_is_on_another_node(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LATE_CAUSE.replace("WHAT", "sys.exit(77)"))
    agent = [sys.executable, "-m", "muster.agent", "--nnodes", "2", "--nproc-per-node", "1", "--start", "cold"]
    agent += ["--rdzv-backend", "muster", "--rdzv-endpoint", f"127.0.0.1:{find_free_port()}", "--rdzv-id", "job"]
    agent += ["--max-restarts", "1", "--on", "network: stop"]
    env = {**os.environ, "MUSTER_TOKEN": "ab" * 32}
    with contextlib.ExitStack() as stack:
        trees = []
        for node in (0, 1):
            words = ["--node-rank", str(node), "--log-dir", str(tmp_path / f"logs{node}"), "train.py"]
            trees.append(stack.enter_context(Tree([*agent, *words], cwd=tmp_path, env=env)))
        outcomes = [tree.wait() for tree in trees]
    assert outcomes[1].exit_code == 0, outcomes[1].explain()
    check_cause(outcomes[0], tmp_path, "rank 1 on node 1 .* exited with code 77")


def test_rules_that_cannot_be_read_are_one_line(tmp_path: Path) -> None:
    done, _ = run(tmp_path, "exit", "--on", "exit 300: stop")
    assert done.exit_code == 2, done.explain()
    assert done.stderr == "muster: --on 'exit 300: stop': an exit code must be 1 to 255, not '300'\n"


@pytest.mark.torch
@pytest.mark.long
def test_the_class_of_each_real_program(tmp_path: Path) -> None:
    """Rows of `unit/diagnosis/test_classes.py` as what Python, torch and the system really say."""
    agent = [sys.executable, "-m", "muster.agent", "--standalone", "--start", "warm", "--on", "any: restart free"]
    done = run_tree([*agent, "--log-dir", str(tmp_path / "logs"), str(PROGRAMS)], cwd=tmp_path, timeout_s=170)
    assert done.exit_code == 0, done.explain()
    [path] = (tmp_path / "logs").glob("*/events.jsonl")
    records = [json.loads(line) for line in path.read_text().splitlines()]
    found = [each["detail"]["cause"] for each in records if each["what"] == "round_broken"]
    wanted = runpy.run_path(str(PROGRAMS))["PROGRAMS"]
    assert list(zip(found, (text for _, text in wanted), strict=True)) == list(wanted)
