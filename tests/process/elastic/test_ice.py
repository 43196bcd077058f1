"""ice-learn's calls run as written, with only the import changed; what they draw on a terminal stays whole."""

import os
import re
import signal
import sys
from pathlib import Path

import pytest
from harness import PROGRAMS, find_free_port
from launchers import run_api
from terminal import TerminalProgram, render

PROGRAM = PROGRAMS / "elastic" / "ice.py"

# On a loaded machine importing torch takes a minute, and every job here does so.
pytestmark = [pytest.mark.torch, pytest.mark.timeout(600)]

TOKEN = "0123456789abcdef" * 2


def run_on_terminal(folder: Path, *words: str, **variables: str) -> TerminalProgram:
    return TerminalProgram(
        [sys.executable, str(PROGRAM), *words], env={**os.environ, "TMPDIR": str(folder), **variables}, cwd=folder
    )


@pytest.mark.parametrize(
    ("scenario", "more", "values"),
    [
        ("bars", [f"[trainer{rank}]:100%|#####" for rank in (0, 1)], "{0: 'a', 1: 'b'}"),
        pytest.param("progbar_events", [], "True{0: 'a', 1: 'b'}", marks=pytest.mark.long),
    ],
)
def test_bars_stay_whole_beside_lines(scenario: str, more: list[str], values: str, tmp_path: Path) -> None:
    """The workers', or the caller's own, which is cleared before lines are printed."""
    with run_on_terminal(tmp_path, scenario) as program:
        text = program.finish()
    rows = render(text)
    steps = [f"[trainer{rank}]:step {step} of {name}" for rank, name in enumerate("ab") for step in range(1, 6)]
    assert sorted(row for row in rows if row.startswith("[trainer")) == sorted([*steps, *more]), text
    assert rows[-2:] == [values, ""], text


def test_the_agent_draws_the_bar_of_events(tmp_path: Path) -> None:
    with run_on_terminal(tmp_path, "agent", "20") as program:
        text = program.finish()
    *rows, values, last = render(text)
    assert sorted(rows) == sorted(
        f"[trainer{rank}]:step {step} of {rank}" for rank in (0, 1) for step in (5, 10, 15, 20)
    )
    assert (values, last) == ("{0: 'done', 1: 'done'}", "")


@pytest.mark.parametrize(
    ("answer", "saves", "whose"),
    [
        pytest.param("y", True, "ice-learn", marks=pytest.mark.long),
        pytest.param("n", False, "ice-learn", marks=pytest.mark.long),
        ("y", True, "muster"),
        pytest.param("n", False, "muster", marks=pytest.mark.long),
    ],
)
def test_ctrl_c_asks_whether_to_save(answer: str, saves: bool, whose: str, tmp_path: Path) -> None:
    with run_on_terminal(tmp_path, "agent", "6000", whose) as program:
        program.read_until("step 5 of 0")
        program.send(signal.SIGINT)
        program.read_until("Should I save the checkpoint? [Y/n]")
        program.type(f"{answer}\n")
        text = program.finish()
    assert ("saved by 0" in text) is saves, text
    assert "signal SIGINT" in text, text


@pytest.mark.long
def test_ctrl_c_on_one_of_two_nodes_saves_and_stops_both_at_one_step(tmp_path: Path) -> None:
    port = str(find_free_port())
    first, second = (
        run_on_terminal(tmp_path, "agent", "6000", "muster", node, "2", port, MUSTER_TOKEN=TOKEN) for node in "01"
    )
    with first, second:
        first.read_until("step 5 of 0")
        first.send(signal.SIGINT)
        first.read_until("Should I save the checkpoint? [Y/n]")
        first.type("y\n")
        texts = [first.read_until(None), second.read_until(None)]
        assert (first.wait(), second.wait()) == (0, 0), "\n".join(texts)
    assert "signal SIGINT" in texts[0], texts[0]
    assert "signal SIGTERM" in texts[1], texts[1]
    saved = re.findall(r"saved by \d at step (\d+)", "\n".join(texts))
    assert (len(saved), len(set(saved))) == (4, 1), "\n".join(texts)


@pytest.mark.long
def test_sigterm_stops_without_saving(tmp_path: Path) -> None:
    with run_on_terminal(tmp_path, "agent", "6000") as program:
        program.read_until("step 5 of 0")
        program.send(signal.SIGTERM)
        text = program.finish()
    assert "saved" not in text, text
    assert "signal SIGTERM" in text, text


RECORDED = """\
(False, {0: 'ab', 1: 'cd'}, {0: 'D/0/stdout.log', 1: 'D/1/stdout.log'}, {0: 'D/0/stderr.log', 1: 'D/1/stderr.log'}) \
['0/stderr.log', '0/stdout.log', '1/stderr.log', '1/stdout.log']
(False, {0: 'ab', 1: 'cd'}, {0: 'D/0/stdout.log', 1: 'D/1/stdout.log'}, {0: '', 1: 'D/1/stderr.log'}) \
['0/stdout.log', '1/stderr.log', '1/stdout.log']
(False, {0: 'ab', 1: 'cd'}, {0: '', 1: ''}, {0: '', 1: 'D/1/stderr.log'}) ['1/stderr.log']
(True, {}, {0: 'D/0/stdout.log', 1: 'D/1/stdout.log'}, {0: 'D/0/stderr.log', 1: 'D/1/stderr.log'}) \
['1/error.json', '1/stderr.log', '1/stdout.log']
1 1 D/1/error.json ValueError: no data <N/A>
(False, {0: 'ab', 1: 'cd'}, {0: 'D/0.out', 1: 'D/1.out'}, {0: 'D/0.err', 1: 'D/1.err'}) \
['0.err', '0.out', '1.err', '1.out']
FileNotFoundError [Errno 2] No such file or directory: 'D/none'
RuntimeError log_dir: D is not empty, please provide an empty log_dir
"""
"""What the same program printed with the module of ice-learn 0.4.8, whose `_wrap` was given torch 2.13's arguments."""


@pytest.mark.long
def test_results_and_files_are_those_of_ice_learns_own_module(tmp_path: Path) -> None:
    """Lines of workers that are shown on the console have a prefix here, and none there, where two may be mixed."""
    outcome = run_api("ice_files.py", folder=tmp_path, timeout_s=250)
    printed = [line for line in outcome.stdout.splitlines(keepends=True) if re.match(r"\(|1 1 |FileNot|Runtime", line)]
    assert "".join(printed) == RECORDED, outcome.explain()
