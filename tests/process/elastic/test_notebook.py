"""A real notebook kernel: output in the cell, the stop button, and the kernel's end."""

from pathlib import Path

import pytest
from harness import ROOT, Outcome
from launchers import run_api

EXAMPLE = ROOT / "examples" / "notebook.ipynb"

pytest.importorskip("ipykernel")

pytestmark = pytest.mark.timeout(400)


def run_notebook(scenario: str, folder: Path, program: str = "notebook.py") -> Outcome:
    """The kernel's own files go to `folder`, so that a leftover of a job is seen in `jobs`."""
    jobs = folder / "jobs"
    jobs.mkdir()
    own = {"IPYTHONDIR": "ipython", "JUPYTER_RUNTIME_DIR": "runtime", "JUPYTER_CONFIG_DIR": "config"}
    env = {name: str(folder / part) for name, part in own.items()}
    outcome = run_api(program, scenario, folder=jobs, cwd=folder, env=env, timeout_s=350)
    assert [path for path in jobs.iterdir() if path.name.startswith("muster_job_")] == [], outcome.explain()
    return outcome


def test_a_kernel_starts_stops_and_outlives_jobs(tmp_path: Path) -> None:
    """Output is in the cell, in order and with live bars; the stop button stops politely, then kills."""
    outcome = run_notebook("output,inherit,stop,restart", tmp_path)
    assert outcome.stdout.splitlines() == [
        "['[default0]:first on stdout', '[default0]:second on stderr', '[default0]:third on stdout']",
        "['{0: (0, 3), 1: (1, 3)}'] False",
        "few lines of bars: True",
        "bars are drawn in place: True ['']",
        "['LaunchFailed'] True",
        "[]",
        "(5, b'the text') {0: (0, b'the text'), 1: (0, b'the text')} []",
        "['KeyboardInterrupt'] 2",
        "['KeyboardInterrupt']",
        "{0: 0, 1: 1}",
        "{0: 0, 1: 1}",
    ], outcome.explain()


@pytest.mark.long
def test_the_example_notebook_runs(tmp_path: Path) -> None:
    outcome = run_notebook(str(EXAMPLE), tmp_path, "run_notebook.py")
    shown = outcome.stdout
    assert "[default0]:step 80: loss" in shown, outcome.explain()
    assert "[0, 1, 2, 3, 4, 5, 6, 7]" in shown, outcome.explain()
    assert "'attempt 1'" in shown, outcome.explain()
    assert "ValueError('no such layer')" in shown, outcome.explain()


@pytest.mark.long
def test_accelerates_notebook_launcher_with_the_import_replaced(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    outcome = run_api("accelerated.py", folder=tmp_path, timeout_s=250)
    lines = [line for line in outcome.stdout.splitlines() if not line.startswith("Launching")]
    expected = ["2 processes, MULTI_CPU, 60.0", "2 processes, MULTI_CPU, 0.0", "ValueError the text"]
    assert lines == expected, outcome.explain()
