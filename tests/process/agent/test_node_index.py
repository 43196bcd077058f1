"""The index of a node whose controller counts from 0 and cannot add (an elastic Volcano job): the agent adds."""

import os
import sys
from pathlib import Path

import pytest
from harness import run_tree

AGENT = [sys.executable, "-m", "muster.agent", "--nnodes", "1", "--nproc-per-node", "1", "--log-dir"]
PROGRAM = """
import os, sys
print("got", sys.argv[1:], os.environ["NAME"], os.environ.get("MUSTER_NODE_INDEX"), flush=True)
"""


@pytest.mark.parametrize(("given", "index"), [("1+3", "4"), ("0", "0"), ("1+09", "10")])
def test_the_index_replaces_the_mark_in_arguments_and_variables(given: str, index: str, tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    env = {**os.environ, "MUSTER_NODE_INDEX": given, "NAME": "node-{{muster.node_index}}"}
    outcome = run_tree([*AGENT, str(tmp_path), str(script), "--shard={{muster.node_index}}"], env=env)
    assert outcome.exit_code == 0, outcome.explain()
    assert f"got ['--shard={index}'] node-{index} None" in outcome.stdout


def test_without_an_index_the_mark_stays(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    env = {**os.environ, "NAME": "{{muster.node_index}}"}
    outcome = run_tree([*AGENT, str(tmp_path), str(script), "{{muster.node_index}}"], env=env)
    assert "got ['{{muster.node_index}}'] {{muster.node_index}} None" in outcome.stdout, outcome.explain()


def test_an_invalid_sum_is_named(tmp_path: Path) -> None:
    outcome = run_tree([*AGENT, str(tmp_path), "x.py"], env={**os.environ, "MUSTER_NODE_INDEX": "1+x"})
    assert outcome.exit_code == 2, outcome.explain()
    assert outcome.stderr.splitlines()[-1] == "muster: MUSTER_NODE_INDEX='1+x' is neither a number nor a sum of numbers"
