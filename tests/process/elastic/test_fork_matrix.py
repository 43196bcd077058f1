"""Forked jobs with every end: nothing is left, and what is the caller's own stays. Notebooks: `test_notebook`."""

import os
import sys
import uuid
from pathlib import Path

import pytest
from harness import PROGRAMS, run_tree

LOOPS = int(os.environ.get("MUSTER_FORK_LOOPS", "1"))
"""More with `make nightly`."""

MATRIX = PROGRAMS / "elastic" / "fork_matrix.py"
OFTEN, RARELY = [pytest.mark.soak], [pytest.mark.soak, pytest.mark.slow, pytest.mark.long]
CALLERS = [
    pytest.param(caller, marks=OFTEN if caller == "script" else RARELY) for caller in ("script", "thread", "child")
]
ENDS = ("success", "exception", "crash", "interrupt")

pytestmark = pytest.mark.timeout(300 * LOOPS)


def run_matrix(caller: str, *ends: str, folder: Path) -> tuple[int, list[str], str]:
    """Exit code, lines of the program, and all of it for a failure."""
    shared = f"muster_matrix_{uuid.uuid4().hex}"
    env = {**os.environ, "TMPDIR": str(folder), "MATRIX_SHARED": shared}
    # After a kill, guard and tracker must first get processor time.
    outcome = run_tree([sys.executable, str(MATRIX), caller, *ends], env=env, cwd=folder, timeout_s=280)
    assert outcome.leftovers == (), outcome.explain()
    assert [path.name for path in folder.iterdir() if path.name.startswith("muster")] == [], outcome.explain()
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
    assert code in ((0,) if caller == "child" else (-9, 137)), explanation
    assert not any(line.endswith(" ok") for line in lines), explanation
