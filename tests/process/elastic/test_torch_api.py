"""The examples of torch's docstrings run as written, with only the import changed."""

import os
import signal
import sys
from pathlib import Path

import pytest
from harness import PROGRAMS, Outcome, Tree, find_free_port
from launchers import run_api

BARRIER = "exit_barrier_timeout=20 has no effect: every agent waits until all nodes have ended, or one is lost"
EVENTS = (
    "no pause, paused, resume, stop_all_tasks, trigger_save_checkpoint, finished_save_checkpoint, progress_bar_iter, "
    "progress_bar_total: it must be like ice-learn's Events"
)
NO_BASE = (
    "muster.elastic has no SimpleElasticAgent: the agent is a process of its own, and there is nothing to derive from; "
    "use LocalElasticAgent"
)
PROGRAM = PROGRAMS / "elastic" / "torch_api.py"

# On a loaded machine importing torch takes a minute, and every job here does so.
pytestmark = [pytest.mark.torch, pytest.mark.timeout(600)]


def run_scenario(scenario: str, folder: Path) -> Outcome:
    return run_api("torch_api.py", scenario, folder=folder, timeout_s=500)


def test_launcher_and_agent(tmp_path: Path) -> None:
    outcome = run_scenario("launcher,agent,options", tmp_path)
    lines = outcome.stdout.splitlines()
    echoes = sorted(lines.pop(1) for _ in range(2))
    assert echoes == ["0 1.5", "1 1.5"], outcome.explain()
    (overrides,) = (line for line in lines if "Agent overrides _start_workers of torch's LocalElasticAgent" in line)
    lines.remove(overrides)
    assert lines == [
        "('foo', '0') {0: ('foo', '0'), 1: ('foo', '1')}",
        "{0: None, 1: None}",
        "{0: 6, 1: 6}",
        "1 1 ValueError: the text True",
        "ValueError('the text')",
        "keywords are a TypeError",
        "start_method='thread': allowed are spawn, forkserver, fork",
        "--event-log-handler 'mine': must be one of null, console, dynamic_rendezvous",
        "rank 0 return value: do train",
        "True True [0, 1]",
        "binary launches do not have return values {0: None, 1: None}",
        "True {1: 1}",
        f"[({BARRIER!r}, 'torch_api.py')]",
        "health check starts",
        "health check stops",
        "{0: 'do train'}",
        EVENTS,
        NO_BASE,
    ], outcome.explain()


def test_processes(tmp_path: Path) -> None:
    outcome = run_scenario("processes,ends", tmp_path)
    lines = outcome.stdout.splitlines()
    assert sorted(line for line in lines if "foo bar" in line) == [
        "[trainer0]:foo bar0",
        "[trainer1]:foo bar1",
        "foo bar0",
        "foo bar1",
    ], outcome.explain()
    result = "True {0: ('bar0', None, None), 1: ('bar1', None, '1')} [0, 1]"
    assert [line for line in lines if "foo bar" not in line] == [
        *["[0, 1] None", result] * 2,
        "{1: (1, 'ValueError: b')}",
        "['error.json', 'stderr.log', 'stdout.log']",
        "log_dir: D is not empty, please provide an empty log_dir",
        "None",
        "closed {0: -15}",
    ], outcome.explain()


@pytest.mark.long
def test_processes_that_run_a_command(tmp_path: Path) -> None:
    outcome = run_scenario("commands", tmp_path)
    assert outcome.stdout.splitlines() == [
        "{0: None, 1: None} ['file1', 'file2']",
        r"['1 2 3\n', '[1, 2, 3]\n'] True",
        "envs, local rank mapping mismatch, expected: {0, 1}, actual: {0}",
    ], outcome.explain()


@pytest.mark.long
def test_file_timers(tmp_path: Path) -> None:
    outcome = run_scenario("timers", tmp_path)
    assert outcome.stdout.splitlines() == ["{0: 1, 1: 1}", "1 -9", "False"], outcome.explain()
    assert outcome.stderr.count("has expired: SIGKILL") == 2, outcome.explain()


@pytest.mark.long
@pytest.mark.parametrize("library", ["muster", "torch"])
def test_beside_torch(library: str, tmp_path: Path) -> None:
    """What workers, metrics, events and a missing program are like: the same text with both libraries."""
    outcome = run_api("beside_torch.py", library, str(find_free_port()), folder=tmp_path, timeout_s=500)
    assert outcome.stdout == PROGRAM.with_name("beside_torch.txt").read_text(), outcome.explain()


def test_a_signal_is_torchs_exception_and_the_callers_handlers_are_as_before(tmp_path: Path) -> None:
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    with Tree([sys.executable, str(PROGRAM), "signal"], env=env, cwd=tmp_path) as tree:
        tree.wait_for_line("waiting", count=2, timeout_s=300)
        tree.send(signal.SIGTERM)
        outcome = tree.wait(200).check()
    assert outcome.stdout.splitlines()[-1] == "signal True True", outcome.explain()
