"""`muster-agent ask stop`: workers that are no Python programs stop at one step, too."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from harness import AGENT, LIMIT_S, PROGRAMS, Tree

from muster.agent import ask

PROGRAM = str(PROGRAMS / "ask_steps.sh")


@pytest.mark.parametrize("stride", [1, 3])
def test_all_ranks_stop_at_one_step(tmp_path: Path, stride: int) -> None:
    agent = [*AGENT, "--standalone", "--nproc-per-node", "2", "--no-python"]
    env = os.environ | {"MUSTER_DRAIN_LIMIT_S": "60"}
    command = [*agent, "--tee", "3", "--log-dir", str(tmp_path / "logs")]
    with Tree([*command, "sh", PROGRAM, str(tmp_path), sys.executable, str(stride)], env=env) as tree:
        tree.wait_for_line("asks", count=2)
        tree.send(signal.SIGTERM)
        outcome = tree.wait().check(143)
    [step] = {int((tmp_path / f"rank{rank}").read_text()) for rank in range(2)}
    assert step % stride == 0
    assert f"stop at step {step}, " in " ".join(outcome.stderr.split()), outcome.explain()


@pytest.mark.parametrize(
    ("words", "code", "line"),
    [
        (["stop", "--step", "7"], 0, None),
        (["stop", "--step=7", "--stride=2"], 0, None),
        (["--help"], 0, None),
        ([], 2, "ask nothing: the question must be stop"),
        (["pause"], 2, "ask 'pause': the question must be stop"),
        (["stop"], 2, "ask stop: --step is missing"),
        (["stop", "--step"], 2, "ask stop: --step needs a value"),
        (["stop", "--step", "-1"], 2, "ask stop --step '-1': must be a whole number, 0 to"),
        (["stop", "--step", "1", "--stride", "0"], 2, "ask stop --stride '0': must be a whole number, 1 to"),
        (["stop", "--step", "1", "--now"], 2, "ask stop: unknown argument '--now'"),
    ],
)
def test_words(
    words: list[str],
    code: int,
    line: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("MUSTER_STATUS_PAGE", raising=False)
    assert ask.main(words) == code
    error = capsys.readouterr().err
    assert error.startswith(f"muster: {line}") if line else error == ""


def test_a_question_outside_of_a_job_loads_next_to_nothing() -> None:
    env = {name: text for name, text in os.environ.items() if name != "MUSTER_STATUS_PAGE"}
    command = [sys.executable, "-X", "importtime", "-m", "muster.agent", "ask", "stop", "--step", "3"]
    asked = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=True)
    loaded = {line.rpartition("|")[2].strip() for line in asked.stderr.splitlines()}
    assert {each for each in loaded if each.startswith("muster")} == {
        "muster",
        "muster.agent",
        "muster.agent.ask",
        "muster._shared",
        "muster._shared.contract",
        "muster._shared.layouts",
    }
