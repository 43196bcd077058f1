"""The template in a whole agent: while old workers are stopped, and when nodes join and leave."""

import json
import os
import re
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from harness import Tree, run_tree, wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="warm start is for Linux")
PROGRAMS = Path(__file__).parents[2] / "programs"
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
        outcome = tree.wait()
    assert (outcome.exit_code, outcome.leftovers) == (0, ()), outcome.explain()
    story = [event["what"] for event in read_events(tmp_path / "logs")]
    broken = story.index("round_broken")
    order = [story.index(what, broken) for what in ("workers_parked", "workers_stopped", "worker_released")]
    assert order == sorted(order), story


def test_one_template_serves_all_memberships(tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))  # held, not listening: no other process gets the port
        first, second = (build_node(index, holder.getsockname()[1], tmp_path) for index in (0, 1))
        # the program's own sums are at MASTER_PORT
        env = {**os.environ, "PYTHONUNBUFFERED": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        with Tree(first, env=env) as survivor:
            wait_for_world(1, survivor)
            with Tree(second, env=env) as guest:
                wait_for_world(2, survivor)
                guest.send(signal.SIGKILL, guest.children()[0])
                assert guest.wait().leftovers == ()
            wait_for_world(1, survivor)
            (tmp_path / "stop").touch()
            outcome = survivor.wait()
    assert (outcome.exit_code, outcome.leftovers) == (0, ()), outcome.explain()
    events = read_events(tmp_path / "logs0")
    story = [event["what"] for event in events]
    assert (story.count("template_ready"), story.count("template_ended")) == (1, 0)
    ways = [event["detail"]["how"] for event in events if event["what"] == "worker_released"]
    assert set(ways) == {"warm"}
    assert len(ways) >= 3
    ready = events[story.index("template_ready")]["detail"]
    assert 0 < ready["pss_bytes"] <= ready["rss_bytes"]


def build_node(index: int, port: int, folder: Path) -> list[str]:
    """The agent of one node of an elastic job that adds up ones until `folder / "stop"` is there."""
    flags = ["--nnodes", "1:2", "--node-rank", str(index), "--rdzv-backend", "c10d", "--rdzv-id", "warm"]
    rendezvous = ["--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-conf", "last_call_timeout=0.3"]
    script = [str(PROGRAMS / "netns_sums.py"), "plain", str(folder)]
    return [*AGENT, *flags, *rendezvous, "--log-dir", str(folder / f"logs{index}"), *script]


def wait_for_world(size: int, tree: Tree) -> None:
    """Wait until the node's last sum is that of a world of so many."""

    def is_there() -> bool:
        return re.findall(r"sum (\d+) of (\d+)", tree.stdout)[-1:] == [(str(size), str(size))]

    wait_until(is_there, what=f"a world of {size}: {tree.stdout[-500:]} {tree.stderr[-500:]}")


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
    outcome = run_tree([*python, *flags, "--log-dir", str(tmp_path / "logs"), str(script)], env=env)
    assert (outcome.exit_code, outcome.leftovers) == (0, ()), outcome.explain()
    assert "DeprecationWarning" not in outcome.stderr + outcome.stdout
    assert "1 restart " in outcome.stderr, outcome.explain()
    events = read_events(tmp_path / "logs")
    released = [event["detail"] for event in events if event["what"] == "worker_released"]
    assert ({each["how"] for each in released}, len(released)) == (ways, 4)
    assert not [event for event in events if event["what"] == "template_ended" and event["detail"]["status"]]
