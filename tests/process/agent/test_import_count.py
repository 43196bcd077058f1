"""How many modules of ours an agent loads before the first line of the user's script: each delays the first worker."""

import re
import sys
from pathlib import Path

from harness import Tree, run_tree

LIMIT = 64
AGENT = [sys.executable, "-v", "-m", "muster.agent", "--standalone", "--nproc-per-node", "2"]
PROGRAM = """
import signal, sys
print("FIRST" + "LINE", file=sys.stderr, flush=True)
signal.pause()  # the imports at the end do not count
"""


def test_the_agent_loads_no_more_modules_before_the_first_line_than_the_limit(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    with Tree([*AGENT, str(script)], cwd=tmp_path) as tree:
        tree.wait_for_line("FIRSTLINE", stream="stderr")
        before = tree.stderr.partition("FIRSTLINE")[0]
    loaded = sorted(set(re.findall(r"import '(muster[\w.]*)'", before)))
    assert "muster.agent.node.supervisor" in loaded  # the pattern still matches what -v prints
    assert len(loaded) <= LIMIT, "\n".join(loaded)


def test_a_failure_is_reported_when_descriptors_run_out(tmp_path: Path) -> None:
    """The modules that describe a failure are loaded then, and an import needs a descriptor."""
    (tmp_path / "program.py").touch()
    agent = [*AGENT[:1], *AGENT[2:], "--start", "cold", "--tee", "3", "--log-dir", str(tmp_path / "logs"), "program.py"]
    # The agent's own descriptors, two for what its threads open meanwhile, and fewer than two workers' pipes and files.
    for limit in range(25, 31):
        command = ["sh", "-c", f'ulimit -n {limit}; exec "$@"', "sh", *agent]
        outcome = run_tree(command, cwd=tmp_path)
        assert outcome.exit_code == 1, outcome.explain()
        assert "Too many open files; no restarts are allowed" in " ".join(outcome.stderr.split()), (
            f"{limit}: {outcome.explain()}"
        )
