"""The examples run from any folder, as their first lines say."""

import ast
import importlib
import os
import re
import runpy
import shlex
import subprocess
import sys

import pytest
import yaml
from doc_pages import ROOT
from doubles.kubernetes_schemas import judge
from harness import run_tree

ROLES = {
    "parameter_server": r"the weights are off by 0\.\d+ at most",
    "actor_critic": r"the way out was found in \d+ of the last 50 episodes",
}


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", ROLES)
def test_an_app_of_several_roles(name, tmp_path):
    environment = os.environ | {"XDG_STATE_HOME": str(tmp_path / "state"), "OMP_NUM_THREADS": "1"}
    program = str(ROOT / f"examples/several_roles/{name}.py")
    outcome = run_tree([sys.executable, program], env=environment, cwd=tmp_path, timeout_s=300).check()
    assert re.search(ROLES[name], outcome.stdout), outcome.explain()
    assert re.search(r"local_cwd://\S+ is SUCCEEDED", outcome.stdout), outcome.explain()


def test_a_job_on_kubernetes_with_a_volume(tmp_path):
    program = str(ROOT / "examples/kubernetes_volume.py")
    words = ["-j", "1:2x2", "--gpus", "2", "--namespace", "research", "--claim", "runs"]
    done = subprocess.run([sys.executable, program, *words], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    text = done.stdout.partition("=== SCHEDULER REQUEST ===")[2] or done.stdout
    documents = [each for each in yaml.safe_load_all(text) if each]
    for document in documents:
        judge(document, "1.36")
        assert document["metadata"]["namespace"] == "research"
    (job,) = (each for each in documents if each["kind"] == "Job")
    pod = job["spec"]["template"]["spec"]
    (volume,) = (each for each in pod["volumes"] if "persistentVolumeClaim" in each)
    assert volume["persistentVolumeClaim"]["claimName"] == "runs"
    (container,) = pod["containers"]
    assert {"name": volume["name"], "mountPath": "/volume"} in container["volumeMounts"]
    assert {"name": "MUSTER_LOG_DIR", "value": "/volume/muster"} in container["env"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] in (2, "2")


def list_commands():
    """The commands in the docstrings of the examples, as (file, words)."""
    found = []
    for path in sorted((ROOT / "examples").rglob("*.py")):
        text = (ast.get_docstring(ast.parse(path.read_text())) or "").replace("\\\n", " ")
        lines = re.findall(r"^ *((?:torchx|muster|python) .*)$", text, re.MULTILINE)
        found += [(path, shlex.split(line, comments=True)) for line in lines]
    return found


def test_the_commands_of_docstrings_are_understood(monkeypatch):
    commands = list_commands()
    assert len(commands) > 10
    dry_runs = [words for _, words in commands if words[0] == "torchx"]
    for words in dry_runs:  # local_cwd runs it in the folder where the command is given
        assert (ROOT / words[words.index("--script") + 1]).is_file(), words
    text = "".join(f"{shlex.join(words)}\n" for words in dry_runs)
    runner = [sys.executable, str(ROOT / "tests/programs/docs_dry_runs.py")]
    done = subprocess.run(runner, cwd=ROOT, input=text, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    for path, words in commands:
        if words[0] == "torchx":
            continue
        assert words[:2] == ["python", path.relative_to(ROOT).as_posix()]
        monkeypatch.setattr(sys, "argv", words[1:])
        monkeypatch.syspath_prepend(path.parent)
        own = runpy.run_path(str(path)).get("parse_options")
        assert importlib.import_module("app").parse_options(None) if own is None else own()
