"""The examples with snapshots: after a kill no step is repeated, and the weights are those of an undisturbed job."""

import os
import re
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from harness import Tree

pytestmark = [
    pytest.mark.slow,
    pytest.mark.torch,
    pytest.mark.skipif(sys.platform != "linux", reason="memory files are for Linux"),
]

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
STEPS, LIMIT_S = 40, 150.0
KILLED = """\
import os, runpy, sys
import torch
save = torch.save
def dies(state, path):
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and "step39" in str(path):
        os.kill(os.getpid(), 9)
    save(state, path)
torch.save = dies
sys.path.insert(0, os.path.dirname({0!r}))
runpy.run_path({0!r}, run_name="__main__")
"""


def run(script: str, folder: Path, *words: str) -> str:
    """Run it to its end; what it has printed."""
    folder.mkdir()
    agent = [sys.executable, "-m", "muster.agent", "--standalone", "--nproc-per-node", "2", "--max-restarts", "2"]
    every = "--checkpoint-every" if script.startswith("snapshots/") else "--save-every"
    options = ["--output", str(folder / "out"), "--steps", str(STEPS), every, "25", *words]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder), "HF_HUB_OFFLINE": "1"}
    with Tree([*agent, str(EXAMPLES / script), *options], env=env, cwd=folder) as tree:
        outcome = tree.wait(LIMIT_S)
    assert "missing keys" not in outcome.stderr, outcome.explain()
    assert not list(folder.glob("tmp*")), "what the callback writes for Trainer is not left"
    assert (outcome.exit_code, outcome.leftovers) == (0, ()), outcome.explain()
    return " ".join((outcome.stdout + outcome.stderr).split())


def check(script: str, folder: Path, read_weights: Callable[[Path], "dict[str, torch.Tensor]"]) -> None:
    printed = run(script, folder / "one", "--fail-at", "30")
    assert re.search(r"step (29|30), from memory", printed), printed
    assert re.search(r"step (29|30) from memory", printed), printed
    assert "continues from" not in run(script, folder / "whole")
    weights, undisturbed = (read_weights(folder / name / "out") for name in ("one", "whole"))
    assert weights.keys() == undisturbed.keys()
    assert all(torch.equal(weight, undisturbed[name]) for name, weight in weights.items())


@pytest.mark.long
def test_ddp(tmp_path: Path) -> None:
    check("snapshots/ddp.py", tmp_path, lambda out: torch.load(out / f"step{STEPS - 1}.pt")["model"])


@pytest.mark.long
def test_a_rank_that_is_killed_in_the_last_checkpoint_saves_it_again(tmp_path: Path) -> None:
    """Its step is no snapshot yet: else nothing would be left to do."""
    script = tmp_path / "killed.py"
    script.write_text(KILLED.format(str(EXAMPLES / "snapshots" / "ddp.py")))
    agent = [sys.executable, "-m", "muster.agent", "--standalone", "--nproc-per-node", "2", "--max-restarts", "2"]
    words = [str(script), "--output", str(tmp_path / "out"), "--steps", str(STEPS), "--checkpoint-every", "25"]
    with Tree([*agent, *words], cwd=tmp_path) as tree:
        outcome = tree.wait(LIMIT_S)
    assert outcome.exit_code == 0, outcome.explain()
    assert (tmp_path / "out" / f"step{STEPS - 1}.pt").exists(), outcome.explain()


@pytest.mark.long
def test_fsdp2(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    def read_weights(out: Path) -> dict[str, torch.Tensor]:
        dcp_to_torch_save(out / f"step{STEPS - 1}", out / "whole.pt")
        return torch.load(out / "whole.pt")["model"]

    check("snapshots/fsdp2.py", tmp_path, read_weights)


@pytest.mark.long
@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
def test_hugging_face(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    check("huggingface/train.py", tmp_path, lambda out: load_file(out / f"checkpoint-{STEPS}" / "model.safetensors"))


@pytest.mark.long
@pytest.mark.skipif(find_spec("lightning") is None, reason="lightning is not installed")
def test_lightning(tmp_path: Path) -> None:
    check("lightning/train.py", tmp_path, lambda out: torch.load(out / "last.ckpt")["state_dict"])
