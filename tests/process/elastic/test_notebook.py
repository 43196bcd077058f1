"""A real notebook kernel: output in the cell, the stop button, and the kernel's end."""

import os
import sys
from pathlib import Path

import pytest
from harness import Outcome, run_tree

PROGRAM = Path(__file__).parents[2] / "programs" / "elastic" / "notebook.py"

pytest.importorskip("ipykernel")

pytestmark = pytest.mark.timeout(400)


def run_notebook(scenario: str, folder: Path) -> Outcome:
    """The kernel's own files go to `folder`, so that a leftover of a job is seen in `jobs`."""
    jobs = folder / "jobs"
    jobs.mkdir()
    own = {"IPYTHONDIR": "ipython", "JUPYTER_RUNTIME_DIR": "runtime", "JUPYTER_CONFIG_DIR": "config"}
    env = {**os.environ, "TMPDIR": str(jobs), **{name: str(folder / part) for name, part in own.items()}}
    outcome = run_tree([sys.executable, str(PROGRAM), scenario], env=env, cwd=folder, timeout_s=350)
    assert outcome.exit_code == 0, outcome.explain()
    assert outcome.leftovers == (), outcome.explain()
    assert [path for path in jobs.iterdir() if path.name.startswith("muster")] == [], outcome.explain()
    return outcome


def test_output_in_the_cell_in_order_with_ranks_and_live_bars(tmp_path: Path) -> None:
    outcome = run_notebook("output", tmp_path)
    assert outcome.stdout.splitlines() == [
        "['[default0]:first on stdout', '[default0]:second on stderr', '[default0]:third on stdout']",
        "['{0: (0, 3), 1: (1, 3)}'] False",
        "few lines of bars: True",
        "bars are drawn in place: True ['']",
        "['LaunchFailed'] True",
        "[]",
    ], outcome.explain()


def test_the_stop_button_stops_politely_then_kills_and_the_kernel_lives_on(tmp_path: Path) -> None:
    outcome = run_notebook("stop", tmp_path)
    lines = ["['KeyboardInterrupt'] 2", "['KeyboardInterrupt']", "{0: 0, 1: 1}"]
    assert outcome.stdout.splitlines() == lines, outcome.explain()


def test_a_restarted_kernel_takes_its_job_along(tmp_path: Path) -> None:
    outcome = run_notebook("restart", tmp_path)
    assert outcome.stdout.splitlines() == ["{0: 0, 1: 1}"], outcome.explain()
