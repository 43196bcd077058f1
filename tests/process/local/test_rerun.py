"""`muster rerun`, with real jobs of this machine."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from harness import LIMIT_S, find_processes, wait_until
from terminal import TerminalProgram

PROGRAM = """\
import time

try:
    print("version", {version}, "runs", flush=True)
    time.sleep({sleep})
except KeyboardInterrupt:
    print("version", {version}, "saves", flush=True)
    raise SystemExit(0)
"""
LINE = ("run", "dist.ddp", "-j", "1x1", "--start", "cold", "--script", "main.py")


def write(version, sleep):
    Path("main.new").write_text(PROGRAM.format(version=version, sleep=sleep))
    os.replace("main.new", "main.py")


def begin(*words, **more):
    return subprocess.Popen([sys.executable, "-m", "muster", *words], stdin=subprocess.DEVNULL, text=True, **more)


def run(*words):
    process = begin(*words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    output, errors = process.communicate(timeout=LIMIT_S)
    return process.returncode, output, errors


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    (tmp_path / "state").mkdir()
    (tmp_path / "work").mkdir()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path / "work")


def start_watch(tmp_path):
    write(1, 0)
    assert run(*LINE)[0] == 0
    write(2, 600)
    command = [sys.executable, "-m", "muster", "rerun", "--watch"]
    return TerminalProgram(command, env=os.environ, cwd=tmp_path / "work", has_keys=True)


def test_a_change_stops_the_run_politely_and_starts_the_next_and_ctrl_c_ends_all(tmp_path):
    with start_watch(tmp_path) as terminal:
        terminal.expect("muster: muster run dist.ddp")
        terminal.expect("version 2 runs")
        write(3, 600)
        terminal.expect("main.py has changed: the run starts again")
        terminal.expect("version 2 saves")
        terminal.expect("version 3 runs")
        terminal.type("\x03")
        terminal.expect("version 3 saves")
        assert terminal.wait() == 130
        assert terminal.text.count("run starts again") == 1
    assert find_processes(f"MUSTER_LOG_DIR={tmp_path}") == []


@pytest.mark.long
def test_the_last_line_runs_again_with_its_exit_code(tmp_path):
    write(1, 0)
    assert run(*LINE)[0] == 0
    write(2, "1 / 0")
    code, output, errors = run("rerun")
    assert (code, output.count("local_cwd://")) == (1, 1)
    assert errors.startswith("muster: muster run dist.ddp -j 1x1 --start cold --script main.py\n")
    assert "version 2 runs" in errors


@pytest.mark.long
def test_a_run_that_has_ended_starts_again_with_a_change(tmp_path):
    with start_watch(tmp_path) as terminal:
        terminal.expect("version 2 runs")
        write(3, 0)
        terminal.expect("version 3 runs")
        terminal.expect("muster: the run exited with code 0")
        Path("notes.txt").write_text("new")
        terminal.expect("notes.txt has changed: the run starts again")
        terminal.expect("version 3 runs")
        terminal.expect("muster: the run exited with code 0")
        terminal.send(signal.SIGTERM)
        assert terminal.wait() == 143


@pytest.mark.long
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_whatever_ends_the_watch_ends_the_run(tmp_path, signum):
    """A signal to this process alone is passed on."""
    with start_watch(tmp_path) as terminal:
        terminal.expect("version 2 runs")
        terminal.send(signum)
        assert terminal.wait() == (-signum if signum == signal.SIGKILL else 128 + signum)
        wait_until(lambda: not find_processes(f"MUSTER_LOG_DIR={tmp_path}"), what="the job's end")
