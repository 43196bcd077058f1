"""Functions as workers, and --run-path."""

import os
import sys
from pathlib import Path

from fidelity import PROBES
from harness import run_tree


def test_functions_of_main_in_all_methods() -> None:
    outcome = run_tree([sys.executable, str(PROBES / "launches_functions.py")], env=dict(os.environ), timeout_s=120)
    assert outcome.exit_code == 0, outcome.explain()
    ranks = "{0: ('Pair', 3, 0), 1: ('Pair', 3, 1)}"
    lines = [line for line in outcome.stdout.splitlines() if line]
    assert lines[:3] == [f"{method} {ranks}" for method in ("spawn", "fork", "forkserver")], outcome.explain()
    assert lines[3] == "failed ValueError: the text 1"
    assert lines[4].startswith("refused cannot send <function main.<locals>")
    assert lines[5] == "refused start_method='thread': allowed are spawn, fork, forkserver"
    assert outcome.leftovers == (), outcome.explain()


def test_run_path_with_each_method(tmp_path: Path) -> None:
    script = tmp_path / "main.py"
    script.write_text("import sys\nprint(__name__, sys.argv[1:], __spec__)\n")
    for method in ("spawn", "fork", "forkserver"):
        logs = tmp_path / method
        flags = ["--standalone", "--run-path", "--start-method", method, "--log-dir", str(logs)]
        outcome = run_tree([sys.executable, "-m", "muster.agent", *flags, str(script), "a"], env=dict(os.environ))
        assert outcome.exit_code == 0, outcome.explain()
        assert "__main__ ['a'] None" in outcome.stdout
        (events,) = logs.glob("*/events.jsonl")
        assert ('"how": "warm"' in events.read_text()) is (method != "spawn")
