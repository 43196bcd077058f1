"""ice-learn's calls run as written, with only the import changed; what they draw on a terminal stays whole."""

import os
import signal
import sys
from pathlib import Path

import pytest
from harness import run_tree
from terminal import TerminalProgram, render

PROGRAM = Path(__file__).parents[2] / "programs" / "elastic" / "ice.py"

# On a loaded machine importing torch takes a minute, and every job here does so.
pytestmark = [pytest.mark.torch, pytest.mark.timeout(600)]


def run_on_terminal(folder: Path, *words: str) -> TerminalProgram:
    return TerminalProgram(
        [sys.executable, str(PROGRAM), *words], env={**os.environ, "TMPDIR": str(folder)}, cwd=folder
    )


def test_two_workers_bars_stay_whole_beside_their_lines(tmp_path: Path) -> None:
    with run_on_terminal(tmp_path, "bars") as program:
        text = program.read_until(None)
        assert program.wait() == 0, text
    *rows, values, last = render(text)
    steps = [f"[trainer{rank}]:step {step} of {name}" for rank, name in enumerate("ab") for step in range(1, 6)]
    assert sorted(rows) == sorted([*steps, *(f"[trainer{rank}]:100%|#####" for rank in (0, 1))]), text
    assert (values, last) == ("{0: 'a', 1: 'b'}", "")


def test_a_callers_own_bar_is_cleared_before_lines_are_printed(tmp_path: Path) -> None:
    with run_on_terminal(tmp_path, "progbar_events") as program:
        text = program.read_until(None)
        assert program.wait() == 0, text
    rows = render(text)
    steps = [f"[trainer{rank}]:step {step} of {name}" for rank, name in enumerate("ab") for step in range(1, 6)]
    assert sorted(row for row in rows if row.startswith("[trainer")) == sorted(steps), text
    assert rows[-2:] == ["True{0: 'a', 1: 'b'}", ""], text


def test_tail_log_in_its_order_of_arguments(tmp_path: Path) -> None:
    outcome = run_tree(
        [sys.executable, str(PROGRAM), "tail"], env={**os.environ, "TMPDIR": str(tmp_path)}, timeout_s=250
    )
    *lines, stopped = outcome.stdout.splitlines()
    expected = [f"[trainer{rank}]:{text}" for rank in (0, 1) for text in ("", f"after a blank line {rank}")]
    assert sorted(lines) == sorted(expected), outcome.explain()
    assert stopped == "True"


def test_the_agent_draws_the_bar_of_events(tmp_path: Path) -> None:
    with run_on_terminal(tmp_path, "agent", "20") as program:
        text = program.read_until(None)
        assert program.wait() == 0, text
    *rows, values, last = render(text)
    assert sorted(rows) == sorted(
        f"[trainer{rank}]:step {step} of {rank}" for rank in (0, 1) for step in (5, 10, 15, 20)
    )
    assert (values, last) == ("{0: 'done', 1: 'done'}", "")


@pytest.mark.parametrize(
    ("answer", "saves", "whose"),
    [("y", True, "ice-learn"), ("n", False, "ice-learn"), ("y", True, "muster"), ("n", False, "muster")],
)
def test_ctrl_c_asks_whether_to_save(answer: str, saves: bool, whose: str, tmp_path: Path) -> None:
    with run_on_terminal(tmp_path, "agent", "6000", whose) as program:
        program.read_until("step 5 of 0")
        program.send(signal.SIGINT)
        program.read_until("Should I save the checkpoint? [Y/n]")
        program.type(f"{answer}\n")
        text = program.read_until(None)
        assert program.wait() == 0, text
    assert ("saved by 0" in text) is saves, text
    assert "signal SIGINT" in text, text


def test_sigterm_stops_without_saving(tmp_path: Path) -> None:
    with run_on_terminal(tmp_path, "agent", "6000") as program:
        program.read_until("step 5 of 0")
        program.send(signal.SIGTERM)
        text = program.read_until(None)
        assert program.wait() == 0, text
    assert "saved" not in text, text
    assert "signal SIGTERM" in text, text
