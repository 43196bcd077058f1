"""The template in a whole agent."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from harness import Tree, run_tree

AGENT = (sys.executable, "-m", "muster.agent", "--start", "warm", "--tee", "3")


def read_events(log_dir: Path) -> list[dict[str, Any]]:
    (path,) = log_dir.glob("*/events.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_successors_are_forked_while_the_old_workers_are_being_stopped(tmp_path: Path) -> None:
    """The old worker ends once they are there, and the grace period is longer than this test."""
    script = tmp_path / "main.py"
    script.write_text(
        "import os, pathlib, signal, sys, threading\n"
        "os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' or sys.exit()\n"
        "if os.environ['RANK'] == '0':\n"
        "    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "    os.mkdir(sys.argv[1])\n"
        "    [events] = pathlib.Path(sys.argv[2]).glob('*/events.jsonl')\n"
        "    while 'workers_parked' not in events.read_text().partition('round_broken')[2]:\n"
        "        threading.Event().wait(0.05)\n"
        "while not os.path.exists(sys.argv[1]):\n"
        "    threading.Event().wait(0.01)\n"
        "os._exit(3)\n"
    )
    flags = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "1", "--shutdown-timeout", "90"]
    logs = str(tmp_path / "logs")
    with Tree([*AGENT, *flags, "--log-dir", logs, str(script), str(tmp_path / "is-deaf"), logs]) as tree:
        tree.wait().check()
    story = [event["what"] for event in read_events(tmp_path / "logs")]
    broken = story.index("round_broken")
    order = [story.index(what, broken) for what in ("workers_parked", "workers_stopped", "worker_released")]
    assert order == sorted(order), story


FORK_WARNS = """
import os, posix, warnings

def fork(fork=os.fork):
    count = len(os.listdir("/proc/self/task"))
    pid = fork()
    if pid and count > 1:
        warnings.warn(f"This process (pid={os.getpid()}) is multi-threaded", DeprecationWarning, stacklevel=2)
    return pid

os.fork = posix.fork = fork
"""
"""What Python does from 3.12 on, and more: the warning that is an error is raised, and threads that the fork handlers
stop count."""


@pytest.mark.parametrize(
    ("module", "ways"),
    [
        ("import numpy", {"warm"}),  # OpenBLAS has a pool of threads, and fork handlers that stop it
        ("import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()", {"cold"}),
    ],
    ids=["pool", "thread"],
)
def test_the_warning_about_forks_of_processes_with_threads_may_be_an_error(
    tmp_path: Path, module: str, ways: set[str]
) -> None:
    """In the agent, which has threads of its own, and in the template."""
    (tmp_path / "sitecustomize.py").write_text(FORK_WARNS)
    (tmp_path / "preloaded.py").write_text(module)
    script = tmp_path / "main.py"
    script.write_text("import os, preloaded, sys\nsys.exit(os.environ['TORCHELASTIC_RESTART_COUNT'] == '0')\n")
    python = [sys.executable, "-W", "error", *AGENT[1:]]
    flags = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "1", "--preload", "preloaded"]
    env = {**os.environ, "PYTHONPATH": str(tmp_path), "OPENBLAS_NUM_THREADS": "3", "OMP_NUM_THREADS": "3"}
    outcome = run_tree([*python, *flags, "--log-dir", str(tmp_path / "logs"), str(script)], env=env).check()
    assert "DeprecationWarning" not in outcome.stderr + outcome.stdout
    assert "1 restart " in outcome.stderr, outcome.explain()
    events = read_events(tmp_path / "logs")
    released = [event["detail"] for event in events if event["what"] == "worker_released"]
    assert ({each["how"] for each in released}, len(released)) == (ways, 4)
    assert not [event for event in events if event["what"] == "template_ended" and event["detail"]["status"]]
