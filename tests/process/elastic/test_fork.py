"""start_method="fork": closures as workers, what they inherit and what not, and how they end."""

from pathlib import Path

import pytest
from harness import Outcome
from launchers import run_api

pytestmark = pytest.mark.timeout(200)


def run_forks(scenario: str, *flags: str, folder: Path, program: str = "forks.py", settle_s: float = 1.0) -> Outcome:
    return run_api(program, scenario, folder=folder, flags=flags, settle_s=settle_s)


@pytest.mark.soak
def test_closures_restarts_steps_and_what_is_no_hazard(tmp_path: Path) -> None:
    """A restart forks again from the same image; tracers, sockets and files are usual."""
    outcome = run_forks("closures,restart,steps,usual", folder=tmp_path)
    assert outcome.stdout.splitlines() == [
        '{0: (0, 1048576, True, "the caller\'s file"), 1: (1, 1048576, True, "the caller\'s file")}',
        "[(0, 'sent'), (1, 'sent')]",
        "{0: 0, 1: 1} {0: 1}",
        "{0: ([1, 2, 0], 1), 1: ([1, 2, 1], 1)} [1, 2]",
        "False {0: (True, True), 1: (True, True)}",
        "{0: (True, b'the text', [(7,)]), 1: (True, b'the text', [(7,)])} False True",
        "still the program's [(7,)] 8",
    ], outcome.explain()
    assert list(tmp_path.iterdir()) == []


def test_what_the_program_has_registered_runs_in_the_program_only(tmp_path: Path) -> None:
    outcome = run_forks("ends", folder=tmp_path)
    lines = outcome.stdout.splitlines()
    assert "written before, a worker's exit handler" in lines, outcome.explain()
    assert [line for line in lines if "a worker's" not in line] == [
        "own folder is there: False",
        "own folder is there: False",
        "ValueError the text True",
        "SystemExit the reason True",
        "finally True True",
        "the program's exit handler True",
    ], outcome.explain()
    assert sum("a worker's exit handler" in line for line in lines) >= 4, outcome.explain()


def test_handlers_children_and_threads_are_the_programs_own(tmp_path: Path) -> None:
    outcome = run_forks("callers_own", "-W", "error", folder=tmp_path)
    assert outcome.stdout.splitlines() == ["([], True, 0, 1)", "True (0, 0) True"], outcome.explain()
    assert "Warning" not in outcome.stderr, outcome.explain()


@pytest.mark.long
def test_a_debugger_is_no_hazard(tmp_path: Path) -> None:
    pytest.importorskip("debugpy")
    outcome = run_forks("debugged", "-X", "frozen_modules=off", folder=tmp_path, settle_s=30.0)  # debugpy's adapter
    assert outcome.stdout.splitlines() == ["{0: (0, True), 1: (1, True)}", "{0: 0, 1: 0}", "2 processes"], (
        outcome.explain()
    )


def test_a_lost_image_ends_the_job_with_a_reason(tmp_path: Path) -> None:
    outcome = run_forks("image_lost", folder=tmp_path)
    assert "template was ended" in outcome.stdout, outcome.explain()


def test_a_fork_handler_that_blocks_is_an_error_and_no_hang(tmp_path: Path) -> None:
    outcome = run_forks("blocked_handler", folder=tmp_path)
    line = "cannot fork the job's processes from this program: a fork of it stood still for 1 s; a handler"
    assert outcome.stdout.startswith(line), outcome.explain()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
@pytest.mark.torch
def test_an_agent_whose_rendezvous_is_an_installed_package(tmp_path: Path) -> None:
    outcome = run_forks("backend", folder=tmp_path, program="forks_torch.py")
    assert outcome.stdout.splitlines() == ["{0: 0, 1: 1}"], outcome.explain()


@pytest.mark.torch
def test_torchs_names_and_its_thread_pool(tmp_path: Path) -> None:
    outcome = run_forks("everything", folder=tmp_path, program="forks_torch.py")
    assert outcome.stdout.splitlines() == [
        "{0: 864000000.0, 1: 864000000.0}",
        "{0: 0, 1: 1}",
        "{0: (1, 'a'), 1: (2, 'b')}",
        "ValueError the page has 3 steps by optimizer",
    ], outcome.explain()
