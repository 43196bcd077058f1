"""Functions as workers: results, failures, what can be an argument, and where it can be called."""

import os
import sys
from pathlib import Path

import pytest
from harness import PROGRAMS, Outcome, run_tree
from launchers import CALLS_SAY, run_api

LAUNCHES = int(os.environ.get("MUSTER_LAUNCHES", "20"))
"""More with `make nightly`."""

# On a loaded machine fifty jobs take minutes.
pytestmark = pytest.mark.timeout(60 + 12 * LAUNCHES)

CALLS = PROGRAMS / "elastic" / "calls.py"


def run_calls(scenario: str, *args: str, folder: Path) -> Outcome:
    return run_api("calls.py", scenario, *args, folder=folder, timeout_s=10 * LAUNCHES)


def test_results_restarts_objects_failures_and_stops(tmp_path: Path) -> None:
    outcome = run_calls("results,restart,objects,failure,stop", str(tmp_path / "starts"), folder=tmp_path)
    assert [line for line in outcome.stdout.splitlines() if not line.startswith("idle")] == CALLS_SAY, outcome.explain()
    assert "leaked" not in outcome.stderr
    shown = outcome.stderr[outcome.stderr.index("Traceback") :]
    assert shown.splitlines()[1].startswith(f'  File "{CALLS}"'), outcome.explain()  # no frame of muster's own
    assert [(tmp_path / f"starts.{rank}").read_text().count("started") for rank in (0, 1)] == [2, 2]
    # the logs of a job that did not succeed stay
    assert [each for name in ("job", "call", "result") for each in tmp_path.glob(f"muster_{name}_*")] == []


def test_ctrl_c_is_said_to_be_an_interrupt(tmp_path: Path) -> None:
    """The only line said that the agent had received SIGTERM."""
    program = tmp_path / "program.py"
    program.write_text(
        "import os, signal, time\n"
        "from muster.elastic import launch\n"
        "def interrupt(parent):\n"
        "    os.kill(parent, signal.SIGINT)\n"
        "    time.sleep(60)\n"
        "if __name__ == '__main__':\n"
        "    launch(interrupt, (os.getpid(),))\n"
    )
    outcome = run_tree([sys.executable, str(program)], env={**os.environ, "TMPDIR": str(tmp_path)}, cwd=tmp_path)
    assert outcome.exit_code in (130, -2), outcome.explain()
    first, second, *_ = [line for line in outcome.stderr.splitlines() if line.startswith("[muster]")]
    assert ("by KeyboardInterrupt: " in first, "received SIGTERM: " in second) == (True, True), outcome.explain()


def test_a_program_that_starts_a_job_when_it_is_imported_is_told_so(tmp_path: Path) -> None:
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    program = CALLS.with_name("unguarded.py")
    outcome = run_tree([sys.executable, str(program)], env=env, cwd=tmp_path).check(1)
    last = outcome.stderr.splitlines()[-1]
    assert last.startswith("muster.elastic.handle.LaunchFailed: "), outcome.explain()
    assert '`if __name__ == "__main__":`' in last, outcome.explain()


def test_a_program_with_many_descriptors(tmp_path: Path) -> None:
    outcome = run_calls("many_descriptors", folder=tmp_path)
    assert outcome.stdout.splitlines() == [
        "{0: 0}",
        "{0: 0}",
        "0 cannot start the agent: /does/not/exist: No such file or directory 1100",
    ], outcome.explain()


def test_what_cannot_be_pickled_is_named(tmp_path: Path) -> None:
    outcome = run_calls("unpicklable", folder=tmp_path)
    first, second, third = outcome.stdout.splitlines()
    fault = "cannot send argument {} of add, a lock, to workers: cannot pickle '_thread.lock' object"
    assert (first, second) == (fault.format(0), fault.format("'scale'")), outcome.explain()
    assert "return_lock on rank 0" in third, outcome.explain()


def test_from_any_thread_and_process_and_beside_the_callers_own_children(tmp_path: Path) -> None:
    outcome = run_calls("where", folder=tmp_path)
    ranks = "{0: 0, 1: 1}"
    assert outcome.stdout.splitlines() == [
        f"thread [{ranks}]",
        f"child {ranks}",
        f"thread that ends {ranks}",
        "True",
        "own child only True (0, 0)",
        "no other (0, 0)",
    ], outcome.explain()


def test_in_a_process_that_a_package_run_by_its_name_has_spawned(tmp_path: Path) -> None:
    """Such a process has no `__main__` that workers could import, and needs none for a module's functions."""
    env = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(CALLS.parent)}
    outcome = run_tree([sys.executable, "-m", "spawning"], env=env, cwd=tmp_path, timeout_s=200).check()
    first, second = outcome.stdout.splitlines()
    assert first == "{0: 7}", outcome.explain()
    assert "function defined_here to" in second, outcome.explain()


@pytest.mark.long
def test_launches_in_a_loop_leave_nothing(tmp_path: Path) -> None:
    outcome = run_calls("loop", str(LAUNCHES), folder=tmp_path)
    assert outcome.stdout.startswith("nothing left"), outcome.explain()


def test_in_pytest_itself(capsys: pytest.CaptureFixture[str]) -> None:
    from muster.elastic import launch

    assert dict(launch(os.getpid, nproc=2)).keys() == {0, 1}
    launch(print, ("from a worker",))
    assert capsys.readouterr().out == "from a worker\n"
