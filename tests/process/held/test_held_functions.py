"""Functions as workers on a hold: `muster.elastic.launch(..., held=)` does there what it does anywhere."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import LIMIT_S, PROGRAMS, run_tree, wait_until
from held_runs import Commands, Held, hide_torch, is_gone
from launchers import CALLS_SAY

CALLS = PROGRAMS / "elastic" / "calls.py"
LONG = pytest.mark.long


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Held]:
    """Without torch."""
    folder = tmp_path_factory.mktemp("held")
    (folder / "tmp").mkdir()
    commands = Commands(folder, {"TMPDIR": str(folder / "tmp"), **hide_torch(folder)})
    yield commands.hold("dist.ddp", "-j", "1x2")
    done = commands.call("muster", "release")
    assert done.returncode == 0, done


def run_program(held: Held, *words: str) -> list[str]:
    """Run a program on the only hold; its lines."""
    env = {**held.commands.env, "CALLS_HELD": ""}
    held.wait_ready()
    outcome = run_tree([sys.executable, *words], env=env, cwd=held.commands.work, timeout_s=200).check()
    assert not re.search("cold|template|leaked", outcome.stderr), outcome.explain()
    return outcome.stdout.splitlines()


def test_results_objects_failures_restarts_and_stops_are_as_anywhere(held: Held, tmp_path: Path) -> None:
    lines = run_program(held, str(CALLS), "results,restart,objects,failure,stop", str(tmp_path / "starts"))
    assert [line for line in lines if not line.startswith("idle")] == CALLS_SAY


@LONG
@pytest.mark.torch
def test_torchs_launcher_runs_on_it(tmp_path: Path) -> None:
    commands = Commands(tmp_path)
    held = commands.hold("dist.ddp", "-j", "1x2")
    lines = run_program(held, str(CALLS.with_name("torch_api.py")), "held")
    assert lines == ["{0: ('foo', '0'), 1: ('foo', '1')}", "1 1 ValueError('the text')"]
    assert commands.call("muster", "release").returncode == 0


@contextlib.contextmanager
def start_idle(held: Held) -> "Iterator[subprocess.Popen[str]]":
    """A program whose workers wait; it is killed at the end."""
    env = {**held.commands.env, "CALLS_HELD": held.handle, "PYTHONUNBUFFERED": "1"}
    held.wait_ready()
    words = [sys.executable, str(CALLS), "idle"]
    with subprocess.Popen(words, env=env, cwd=held.commands.work, stdout=subprocess.PIPE, text=True) as program:
        try:
            yield program
        finally:
            program.kill()


def read_pids(program: "subprocess.Popen[str]") -> dict[str, int]:
    """The agent and the two workers, once these run."""
    assert program.stdout is not None
    found: dict[str, int] = {}
    lines = []
    while sum(line.startswith("idle") for line in lines) < 2 or len(found) < 3:
        line = program.stdout.readline()
        assert line, lines
        lines.append(line)
        if match := re.fullmatch(r"(agent|worker) (\d+)\n", line):
            found[f"{match[1]} {sum(name.startswith(match[1]) for name in found)}"] = int(match[2])
    return found


@pytest.mark.parametrize(
    ("victim", "signum", "text"),
    [
        ("program", signal.SIGINT, ""),
        (
            "agent 0",
            signal.SIGKILL,
            "AgentLost the job's muster process was killed; no process of the job is left on this node",
        ),
        pytest.param("program", signal.SIGKILL, "", marks=LONG),
        pytest.param("worker 0", signal.SIGKILL, "LaunchFailed the job failed: rank", marks=LONG),
    ],
)
def test_a_job_that_loses_a_process_ends_and_the_hold_goes_on(held: Held, victim: str, signum: int, text: str) -> None:
    with start_idle(held) as program:
        pids = read_pids(program)
        assert held.read()["run"] == f"idle of process {program.pid}"
        os.kill({**pids, "program": program.pid}[victim], signum)
        assert program.stdout is not None
        assert text in program.stdout.read()
        assert (program.wait(LIMIT_S) == 0) is (victim != "program")
    wait_until(lambda: all(map(is_gone, pids.values())), what="the job is gone")
    held.wait_ready()


@LONG
def test_a_job_whose_hold_is_killed_is_lost(tmp_path: Path) -> None:
    held = Commands(tmp_path, hide_torch(tmp_path)).hold("dist.ddp", "-j", "1x2")
    with start_idle(held) as program:
        pids = read_pids(program)
        os.kill(held.read()["pid"], signal.SIGKILL)
        assert program.stdout is not None
        assert "AgentLost the job's" in program.stdout.read()
        assert program.wait(LIMIT_S) == 0
    wait_until(lambda: all(map(is_gone, pids.values())), what="the job is gone")


def test_a_program_that_is_not_as_the_hold_starts_cold(held: Held, tmp_path: Path) -> None:
    held.wait_ready()
    env = {**held.commands.env, "CALLS_HELD": held.handle}
    words = [sys.executable, "-O", str(CALLS), "restart", str(tmp_path / "cold")]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=200, check=False)
    assert done.stdout == "{0: 1, 1: 1} 1\n", done
    assert "job starts cold, " in done.stderr
    held.wait_ready()
