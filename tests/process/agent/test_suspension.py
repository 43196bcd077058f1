"""Ctrl-Z stops the whole job, and its limits stand still; `fg` continues it."""

import os
import signal
import sys
import threading
from pathlib import Path

import pytest
from harness import AGENT, Tree, wait_until
from launchers import MOSTLY_WARM
from terminal import TerminalProgram

PROGRAM = """
import os, sys, time
for step in range(400):
    print(f"step {step}\\n", end="", flush=True)
    if os.path.exists(sys.argv[1]):
        break
    time.sleep(0.05)
"""


def read_states(pids: list[int]) -> set[str]:
    return {Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] for pid in pids}


@pytest.mark.parametrize("start", MOSTLY_WARM)
def test_a_stopped_job_continues_where_it_was_and_can_be_stopped_again_and_ended(start: str, tmp_path: Path) -> None:
    """Stopped for longer than the hang timeout, whose limit stands still."""
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    flags = ["--standalone", "--nproc-per-node", "2", "--hang-timeout", "1.5", "--start", start]
    flags += ["--log-dir", str(tmp_path / "logs")]
    with Tree([*AGENT, *flags, str(script), str(tmp_path / "never")]) as tree:
        tree.wait_for_line("step 3", count=2)
        tree.send(signal.SIGTSTP)
        wait_until(lambda: read_states(tree.descendants()) == {"T"}, what="every process is stopped")
        shown = tree.stdout
        threading.Event().wait(3)
        assert tree.stdout == shown
        tree.send(signal.SIGCONT)
        wait_until(lambda: len(tree.stdout) > len(shown), what="the workers continue")
        tree.send(signal.SIGTSTP)
        wait_until(lambda: read_states(tree.descendants()) == {"T"}, what="every process is stopped again")
        tree.send(signal.SIGCONT)
        wait_until(lambda: "T" not in read_states([tree.pid]), what="it continues")
        tree.send(signal.SIGTERM)
        outcome = tree.wait().check(128 + signal.SIGTERM)
    assert "hung" not in outcome.stderr, outcome.explain()


def test_an_ignored_stop_signal_stays_ignored(tmp_path: Path) -> None:
    script, done = tmp_path / "train.py", tmp_path / "done"
    script.write_text(PROGRAM)
    command = [*AGENT, "--standalone", str(script), str(done)]
    ignoring = (
        "import os, signal, sys; signal.signal(signal.SIGTSTP, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])"
    )
    with Tree([sys.executable, "-c", ignoring, *command]) as tree:
        tree.wait_for_line("step 1")
        tree.send(signal.SIGTSTP)
        tree.wait_for_line("step 9")
        done.touch()
        tree.wait().check()


def test_a_terminal_that_stops_what_writes_in_the_background_does_not_stop_the_job(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('hello')")
    words = ["sh", "-c", 'stty tostop && exec "$@"', "sh", sys.executable, "-m", "muster.agent", "train.py"]
    with TerminalProgram(words, env=os.environ, cwd=tmp_path, has_keys=True) as program:
        assert "hello" in program.read_until(None, 60)
        assert program.wait() == 0
