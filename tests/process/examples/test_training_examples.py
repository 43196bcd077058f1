"""The examples to copy are preempted, or lose a rank, and resume: the weights are those of a job left alone.

Each is one job of two ranks on one node. One that is preempted runs again with the same run id and log folder to some
steps further. One that keeps snapshots loses a rank, and no step is repeated.
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
from harness import AGENT, ROOT, Outcome, Tree, check_all, wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.torch,
    pytest.mark.skipif(sys.platform != "linux", reason="the status page and memory files are for Linux"),
]

Weights = dict[str, torch.Tensor]
EXAMPLES = ROOT / "examples"
LONG, MORE, STEPS = 1_000_000, 30, 40
PRELOADED = {
    "huggingface/train.py": ["--preload", "torch,transformers.trainer,transformers.models.gpt2.modeling_gpt2"],
    "lightning/train.py": ["--preload", "torch,lightning"],
}
"""What is imported once for both ranks."""
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


def read_ddp(out: Path, steps: int) -> Weights:
    return torch.load(out / f"step{steps - 1}.pt")["model"]


def read_fsdp2(out: Path, steps: int) -> Weights:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(out / f"step{steps - 1}", out / "whole.pt")
    return torch.load(out / "whole.pt")["model"]


def read_hugging_face(out: Path, steps: int) -> Weights:
    from safetensors.torch import load_file

    return load_file(out / f"checkpoint-{steps}" / "model.safetensors")


def read_lightning(out: Path, steps: int) -> Weights:
    saved = torch.load(out / "last.ckpt")
    assert saved["global_step"] == steps
    return saved["state_dict"]


def row(script: str, read_weights: Callable[[Path, int], Weights], *more: str) -> object:
    module = {"huggingface": "transformers", "lightning": "lightning"}.get(script.partition("/")[0], "torch")
    lacks = pytest.mark.skipif(find_spec(module) is None, reason=f"{module} is not installed")
    return pytest.param(script, read_weights, *more, marks=lacks, id=script)


def start(script: str, folder: Path, steps: int, *words: str) -> Tree:
    folder.mkdir(exist_ok=True)
    agent = [*AGENT, "--standalone", "--nproc-per-node", "2", "--rdzv-id", "example", "--max-restarts", "2"]
    agent += [*PRELOADED.get(script, ()), "--hang-timeout", "auto", "--log-dir", str(folder / "logs"), "--tee", "3"]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}
    words = ("--output", str(folder / "out"), "--steps", str(steps), *words)
    return Tree([*agent, str(EXAMPLES / script), *words], env=env, cwd=folder)


def finish(*trees: Tree) -> list[Outcome]:
    outcomes = check_all(trees)
    for outcome in outcomes:
        assert not re.search("hung|did not enter", outcome.stderr), outcome.explain()  # the watch raises no false alarm
    return outcomes


def preempt(tree: Tree, folder: Path, saved: str) -> int:
    """Wait until it has saved, then send SIGTERM; the step after which all ranks stopped."""
    with contextlib.suppress(AssertionError):  # the outcome says more
        wait_until(lambda: any((folder / "out").glob(saved)), what="the first checkpoint")
    tree.send(signal.SIGTERM)
    outcome = tree.wait().check(143)
    console = " ".join(outcome.stderr.split())
    stopped = re.search(r"all ranks have stopped at step (\d+) and ended, [\d.]+ s .*; rank \d was the last", console)
    assert stopped is not None, outcome.explain()
    return int(stopped[1])


def check_weights(folder: Path, steps: int, read_weights: Callable[[Path, int], Weights]) -> None:
    weights, undisturbed = (read_weights(folder / name / "out", steps) for name in ("one", "whole"))
    assert weights.keys() == undisturbed.keys()
    assert all(torch.equal(weight, undisturbed[name]) for name, weight in weights.items())


@pytest.mark.parametrize(
    ("script", "read_weights", "saved"),
    [
        row("preemptible/train.py", read_ddp, "step*.pt"),
        row("fsdp2/train.py", read_fsdp2, "step*/.metadata"),
        row("huggingface/train.py", read_hugging_face, "checkpoint-*"),
        row("lightning/train.py", read_lightning, "step-*.ckpt"),
    ],
)
def test_a_preempted_job_resumes(
    script: str, read_weights: Callable[[Path, int], Weights], saved: str, tmp_path: Path
) -> None:
    one, every = tmp_path / "one", ("--save-every", "20")
    with start(script, one, LONG, *every) as tree:
        step = preempt(tree, one, saved)
    total = step + 1 + MORE
    with start(script, one, total, *every) as again, start(script, tmp_path / "whole", total, *every) as left_alone:
        resumed, whole = finish(again, left_alone)
    assert len(re.findall(rf"resumes from .*[^\d]{step}\b", resumed.stdout)) == 2, resumed.explain()
    assert "resumes" not in whole.stdout, whole.explain()
    check_weights(tmp_path, total, read_weights)


@pytest.mark.parametrize(
    ("script", "read_weights"),
    [
        row("snapshots/ddp.py", read_ddp),
        row("snapshots/fsdp2.py", read_fsdp2),
        row("huggingface/train.py", read_hugging_face),
        row("lightning/train.py", read_lightning),
    ],
)
def test_a_job_that_loses_a_rank_continues_from_memory(
    script: str, read_weights: Callable[[Path, int], Weights], tmp_path: Path
) -> None:
    every = ("--checkpoint-every" if script.startswith("snapshots/") else "--save-every", "25")
    printed = []
    for name, words in {"one": ("--fail-at", "30"), "whole": ()}.items():
        with start(script, tmp_path / name, STEPS, *every, *words) as tree:
            [outcome] = finish(tree)
        assert "missing keys" not in outcome.stderr, outcome.explain()
        assert not list((tmp_path / name).glob("tmp*"))  # nor what the callback writes for Trainer
        printed.append(" ".join((outcome.stdout + outcome.stderr).split()))
    assert re.search(r"step (29|30), from memory", printed[0]), printed[0]
    assert re.search(r"step (29|30) from memory", printed[0]), printed[0]
    assert "continues from" not in printed[1]
    check_weights(tmp_path, STEPS, read_weights)


def test_a_rank_that_is_killed_in_the_last_checkpoint_saves_it_again(tmp_path: Path) -> None:
    """Its step is no snapshot yet: else nothing would be left to do."""
    script = tmp_path / "killed.py"
    script.write_text(KILLED.format(str(EXAMPLES / "snapshots" / "ddp.py")))
    with start(str(script), tmp_path, STEPS, "--checkpoint-every", "25") as tree:
        outcome = tree.wait().check()
    assert (tmp_path / "out" / f"step{STEPS - 1}.pt").exists(), outcome.explain()
