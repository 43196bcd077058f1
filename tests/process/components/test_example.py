"""The example: it trains, it resumes where it was interrupted, it prints no warnings."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from harness import ROOT

pytestmark = pytest.mark.torch

TRAIN = ROOT / "examples/digits/train.py"
ALARMING = re.compile(r"Error|Exception|Traceback|frame #|Warning")


@pytest.fixture
def environment() -> dict[str, str]:
    """The environment of the only worker of a job."""
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    return os.environ | ranks | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


def run(*command: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *command], env=env, capture_output=True, text=True, timeout=170)


@pytest.mark.long
def test_trains_then_resumes_where_it_was_interrupted(tmp_path: Path, environment: dict[str, str]) -> None:
    whole = run(str(TRAIN), "--epochs", "6", "--output", str(tmp_path / "whole"), env=environment)
    assert whole.returncode == 0, whole.stderr
    assert not ALARMING.search(whole.stdout + whole.stderr)
    result = json.loads((tmp_path / "whole" / "result.json").read_text())
    assert result["accuracy"] > 0.95
    assert not (tmp_path / "whole" / "checkpoint.pt").exists()  # so that the next run starts from the beginning

    # killed as it begins epoch 4: the checkpoint of the third is there
    code = f"""
import os, runpy, sys
from torch.utils.data import DistributedSampler
sys.argv = [{str(TRAIN)!r}, "--epochs", "6", "--output", {str(tmp_path / "cut")!r}]
set_epoch = DistributedSampler.set_epoch
DistributedSampler.set_epoch = lambda sampler, epoch: os._exit(7) if epoch == 3 else set_epoch(sampler, epoch)
runpy.run_path(sys.argv[0], run_name="__main__")
"""
    cut = run("-c", code, env=environment)
    assert cut.returncode == 7, cut.stderr
    assert [path.name for path in (tmp_path / "cut").iterdir()] == ["checkpoint.pt"]

    resumed = run(str(TRAIN), "--epochs", "6", "--output", str(tmp_path / "cut"), env=environment)
    assert resumed.returncode == 0, resumed.stderr
    assert "resumed after epoch 3" in resumed.stdout
    assert "epoch  4/6" in resumed.stdout
    assert "epoch  3/6" not in resumed.stdout
    # not merely near: an interrupted run ends where an uninterrupted one does
    assert json.loads((tmp_path / "cut" / "result.json").read_text()) == result
