"""A feature is its folder and its row: without them everything else works."""

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from harness import ROOT, check_all, run_tree, start_nodes
from launchers import SCALED

TABLE = "muster/agent/features/__init__.py"
FEATURES = sorted(path.parent.name for path in (ROOT / TABLE).parent.glob("*/__init__.py"))
SCRIPT = """
import os, sys
from muster import snapshots, worker
if os.environ["RANK"] == os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    sys.exit(3)
breakpoint()
worker.step(1)
snapshots.save(1, {"step": 1})
print("went on", os.environ["RANK"], flush=True)
"""


def remove(folder: Path, names: list[str]) -> None:
    """Delete features of a copy of the package: their folders and their rows."""
    path = folder / TABLE
    lines = path.read_text().splitlines()
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    given = {node: {key.arg: key.value for key in node.keywords} for node in calls}
    rows = [
        (node.lineno - 1, node.end_lineno)
        for node, words in given.items()
        if isinstance(name := words.get("name"), ast.Constant) and name.value in names
    ]
    assert len(rows) == len(names)
    for first, end in sorted(rows, reverse=True):
        del lines[first:end]
    path.write_text("\n".join(lines) + "\n")
    for name in names:
        shutil.rmtree(path.parent / name)


def test_the_table_has_a_row_for_each_folder() -> None:
    assert sorted(re.findall(r'Row\(\s*name="(\w+)"', (ROOT / TABLE).read_text())) == FEATURES


@pytest.mark.parametrize("without", [(0, 1), (0,), (1,)], ids=["both", "the leader", "the other"])
def test_a_job_of_two_nodes_heals_without_any_feature(without: tuple[int, ...], tmp_path: Path) -> None:
    shutil.copytree(ROOT / "muster", tmp_path / "muster", ignore=shutil.ignore_patterns("__pycache__"))
    remove(tmp_path, FEATURES)
    (tmp_path / "main.py").write_text(SCRIPT)
    flags = ["--max-restarts", "1", "--start", "cold", "--nproc-per-node", "1", "../main.py"]
    packages = [tmp_path if node in without else ROOT for node in range(2)]
    envs = [{**os.environ, **SCALED, "PYTHONPATH": str(package)} for package in packages]
    (tmp_path / "run").mkdir()  # beside the package, which would come first on the path
    with start_nodes(2, *flags, cwd=tmp_path / "run", envs=envs) as trees:
        outcomes = check_all(trees)
    explained = "\n".join(outcome.explain() for outcome in outcomes)
    for rank, outcome in enumerate(outcomes):
        assert f"went on {rank}" in outcome.stdout, explained
        assert ("no snapshots" in outcome.stderr) == (rank in without), explained
    if 0 in without:
        assert outcomes[0].stderr.count("for a debugger") == 1, explained


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("names", "tests"),
    [
        *(pytest.param([name], ["tests/unit/test_imports.py", "tests/unit/node"], id=name) for name in FEATURES),
        pytest.param(FEATURES, ["tests/unit"], id="all"),
    ],
)
def test_types_imports_and_unit_tests_hold_without(names: list[str], tests: list[str], tmp_path: Path) -> None:
    for file in subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines():
        target = tmp_path / file
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, target)
    remove(tmp_path, names)
    shutil.rmtree(tmp_path / "tests/unit/features")
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    only_theirs = [
        "--deselect",
        "tests/unit/test_imports.py::test_what_a_package_offers_is_used",
        "--ignore",
        "tests/unit/docs",
    ]
    for words in (["mypy"], ["pytest", "-q", "-x", "-m", "not long", *only_theirs, *tests]):
        run_tree([sys.executable, "-m", *words], cwd=tmp_path, env=env, timeout_s=1800).check()
