"""Functions as workers on a hold: `muster.elastic.launch(..., held=)` does there what it does anywhere."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import Outcome, find_free_port, run_tree, wait_until
from held_runs import Commands, Held

CALLS = Path(__file__).parents[2] / "programs" / "elastic" / "calls.py"
TORCH_API = CALLS.with_name("torch_api.py")

pytestmark = [pytest.mark.torch, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Held]:
    folder = tmp_path_factory.mktemp("held")
    (folder / "tmp").mkdir()
    commands = Commands(folder, {"TMPDIR": str(folder / "tmp")})
    made = commands.hold("dist.ddp", "-j", "1x2")
    yield made
    done = commands.call("muster", "release")
    assert done.returncode == 0, done


def read_state(held: Held) -> dict[str, Any]:
    (path,) = (held.commands.folder / "state").rglob(f"logs/*/{held.app_id}/*/hold-0/hold.json")
    return dict(json.loads(path.read_text()))


def wait_ready(held: Held) -> None:
    wait_until(lambda: read_state(held)["state"] == "ready", timeout_s=90, what="an agent waits")


def run_calls(held: Held, scenario: str, *args: str, program: Path = CALLS, name: str = "") -> Outcome:
    """Run a scenario on the hold."""
    env = {**held.commands.env, "CALLS_HELD": name or held.handle}
    wait_ready(held)
    outcome = run_tree([sys.executable, str(program), scenario, *args], env=env, cwd=held.commands.work, timeout_s=300)
    assert outcome.exit_code == 0, outcome.explain()
    assert outcome.leftovers == (), outcome.explain()
    assert not re.search("cold|template", outcome.stderr), outcome.explain()
    return outcome


def test_results_by_global_rank(held: Held) -> None:
    outcome = run_calls(held, "results")
    assert outcome.stdout.splitlines() == [
        "{0: ('Pair', 30, 0), 1: ('Pair', 30, 1)} 0",
        "{0: (3, '__main__'), 1: (3, '__main__')}",
        "{0: None, 1: 'stayed'}",
    ], outcome.explain()


def test_multiprocessing_objects_as_arguments(held: Held) -> None:
    outcome = run_calls(held, "objects")
    assert outcome.stdout.splitlines() == [
        f"{method} [0, 1] from rank 0 {{0: None, 1: None}} 20 2" for method in ("spawn", "forkserver")
    ], outcome.explain()
    assert "leaked" not in outcome.stderr


def test_a_failure_has_the_workers_exception_as_its_cause(held: Held) -> None:
    outcome = run_calls(held, "failure")
    assert outcome.stdout.splitlines() == ["ValueError the text True", "[(1, 1)]"], outcome.explain()


def test_results_are_of_the_round_that_succeeded(held: Held, tmp_path: Path) -> None:
    outcome = run_calls(held, "restart", str(tmp_path / "starts"))
    assert outcome.stdout.splitlines() == ["{0: 1, 1: 1} 1"], outcome.explain()


def test_a_handle_stops_the_job(held: Held) -> None:
    outcome = run_calls(held, "stop")
    running, waiting, stopped, phase = outcome.stdout.replace("idle 0\n", "").replace("idle 1\n", "").splitlines()
    assert running == "running (0, 1) 2 0", outcome.explain()
    assert stopped == "the job was stopped; the agent was ended by SIGTERM ()", outcome.explain()
    assert (waiting, phase) == ("the job still runs after 0.1 s", "failed")


@pytest.mark.long
def test_launches_in_a_loop_leave_nothing(held: Held) -> None:
    outcome = run_calls(held, "loop", "5")
    assert outcome.stdout.startswith("nothing left"), outcome.explain()


def test_the_only_hold_is_found_and_torchs_launcher_runs_on_it(held: Held) -> None:
    outcome = run_calls(held, "held", program=TORCH_API)
    lines = outcome.stdout.splitlines()
    assert lines == ["{0: ('foo', '0'), 1: ('foo', '1')}", "1 1 ValueError('the text')"], outcome.explain()


@contextlib.contextmanager
def start_idle(held: Held) -> "Iterator[subprocess.Popen[str]]":
    """A program whose workers wait; it is killed at the end."""
    env = {**held.commands.env, "CALLS_HELD": held.handle, "PYTHONUNBUFFERED": "1"}
    wait_ready(held)
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


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("Z", "X")
    except OSError:
        return True


def test_one_job_at_a_time_and_a_ctrl_c_ends_it(held: Held) -> None:
    with start_idle(held) as program:
        pids = read_pids(program)
        name = f"idle of process {program.pid}"
        assert read_state(held)["run"] == name
        assert f"held: it runs {name}" in held.read_line()
        env = {**held.commands.env, "CALLS_HELD": held.handle}
        other = subprocess.run(
            [sys.executable, str(CALLS), "stop"], env=env, capture_output=True, text=True, timeout=100, check=False
        )
        assert other.stderr.splitlines()[-1].endswith(f"held='{held.handle}': {held.handle} runs {name} now"), other
        release = held.commands.call("muster", "release")
        assert release.returncode == 1, release
        assert f"runs {name}: `muster release --now {held.app_id}` ends both" in release.stderr
        program.send_signal(signal.SIGINT)
        assert program.wait(60) != 0
    wait_until(lambda: all(map(is_gone, pids.values())), what="the job is gone")
    wait_ready(held)


@pytest.mark.parametrize(
    "victim", ["agent 0", *(pytest.param(each, marks=pytest.mark.long) for each in ("program", "worker 0"))]
)
def test_a_job_that_loses_a_process_ends_and_the_hold_goes_on(held: Held, victim: str) -> None:
    with start_idle(held) as program:
        pids = read_pids(program)
        os.kill({**pids, "program": program.pid}[victim], signal.SIGKILL)
        text = program.stdout.read() if program.stdout is not None else ""
        program.wait(60)
    ends = {
        "program": "",
        "agent 0": "AgentLost the job's muster process was killed; no process of the job is left on this node",
        "worker 0": "LaunchFailed the job failed: rank",
    }
    assert ends[victim] in text
    wait_until(lambda: all(map(is_gone, pids.values())), what="the job is gone")
    wait_ready(held)
    assert held.find_state() == "RUNNING"


@pytest.mark.long
def test_a_job_whose_hold_is_killed_is_lost(tmp_path: Path) -> None:
    held = Commands(tmp_path).hold("dist.ddp", "-j", "1x2")
    with start_idle(held) as program:
        pids = read_pids(program)
        os.kill(read_state(held)["pid"], signal.SIGKILL)
        text = program.stdout.read() if program.stdout is not None else ""
        assert program.wait(60) == 0
    assert "AgentLost the job's muster process was killed" in text
    wait_until(lambda: all(map(is_gone, pids.values())), what="the job is gone")


SEVERAL = (
    "nodes=2, held=True: a program can run functions on one node of a hold only; for more nodes start a program with "
    "its own hold on each node, and give all of them endpoint=, HOST:PORT of the leading one"
)
FORKS = (
    "held=True: with start_method='fork' workers are forks of this program, and not of the hold's agent; use "
    "start_method='spawn', or no hold"
)
PROBLEMS = """
from muster.elastic import launch
ways = {"held": "other"}, {"held": True, "nproc": 3}, {"held": True, "start_method": "fork"}, {"held": True, "nodes": 2}
for more in ways:
    try:
        launch(print, **more)
    except ValueError as error:
        print(error)
