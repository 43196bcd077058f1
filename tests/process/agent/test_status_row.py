"""The last row of a terminal says how far a job is, in everybody's way nowhere; after the end a few lines remain."""

import os
import re
from pathlib import Path

import pytest
from harness import AGENT
from terminal import TerminalProgram, render

COMMAND = [*AGENT, "--standalone", "--nproc-per-node", "2", "--start", "cold"]
PROGRAM = """
import os, sys, time
from muster import worker
rank, name = os.environ["RANK"], "ab"[int(os.environ["RANK"])]
bars, lines = "bars" in sys.argv, int(sys.argv[1])
step = count = 0
while not os.path.exists("enough") or step < 3:
    worker.step(step, total=1000)
    step += 1
    if bars:
        sys.stderr.write(f"\\r{step:5d}|###|")
        sys.stderr.flush()
    for _ in range(lines):
        print(f"{name} says line {count}")
        count += 1
    time.sleep(0.05)
if bars:
    sys.stderr.write("\\r  all|###|\\n")
print(f"{name} has said {count}")
"""
ROW = re.compile(r"\[muster\] step \d+ of 1000 \(\d+ %\)")


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "train.py").write_text(PROGRAM)
    return "train.py"


def start(tmp_path: Path, *words: str, term: str = "xterm", has_keys: bool = False) -> TerminalProgram:
    env = {**os.environ, "TMPDIR": str(tmp_path), "TERM": term, "NO_COLOR": "1"}
    return TerminalProgram([*COMMAND, *words], env=env, cwd=tmp_path, has_keys=has_keys)


def read_rows(program: TerminalProgram) -> None:
    while len(ROW.findall(program.text)) < 2:
        program.read_more(120)


def check_end(text: str) -> list[str]:
    """The row has left nothing; every line of both ranks is there, in order."""
    rows = render(text.replace("\r\n", "\n"))
    assert not any("1000 (" in row for row in rows), rows
    for name in "ab":
        said = [int(row.split()[-1]) for row in rows if f"]:{name} says line" in row]
        (count,) = [int(row.split()[-1]) for row in rows if f"]:{name} has said" in row]
        assert said == list(range(count))
    return rows


@pytest.mark.parametrize("words", [("1",), ("500",), ("1", "bars")], ids=["a line", "10,000 lines a second", "bars"])
def test_the_row_disturbs_nothing_and_leaves_nothing(tmp_path: Path, script: str, words: tuple[str, ...]) -> None:
    with start(tmp_path, script, *words) as program:
        read_rows(program)
        (tmp_path / "enough").touch()
        text = program.finish()
    rows = check_end(text)
    ends = [row for row in rows if row.startswith("[muster]")]
    assert any(re.fullmatch(r"\[muster\] \d+ of 1000 steps.*", row) for row in ends), ends
    assert any(" succeeded after " in row for row in ends), ends
    if words == ("1",):  # a line at each step
        done = min(int(row.split()[-1]) for row in rows if " has said " in row)
        assert any(row.startswith(f"[muster] {done} of 1000 steps") for row in ends), (done, ends)
    assert sum("all|###|" in row for row in rows) == (2 if "bars" in words else 0)


def test_ctrl_c_leaves_no_row(tmp_path: Path, script: str) -> None:
    with start(tmp_path, script, "0", has_keys=True) as program:
        read_rows(program)
        program.type("\x03")
        text = program.finish(None)
    rows = render(text.replace("\r\n", "\n"))
    assert not any("1000 (" in row for row in rows), rows
    assert any(row.startswith("[muster] stopped after") for row in rows), rows
