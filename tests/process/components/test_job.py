"""The main job end to end: TorchX's command line, dist.ddp, local_cwd, the agent, a model that learns."""

import json
import os
import re
import sys
from pathlib import Path

import pytest
from harness import ROOT, Outcome, run_tree
from launchers import START_FLAGS

pytestmark = pytest.mark.torch

ALARMING = re.compile(r"Error|Exception|Traceback|frame #")
FROM_A_WORKER = re.compile(r"main/[01] \[main[01]\|n[01]\.r[0-3]\]:")
LINES = {"stable": Path(sys.executable).parent, "nightly": ROOT / ".venv-nightly" / "bin"}
each_line = pytest.mark.parametrize("line", ["stable", pytest.param("nightly", marks=pytest.mark.long)])


def run_torchx(line: str, tmp_path: Path, *words: str) -> Outcome:
    """Run one line's `torchx`; the workers' Python is this test's, which has torch."""
    torchx = LINES[line] / "torchx"
    if not torchx.exists():
        pytest.skip(f"{torchx} is not there: `make environments` makes it")
    environment = os.environ | {
        "VIRTUAL_ENV": str(Path(sys.executable).parent.parent),
        "XDG_STATE_HOME": str(tmp_path / "state"),
    }
    return run_tree(
        [str(torchx), "run", "-s", "local_cwd", words[0], *START_FLAGS, *words[1:]],
        env=environment,
        cwd=ROOT,
        timeout_s=170,
    )


@each_line
def test_the_example_trains_on_two_nodes(line: str, tmp_path: Path) -> None:
    command = ["dist.ddp", "-j", "2x1", "--script", "examples/digits/train.py", "--", "--output", str(tmp_path / "out")]
    outcome = run_torchx(line, tmp_path, *command).check()
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["accuracy"] > 0.95
    assert result["world_size"] == 2
    console = outcome.stdout + outcome.stderr
    assert [text for text in console.splitlines() if ALARMING.search(text)] == []


@each_line
def test_alarming_lines_are_the_scripts_own_and_its_arguments_arrive_as_they_were_written(
    line: str, tmp_path: Path
) -> None:
    script = tmp_path / "main.py"
    script.write_text(
        "import json, os, sys\nprint('Error: mine\\nTraceback of mine')\nprint('Exception', file=sys.stderr)\n"
        f"json.dump(sys.argv[1:], open({str(tmp_path)!r} + '/argv' + os.environ['RANK'], 'w'))\n"
    )
    words = ["-x", "--nnodes", "7", "--", "-m", "two words", "a'b\"c", "$HOME", "*", "--script=b"]
    outcome = run_torchx(line, tmp_path, "dist.ddp", "-j", "2x2", "--script", str(script), "--", *words).check()
    alarming = [text for text in (outcome.stdout + outcome.stderr).splitlines() if ALARMING.search(text)]
    assert len(alarming) == 12  # 3 lines of 4 workers
    assert [text for text in alarming if not FROM_A_WORKER.search(text)] == []
    assert [json.loads((tmp_path / f"argv{rank}").read_text()) for rank in range(4)] == [words] * 4


@pytest.mark.long
@pytest.mark.parametrize("folder", ["another", "the repository", "/"])
def test_the_pipeline_example_runs_a_job_from_python(folder: str, tmp_path: Path) -> None:
    program = str(ROOT / "examples/pipeline.py") if folder != "the repository" else "examples/pipeline.py"
    command = [sys.executable, program, "-j", "1x2", "--", "--epochs", "1", "--output", str(tmp_path)]
    environment = os.environ | {"XDG_STATE_HOME": str(tmp_path / "state")}
    cwd = {"the repository": ROOT, "/": Path("/"), "another": tmp_path}[folder]
    outcome = run_tree(command, env=environment, cwd=cwd, timeout_s=170).check()
    assert "--nproc-per-node" in outcome.stdout  # the dry run
    assert re.search(r"submitted local_cwd://\S+", outcome.stdout)
    assert re.search(r"test accuracy 0\.\d+, written to", outcome.stdout)  # read back from the logs
    assert re.search(r"local_cwd://\S+ is SUCCEEDED", outcome.stdout)
