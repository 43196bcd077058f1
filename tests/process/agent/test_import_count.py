"""How many modules of ours an agent loads before the first line of the user's script: each delays the first worker."""

import re
import sys
from pathlib import Path

import pytest
from harness import Tree, run_tree

LIMIT = 64
AGENT = [sys.executable, "-v", "-m", "muster.agent", "--standalone", "--nproc-per-node", "2"]
PROGRAM = """
import signal, sys
print("FIRST" + "LINE", file=sys.stderr, flush=True)
signal.pause()  # the imports at the end do not count
"""


def list_loaded(folder: Path) -> list[str]:
    """The modules that are loaded before the first line, of all packages."""
    script = folder / "program.py"
    script.write_text(PROGRAM)
    with Tree([*AGENT, str(script)], cwd=folder) as tree:
        tree.wait_for_line("FIRSTLINE", stream="stderr")
        before = tree.stderr.partition("FIRSTLINE")[0]
    return sorted(set(re.findall(r"import '([\w.]*)'", before)))


def test_the_agent_loads_no_more_modules_before_the_first_line_than_the_limit(tmp_path: Path) -> None:
    loaded = [name for name in list_loaded(tmp_path) if name.startswith("muster")]
    assert "muster.agent.node.supervisor" in loaded  # the pattern still matches what -v prints
    assert len(loaded) <= LIMIT, "\n".join(loaded)


def test_an_agent_that_tells_kubernetes_of_its_job_loads_one_module_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MUSTER_JOB_OBJECT", "/apis/batch/v1/namespaces/team/jobs/app-x1-main")
    monkeypatch.setenv("MUSTER_ACCOUNT_DIR", str(tmp_path))
    loaded = list_loaded(tmp_path)
    assert "muster.agent.runtime.job_object" in loaded
    assert sum(name.startswith("muster") for name in loaded) <= LIMIT + 1
    assert not {"ssl", "http.client"} & {*loaded}


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
