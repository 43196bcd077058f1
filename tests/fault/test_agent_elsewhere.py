"""The code path of systems that have none of Linux's calls, run here: ordinary workers still leave nothing.

Such a system cannot find a grandchild that made a session of its own, so no test asks for it.
"""

import signal
import sys
from pathlib import Path

import pytest
from harness import Tree, run_tree

PROGRAMS = Path(__file__).parent.parent / "programs" / "agent"
READY = str(PROGRAMS / "ready.py")
pytestmark = pytest.mark.soak


@pytest.fixture
def agent(tmp_path: Path) -> list[str]:
    flags = ["--standalone", "--nproc-per-node", "2", "--tee", "3", "--start", "cold", "--shutdown-timeout", "1"]
    return [sys.executable, str(PROGRAMS / "elsewhere.py"), *flags, "--log-dir", str(tmp_path)]


@pytest.mark.parametrize("words", ["", "ignore-term", "grandchild-ignores-term"])
@pytest.mark.parametrize("victim", ["guard", "agent"])
def test_sigkill(agent: list[str], victim: str, words: str) -> None:
    # 30 ms on an idle machine; the harness continues as soon as nothing is left
    with Tree([*agent, READY, *words.split()], settle_s=10) as tree:
        tree.wait_for_line("ready rank", count=2)
        tree.send(signal.SIGKILL, tree.pid if victim == "guard" else tree.children()[0])
        outcome = tree.wait()
    assert (outcome.exit_code, outcome.leftovers) == (-9 if victim == "guard" else 137, ()), outcome.explain()


@pytest.mark.parametrize("words", ["", "ignore-term", "grandchild-ignores-term", "stop-self"])
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT], ids=lambda s: signal.Signals(s).name)
def test_signals(agent: list[str], signum: int, words: str) -> None:
    with Tree([*agent, READY, *words.split()]) as tree:
        tree.wait_for_line("ready rank", count=2)
        tree.send(signum)
        outcome = tree.wait()
    assert (outcome.exit_code, outcome.leftovers) == (128 + signum, ()), outcome.explain()


def test_a_crash_is_restarted_and_a_failed_job_leaves_nothing(agent: list[str]) -> None:
    outcome = run_tree([*agent, "--max-restarts", "1", READY, "crash", "grandchild-ignores-term"], settle_s=0.0)
    assert (outcome.exit_code, outcome.leftovers) == (1, ()), outcome.explain()
    assert "ready rank 0 attempt 1" in outcome.stdout
