"""A full log folder loses log files and prints one line about it, but ends no worker and causes no restart."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from harness import AGENT, PROGRAMS, Outcome, run_tree
from launchers import MOSTLY_WARM, STARTS

FOLDER = PROGRAMS / "agent"
FULL = 'mount -t tmpfs -o size=64k none "$1" && head -c 65536 /dev/zero > "$1/filler"'
READ_ONLY = 'mount -t tmpfs none "$1" && mkdir "$1/job" && mount -o remount,ro "$1"'
NO_FILE_SIZE = "ulimit -f 0"
OUTPUT = [[], ["--tee", "3"], ["--redirects", "3"]]


def run_agent(setup: str, tmp_path: Path, flags: Sequence[str], program: Sequence[str]) -> Outcome:
    """Run one agent of two workers whose log folder is `tmp_path/disk`, which the shell's `setup` gets as "$1"."""
    disk = tmp_path / "disk"
    disk.mkdir()
    agent = [*AGENT, "--standalone", "--nproc-per-node", "2", "--rdzv-id", "job"]
    shell = ["sh", "-c", f'{setup} && shift && exec "$@"', "sh", str(disk)]
    if "mount" in setup:
        shell = ["unshare", "--mount", *shell]
        if run_tree(["unshare", "--mount", "true"]).exit_code != 0:
            pytest.skip("making a mount namespace is not allowed here")
    return run_tree([*shell, *agent, "--log-dir", str(disk), *flags, *program])


def list_complaints(outcome: Outcome) -> list[str]:
    return [line for line in outcome.stderr.splitlines() if line.startswith("[muster] ") and "cannot write" in line]


@pytest.mark.parametrize("output", OUTPUT, ids=" ".join)
@pytest.mark.parametrize("start", MOSTLY_WARM)
@pytest.mark.parametrize("setup", [FULL, READ_ONLY, NO_FILE_SIZE], ids=["full", "read-only", "no file size"])
def test_the_job_runs_on_and_one_line_says_that_logs_are_incomplete(
    setup: str, start: str, output: list[str], tmp_path: Path
) -> None:
    flags = ["--max-restarts", "2", "--start", start, *output]
    outcome = run_agent(setup, tmp_path, flags, [str(FOLDER / "ready.py"), "done"]).check()
    for rank in (0, 1):
        assert outcome.stdout.count(f"ready rank {rank} attempt 0") == 1, outcome.explain()
    assert "restarting" not in outcome.stderr, outcome.explain()
    assert len(list_complaints(outcome)) == 1, outcome.explain()


@pytest.mark.parametrize("start", MOSTLY_WARM)
def test_a_failure_of_the_program_is_still_reported_and_restarted(start: str, tmp_path: Path) -> None:
    flags = ["--max-restarts", "1", "--start", start, "--tee", "3"]
    outcome = run_agent(FULL, tmp_path, flags, [str(FOLDER / "ready.py"), "crash-once", "done"]).check()
    assert outcome.stdout.count("ready rank 0 attempt 1") == 1, outcome.explain()


@pytest.mark.parametrize(
    "setup", [FULL, pytest.param(NO_FILE_SIZE, marks=pytest.mark.long)], ids=["full", "no file size"]
)
@pytest.mark.parametrize("start", MOSTLY_WARM)
def test_the_programs_exception_is_not_lost(start: str, setup: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("raise ValueError('bad batch')\n")
    outcome = run_agent(setup, tmp_path, ["--start", start, "--tee", "2"], [str(script)]).check(1)
    assert "muster: cannot record " in outcome.stderr, outcome.explain()
    report = " ".join(outcome.stderr.partition("JOB FAILED")[2].split())
    # Rank 1 fails in the same way, or is stopped before.
    assert "ValueError: bad batch" in report.partition("Root cause")[0], outcome.explain()


@pytest.mark.skipif("warm" not in STARTS, reason="cold workers print what they import themselves")
def test_output_of_imports_that_cannot_be_written_ends_no_worker(tmp_path: Path) -> None:
    """Standard output goes to a full disk; the program itself prints nothing."""
    (tmp_path / "loud.py").write_text("print('imported')\n")
    script = tmp_path / "train.py"
    script.write_text("import loud\n")
    flags = ["--start", "warm", "--preload", "loud"]
    outcome = run_agent("exec > /dev/full", tmp_path, flags, [str(script)]).check()
    assert "start cold" not in outcome.stderr, outcome.explain()