"""


def test_what_cannot_be_is_one_line(held: Held) -> None:
    words = [sys.executable, "-c", PROBLEMS]
    done = subprocess.run(words, env=held.commands.env, capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout.splitlines() == [
        f"held='other': 'other' is none of the holds here: {held.handle}",
        f"held=True: nproc=3: {held.handle} holds at most 2",
        FORKS,
        SEVERAL,
    ], done


NODE = """
import os, sys
from muster.elastic import launch
held, rank, port = sys.argv[1:]
places = {"nodes": 2, "endpoint": f"127.0.0.1:{port}", "node_rank": int(rank), "run_id": "both"}
print(dict(launch(os.getenv, ("GROUP_RANK",), nproc=1, held=held, **places)))
"""


@pytest.mark.long
def test_a_job_of_two_programs_has_a_node_of_each_ones_hold(held: Held, tmp_path: Path) -> None:
    other = Commands(tmp_path).hold("dist.ddp", "-j", "1x1")
    wait_ready(held)
    port = str(find_free_port())
    programs = [
        subprocess.Popen(
            [sys.executable, "-c", NODE, each.handle, str(rank), port],
            env={**each.commands.env, "MUSTER_TOKEN": "0123456789abcdef" * 2},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, each in enumerate((held, other))
    ]
    found = [program.communicate(timeout=200) for program in programs]
    assert [out for out, _ in found] == ["{0: '0'}\n", "{1: '1'}\n"], found
    assert not re.search("cold|template", "".join(err for _, err in found)), found
    assert other.commands.call("muster", "release").returncode == 0


def test_a_program_that_is_not_as_the_hold_starts_cold(held: Held) -> None:
    wait_ready(held)
    env = {**held.commands.env, "CALLS_HELD": held.handle}
    words = [sys.executable, "-O", str(CALLS), "restart", str(held.commands.work / "cold")]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=200, check=False)
    assert done.stdout == "{0: 1, 1: 1} 1\n", done
    assert "muster: this job starts cold, not from the hold: the flags of its Python are not the hold's" in done.stderr
    wait_ready(held)
