"""The examples run from any folder, as their first lines say."""

import ast
import importlib
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys

import pytest
import yaml
from doc_pages import ROOT
from doubles.kubernetes_schemas import judge
from harness import wait_until
from torchx.runner import get_runner


class Rollouts:
    """The app of the example, while it runs."""

    def __init__(self, runner, handle):
        self.runner, self.handle = runner, handle

    def read(self, role, index=0):
        return "".join(self.runner.log_lines(self.handle, role, k=index))

    def find_learners(self):
        return [int(pid) for pid in re.findall(r"rank \d is process (\d+)", self.read("learner"))]

    def find_losses(self):
        return [float(loss) for loss in re.findall(r"loss ([\d.]+)", self.read("learner"))]

    def find_actors(self, index):
        return [int(pid) for pid in re.findall(r"process (\d+) is connected", self.read("actor", index))]

    def kill_actor(self, index):
        self.wait(lambda: self.find_actors(index), f"actor {index} is there")
        before = self.find_actors(index)
        os.kill(before[-1], signal.SIGKILL)
        self.wait(lambda: len(self.find_actors(index)) > len(before), f"actor {index} is back")

    def wait(self, check, what):
        return wait_until(check, what=lambda: f"{what}: {self.read('learner')[-3000:]}")


@pytest.mark.timeout(200)
def test_a_learner_goes_on_while_its_actors_are_killed_and_heals_by_itself(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(ROOT / "examples/several_roles")
    monkeypatch.syspath_prepend(str(ROOT / "examples/several_roles"))
    rollouts = importlib.import_module("rollouts")
    with get_runner() as runner:
        app = Rollouts(runner, runner.run(rollouts.build_app("", rollouts.find_port(), steps=1500), "local_cwd"))
        app.wait(lambda: len(app.find_losses()) >= 2, "the learner has learned")
        learners = app.find_learners()
        for count in range(10):
            app.kill_actor(count % 3)
        assert app.find_learners() == learners, "no process of the learner was touched"
        assert runner.status(app.handle).num_restarts == 10
        known = len(app.find_losses())
        os.kill(learners[1], signal.SIGKILL)
        app.wait(lambda: len(app.find_learners()) == 4, "the learner has healed")
        app.wait(lambda: len(app.find_losses()) > known, "it learns")
        status = runner.wait(app.handle, wait_interval=0.2)
        losses = app.find_losses()
    assert status.state.name == "SUCCEEDED", status
    assert losses[-1] < 0.1 * losses[0], losses


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
        assert runpy.run_path(str(path))["parse_options"]()
