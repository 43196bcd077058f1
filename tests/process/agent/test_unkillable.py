"""Processes that SIGKILL does not end (uninterruptible sleep): they are named and given up after a limit."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from freezer import Freezer, make_freezer
from harness import AGENT, Outcome, Tree, wait_until
from launchers import MOSTLY_WARM
from subreaper import list_processes

LIMIT = {"TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT": "0.5"}
GUARD = [sys.executable, "-m", "muster._shared.guard", "--"]


@pytest.fixture
def freezer() -> Iterator[Freezer]:
    with make_freezer() as made:
        yield made


def wait_for_end(tree: Tree, freezer: Freezer) -> Outcome:
    """Wait until the command has ended while its process is still frozen, then let that one end too."""
    wait_until(lambda: list_processes().get(tree.pid, (0, "Z", ""))[1] in "ZX", what="the command's end")
    freezer.thaw()
    return tree.wait()


FENCED = """
import os, signal, subprocess, sys
from muster._shared.guard import run_guarded
from muster.agent.runtime.loop import SystemClock

def body(lease):
    child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(5))
    print(child.pid, flush=True)
    signal.signal(signal.SIGUSR1, lambda *_: lease.renew(SystemClock().boottime_s() + 0.01))
    print("ready", flush=True)
    other = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    other.wait()
    print("fenced", flush=True)
    while True:
        signal.pause()

sys.exit(run_guarded(body))
"""


def test_the_guard_forwards_signals_while_it_cannot_fence(freezer: Freezer) -> None:
    with Tree([sys.executable, "-c", FENCED], env={**os.environ, **LIMIT}) as tree:
        child = int(tree.wait_for_line(r"^\d+$")[0])
        tree.wait_for_line("ready")
        freezer.freeze(child)
        tree.send(signal.SIGUSR1)
        tree.wait_for_line("fenced")
        tree.send(signal.SIGTERM)
        outcome = wait_for_end(tree, freezer).check(5)
    assert f"cannot end them: {child}\n" in outcome.stderr


def test_the_guard_names_what_it_cannot_end_and_does_not_spin_while_it_waits(freezer: Freezer) -> None:
    limit = {"TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT": "3"}
    with Tree([*GUARD, "sh", "-c", "sleep 1000 & echo $!; wait"], env={**os.environ, **limit}) as tree:
        child = int(tree.wait_for_line(r"^\d+$")[0])
        freezer.freeze(child)
        before = read_switches(tree.pid)
        tree.send(signal.SIGTERM)
        after = before
        while (now := read_switches(tree.pid)) is not None:
            after = now
            signal.sigtimedwait([], 0.02)
        outcome = wait_for_end(tree, freezer).check(143)
    assert f"cannot end them: {child}\n" in outcome.stderr
    assert before is not None
    assert after is not None
    assert after - before < 100  # 1 kHz made 3,000


def read_switches(pid: int) -> int | None:
    """How often the process has gone to sleep; None once it has ended."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    fields = dict(line.split(":\t", 1) for line in text.splitlines() if ":\t" in line)
    return None if fields["State"][0] in "ZX" else int(fields["voluntary_ctxt_switches"])


WORKER = """
import os, time
os.write(1, f"worker {os.environ['RANK']} {os.getpid()}\\n".encode())
time.sleep(1000)
"""


@pytest.mark.parametrize("how", MOSTLY_WARM)
def test_a_node_leaves_the_job_without_a_worker_that_cannot_be_killed(
    how: str, freezer: Freezer, tmp_path: Path
) -> None:
    """One of two workers is stuck, the other one fails: a restart would wait for ever."""
    (tmp_path / "program.py").write_text(WORKER)
    flags = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "3", "--shutdown-timeout", "0.2"]
    command = [*AGENT, *flags, "--start", how, "program.py"]
    with Tree(command, cwd=tmp_path, env={**os.environ, **LIMIT}) as tree:
        pids = {line.split()[-2]: int(line.split()[-1]) for line in tree.wait_for_line("worker", count=2)}
        freezer.freeze(pids["0"])
        tree.send(signal.SIGKILL, pids["1"])
        outcome = wait_for_end(tree, freezer).check(69)
    assert f"cannot end process {pids['0']}" in outcome.stderr, outcome.explain()
    assert f"cannot end them: {pids['0']}\n" in outcome.stderr
