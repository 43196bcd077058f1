"""--run-path."""

import os
from pathlib import Path

from harness import AGENT, run_tree


def test_run_path_with_each_method(tmp_path: Path) -> None:
    script = tmp_path / "main.py"
    script.write_text("import sys\nprint(__name__, sys.argv[1:], __spec__)\n")
    for method in ("spawn", "fork", "forkserver"):
        logs = tmp_path / method
        flags = ["--standalone", "--run-path", "--start-method", method, "--log-dir", str(logs)]
        outcome = run_tree([*AGENT, *flags, str(script), "a"], env=dict(os.environ)).check()
        assert "__main__ ['a'] None" in outcome.stdout
        (events,) = logs.glob("*/events.jsonl")
        assert ('"how": "warm"' in events.read_text()) is (method != "spawn")
