"""Forked jobs from every kind of caller and with every end: nothing is left, and what is the caller's own stays."""

import os
import sys
import uuid
from pathlib import Path

import pytest
from harness import run_tree

LOOPS = int(os.environ.get("MUSTER_FORK_LOOPS", "1"))
"""More with `make nightly`."""

MATRIX = Path(__file__).parents[2] / "programs" / "elastic" / "fork_matrix.py"
OFTEN, RARELY = [pytest.mark.soak], [pytest.mark.soak, pytest.mark.slow, pytest.mark.long]
CALLERS = [
    pytest.param(caller, marks=OFTEN if caller == "script" else RARELY)
    for caller in ("script", "thread", "pytest", "child", "kernel")
]
ENDS = ("success", "exception", "crash", "interrupt")

pytestmark = pytest.mark.timeout(300 * LOOPS)


def run_matrix(caller: str, *ends: str, folder: Path) -> tuple[int, list[str], str]:
    """Exit code, lines of the program, and all of it for a failure."""
    if caller == "kernel":
        pytest.importorskip("ipykernel")
    jobs = folder / "jobs"
    jobs.mkdir()
    own = {"IPYTHONDIR": "ipython", "JUPYTER_RUNTIME_DIR": "runtime", "JUPYTER_CONFIG_DIR": "config"}
    env = {**os.environ, "TMPDIR": str(jobs), **{name: str(folder / part) for name, part in own.items()}}
    env["MATRIX_SHARED"] = shared = f"muster_matrix_{uuid.uuid4().hex}"
    # After a kill, guard and tracker must first get processor time.
    outcome = run_tree([sys.executable, str(MATRIX), caller, *ends], env=env, cwd=folder, timeout_s=280)
    assert outcome.leftovers == (), outcome.explain()
    assert [path.name for path in jobs.iterdir() if path.name.startswith("muster")] == [], outcome.explain()
    assert not os.path.exists(f"/dev/shm/{shared}"), outcome.explain()
    return outcome.exit_code, outcome.stdout.splitlines(), outcome.explain()


@pytest.mark.parametrize("loop", range(LOOPS))
@pytest.mark.parametrize("caller", CALLERS)
def test_a_job_that_ends_leaves_nothing(caller: str, loop: int, tmp_path: Path) -> None:
    code, lines, explanation = run_matrix(caller, *ENDS, folder=tmp_path)
    assert code == 0, explanation
    assert [line.strip() for line in lines if line.strip().endswith(" ok")] == [f"{end} ok" for end in ENDS], (
        explanation
    )


@pytest.mark.parametrize("loop", range(LOOPS))
@pytest.mark.parametrize("caller", CALLERS)
def test_a_caller_that_is_killed_takes_its_job_along(caller: str, loop: int, tmp_path: Path) -> None:
    code, lines, explanation = run_matrix(caller, "killed", folder=tmp_path)
    assert code in ((0,) if caller in ("child", "kernel") else (-9, 137)), explanation
    assert not any(line.endswith(" ok") for line in lines), explanation
