"""The examples survive `muster rehearse`, and nothing of them is blamed."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from harness import ROOT, run_tree

MUSTER = Path(sys.executable).with_name("muster")
EXAMPLES = ROOT / "examples"

pytestmark = [pytest.mark.torch, pytest.mark.long, pytest.mark.timeout(1200)]


@pytest.mark.parametrize(
    ("example", "every", "compare"),
    [
        ("preemptible/train.py", "--save-every", "out/preemptible/step119.pt"),
        ("snapshots/ddp.py", "--checkpoint-every", "out/snapshots-ddp/step119.pt"),
        ("fsdp2/train.py", "--save-every", "out/fsdp2/*119*/*.distcp"),
        ("huggingface/train.py", "--save-every", "out/huggingface/*120/model.safetensors"),
    ],
)
def test_an_example_survives(tmp_path: Path, example: str, every: str, compare: str) -> None:
    if example.startswith("huggingface"):
        pytest.importorskip("transformers")
    folder = tmp_path / "work"
    shutil.copytree((EXAMPLES / example).parent, folder)
    env = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state"), "OMP_NUM_THREADS": "1"}
    words = ["--seed", "1", "--json", "--faults", "rank-killed,preempted,rank-killed@checkpoint", "--compare", compare]
    job = ["dist.ddp", "-j", "2x1", "--script", Path(example).name, "--", "--steps", "120", every, "20"]
    outcome = run_tree([str(MUSTER), "rehearse", *words, *job], cwd=folder, env=env, timeout_s=1000).check()
    data = json.loads(outcome.stdout)
    assert [(row["verdict"], row["result"]) for row in data["rows"]] == [("survived", "equal")] * 3, outcome.explain()
    assert data["advice"] == []
