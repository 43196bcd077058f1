"""The examples to copy are preempted and resume: the weights are those of a job that was left alone.

Each is one job of two ranks on one node. It is preempted, runs again with the same run id and log folder to some steps
further, and is compared with a new job that runs to the same step undisturbed.
"""

import contextlib
import os
import re
import signal
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from harness import LIMIT_S, Outcome, Tree, wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.torch,
    pytest.mark.skipif(sys.platform != "linux", reason="the status page is for Linux"),
]

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
LONG, MORE = 1_000_000, 30


PRELOADED = {
    "huggingface/train.py": ["--preload", "torch,transformers.trainer,transformers.models.gpt2.modeling_gpt2"],
    "lightning/train.py": ["--preload", "torch,lightning"],
}
"""What is imported once for both ranks."""


def start(script: str, folder: Path, steps: int) -> Tree:
    agent = [sys.executable, "-m", "muster.agent", "--standalone", "--nproc-per-node", "2", "--rdzv-id", "example"]
    command = [
        *agent,
        *PRELOADED.get(script, ()),
        "--hang-timeout",
        "auto",
        "--log-dir",
        str(folder / "logs"),
        "--tee",
        "3",
        str(EXAMPLES / script),
    ]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}
    words = ["--output", str(folder / "out"), "--steps", str(steps), "--save-every", "20"]
    return Tree([*command, *words], env=env, cwd=folder)


def run_to_end(script: str, folders: list[Path], steps: int) -> list[Outcome]:
    """Run it in all of these folders at once."""
    with contextlib.ExitStack() as stack:
        for folder in folders:
            folder.mkdir(exist_ok=True)
        trees = [stack.enter_context(start(script, folder, steps)) for folder in folders]
        outcomes = [tree.wait(LIMIT_S) for tree in trees]
    for outcome in outcomes:
        assert not re.search("hung|did not enter", outcome.stderr), outcome.explain()  # the watch raises no false alarm
        assert (outcome.exit_code, outcome.leftovers) == (0, ()), outcome.explain()
    return outcomes


def preempt(script: str, folder: Path, saved: str) -> int:
    """Run it until it has saved, then send SIGTERM; the step after which all ranks stopped."""
    folder.mkdir()
    with start(script, folder, LONG) as tree:
        with contextlib.suppress(AssertionError):  # the outcome says more
            wait_until(lambda: any((folder / "out").glob(saved)), what="the first checkpoint")
        tree.send(signal.SIGTERM)
        outcome = tree.wait(LIMIT_S)
    assert (outcome.exit_code, outcome.leftovers) == (143, ()), outcome.explain()
    console = " ".join(outcome.stderr.split())
    stopped = re.search(r"all ranks have stopped at step (\d+) and ended, [\d.]+ s .*; rank \d was the last", console)
    assert stopped is not None, outcome.explain()
    return int(stopped[1])


def check(
    script: str, folder: Path, saved: str, read_weights: Callable[[Path, int], "dict[str, torch.Tensor]"]
) -> None:
    step = preempt(script, folder / "one", saved)
    total = step + 1 + MORE
    resumed, whole = run_to_end(script, [folder / "one", folder / "whole"], total)
    assert len(re.findall(rf"resumes from .*[^\d]{step}\b", resumed.stdout)) == 2, resumed.explain()
    assert "resumes" not in whole.stdout, whole.explain()
    weights, undisturbed = (read_weights(folder / name / "out", total) for name in ("one", "whole"))
    assert weights.keys() == undisturbed.keys()
    assert all(torch.equal(weight, undisturbed[name]) for name, weight in weights.items())


@pytest.mark.long
def test_ddp(tmp_path: Path) -> None:
    def read_weights(out: Path, total: int) -> dict[str, torch.Tensor]:
        return torch.load(out / f"step{total - 1}.pt")["model"]

    check("preemptible/train.py", tmp_path, "step*.pt", read_weights)


@pytest.mark.long
def test_fsdp2(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    def read_weights(out: Path, total: int) -> dict[str, torch.Tensor]:
        dcp_to_torch_save(out / f"step{total - 1}", out / "whole.pt")
        return torch.load(out / "whole.pt")["model"]

    check("fsdp2/train.py", tmp_path, "step*/.metadata", read_weights)


@pytest.mark.long
@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
def test_hugging_face(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    def read_weights(out: Path, total: int) -> dict[str, torch.Tensor]:
        return load_file(out / f"checkpoint-{total}" / "model.safetensors")

    check("huggingface/train.py", tmp_path, "checkpoint-*", read_weights)


@pytest.mark.long
@pytest.mark.skipif(find_spec("lightning") is None, reason="lightning is not installed")
def test_lightning(tmp_path: Path) -> None:
    def read_weights(out: Path, total: int) -> dict[str, torch.Tensor]:
        saved = torch.load(out / "last.ckpt")
        assert saved["global_step"] == total
        return saved["state_dict"]

    check("lightning/train.py", tmp_path, "step-*.ckpt", read_weights)
