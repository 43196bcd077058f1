"""An agent whose own standard streams are closed, full or gone: the job runs and the exit code stays right."""

from pathlib import Path

import pytest
from harness import AGENT, run_tree

CLOSED = [">&-", "2>&-", "<&-", "<&- >&- 2>&-", "> /dev/full 2> /dev/full", "2> /dev/full"]


def wrap(redirections: str, *command: str) -> list[str]:
    return ["sh", "-c", f'"$@" {redirections}', "sh", *AGENT, *command]


@pytest.mark.parametrize("redirections", CLOSED)
def test_the_job_runs_without_streams(redirections: str, tmp_path: Path) -> None:
    program = tmp_path / "says.py"
    program.write_text("import sys\nprint('to stdout')\nprint('to stderr', file=sys.stderr)\n")
    flags = ["--start", "cold", "--tee", "3", "--event-log-handler", "console", "--log-dir", str(tmp_path / "logs")]
    outcome = run_tree(wrap(redirections, *flags, "--rdzv-id", "job", str(program))).check()
    assert "Traceback" not in outcome.stdout + outcome.stderr
    folder = tmp_path / "logs" / "job" / "attempt_0" / "0"
    assert (folder / "stdout.log").read_text() == "to stdout\n"
    assert (folder / "stderr.log").read_text() == "to stderr\n"


@pytest.mark.parametrize("redirections", CLOSED)
def test_wrong_usage_is_2_for_any_streams(redirections: str) -> None:
    run_tree(wrap(redirections, "--no-such-flag", "main.py")).check(2)


@pytest.mark.parametrize("redirections", [">&-", "> /dev/full", "| true"])
def test_help_without_a_reader_is_not_an_error(redirections: str) -> None:
    outcome = run_tree(wrap(redirections, "--help"))
    assert (outcome.exit_code, outcome.stderr) == (0, ""), outcome.explain()


def test_a_filter_that_shows_no_worker_is_named(tmp_path: Path) -> None:
    (tmp_path / "says.py").write_text("print('hello')")
    outcome = run_tree([*AGENT, "--start", "cold", "--local-ranks-filter", "7", str(tmp_path / "says.py")])
    assert "hello" not in outcome.stdout
    assert "--local-ranks-filter" in outcome.stderr, outcome.explain()
