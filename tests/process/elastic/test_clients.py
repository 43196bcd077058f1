"""Programs from the package index that call torch.distributed.run, with only the name they import replaced."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from harness import PROGRAMS, Outcome, run_tree

pytestmark = [pytest.mark.torch, pytest.mark.long]

FOLDER = PROGRAMS / "clients"

CLIENTS = {
    "accelerate": (
        "accelerate.commands.accelerate_cli:main",
        *("launch", "--multi_gpu", "--num_processes=2", "--num_machines=1", "--mixed_precision=no"),
        *("--dynamo_backend=no", f"--main_process_port={29400 + os.getpid() % 500}", str(FOLDER / "sums.py")),
    ),
    "fabric": (
        "lightning_fabric.cli:_main",
        *("run", "--accelerator=cpu", "--devices=2", f"--main-port={29400 + os.getpid() % 500}"),
        *(str(FOLDER / "sums.py"), "--"),
    ),
}


def run_client(name: str, *args: str, folder: Path) -> Outcome:
    command = [sys.executable, str(FOLDER / "patched.py"), *CLIENTS[name], *args]
    env = {**os.environ, "HF_HOME": str(folder), "ACCELERATE_CONFIG_FILE": ""}
    return run_tree(command, env=env, cwd=folder, timeout_s=150)


@pytest.mark.parametrize("name", ["accelerate", "fabric"])
def test_it_trains(name: str, tmp_path: Path) -> None:
    outcome = run_client(name, "a", "--b", folder=tmp_path).check()
    lines = sorted(line for line in outcome.stdout.splitlines() if line.startswith("ranks"))
    assert [line.rpartition(" ")[0] for line in lines] == [f"ranks {rank} 2 1 ['a', '--b']" for rank in (0, 1)]


def test_a_failure_reaches_it_as_torchs_exception(tmp_path: Path) -> None:
    outcome = run_client("accelerate", "fail", folder=tmp_path).check(1)
    assert "torch.distributed.elastic.multiprocessing.errors.ChildFailedError" in outcome.stderr, outcome.explain()
    assert "ValueError: the text" in outcome.stderr


@pytest.mark.timeout(400)
@pytest.mark.skipif(
    find_spec("torchrunx") is None, reason="torchrunx is not a test dependency: it brings an SSH client"
)
@pytest.mark.parametrize(
    ("scenario", "line"),
    [
        ("sum", "{'localhost': [(0, 21, True), (1, 21, True)]}"),
        ("fail", "ValueError the text"),
        ("exit", "WorkerFailedError To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html"),
    ],
)
def test_torchrunx(scenario: str, line: str, tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(FOLDER / "start_up"), "TMPDIR": str(tmp_path)}
    command = [sys.executable, str(FOLDER / "torchrunx_job.py"), scenario]
    outcome = run_tree(command, env=env, cwd=tmp_path, timeout_s=300).check()
    assert outcome.stdout.splitlines()[-1] == line, outcome.explain()
