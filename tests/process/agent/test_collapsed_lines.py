"""What several workers write alike is on the agent's terminal once; pipes and files have it from each of them."""

import os
import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from harness import AGENT
from terminal import TerminalProgram, render

COMMAND = [*AGENT, "--standalone", "--nproc-per-node", "8", "--start", "cold"]
STEPS = 400
PROGRAM = f"""
import os, sys, time
rank = int(os.environ["RANK"])
os.mkdir(f"ready{{rank}}")
while not all(os.path.exists(f"ready{{each}}") for each in range(8)):
    time.sleep(0.01)
sys.stderr.write("\\r 50%|#####     |")
sys.stderr.flush()
for step in range({STEPS}):
    print(f"step {{step}} loss {{1 / (1 + rank + step):.5f}}")
    if step % 100 == 0:
        print("of rank", "abcdefgh"[rank], flush=True)
sys.stderr.write("\\r100%|##########|\\n")
"""
WAITS = """
import os, signal, sys, threading
print("step", os.environ["RANK"], flush=True)
try:
    threading.Event().wait()
except KeyboardInterrupt:
    print("saved", os.environ["RANK"], flush=True)
"""


def parse_ranks(text: str) -> list[int]:
    spans = (part.partition("-") for part in text.split(","))
    return [rank for first, _, last in spans for rank in range(int(first), int(last or first) + 1)]


def show(text: str) -> list[str]:
    return render(text.replace("\r\n", "\n"))


def list_said(rows: list[str]) -> dict[int, list[str]]:
    """What each rank said, in order, without numbers."""
    said: dict[int, list[str]] = {rank: [] for rank in range(8)}
    for row in rows:
        found = re.match(r"\[default([\d,-]+)\]:(.*)", row)
        for rank in parse_ranks(found[1]) if found else ():
            said[rank].append(re.sub(r"[\d.]+", "#", found[2]))
    return said


@pytest.mark.parametrize("variables", [{"TERM": "xterm"}, {"TERM": "xterm", "NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_a_terminal_has_each_line_once_for_each_rank(tmp_path: Path, variables: dict[str, str]) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    logs = ["--tee", "3", "--log-dir", str(tmp_path / "logs")]
    env = {**os.environ, "TMPDIR": str(tmp_path), **variables}
    with TerminalProgram([*COMMAND, *logs, "train.py"], env=env, cwd=tmp_path) as program:
        text = program.finish()
    assert ("\x1b[36m" in text) == (variables == {"TERM": "xterm"})
    rows = show(text)
    said = list_said(rows)
    for rank in range(8):
        lines = [line for line in said[rank] if "%" not in line]
        expected = [["step # loss #", *["of rank " + "abcdefgh"[rank]] * (step % 100 == 0)] for step in range(STEPS)]
        assert lines == [line for step in expected for line in step]
        assert said[rank].count("#%|##########|") == 1, "a bar of its own"
    assert sum("step" in row for row in rows) < 7 * STEPS, "many lines are there once"
    files = [path.read_text() for path in (tmp_path / "logs").rglob("stdout.log")]
    assert len(files) == 8
    assert all(len(file.splitlines()) == STEPS + STEPS // 100 for file in files)


@pytest.mark.parametrize(("flags", "rows"), [((), 8), (("--collapse-lines", "on"), 1)])
def test_a_pipe_has_every_line_unless_asked(tmp_path: Path, flags: tuple[str, ...], rows: int) -> None:
    (tmp_path / "train.py").write_text("import os\nprint('step', os.environ['RANK'])\n")
    command = [*COMMAND, *flags, "--tee", "1", "--log-dir", str(tmp_path / "logs"), "train.py"]
    text = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout
    said = list_said(text.splitlines())
    assert all(lines == ["step #"] for lines in said.values()), text
    assert (len(text.splitlines()) == 8) == (rows == 8), text


def test_nothing_is_lost_at_ctrl_c(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(WAITS)
    env = {**os.environ, "TMPDIR": str(tmp_path), "TERM": "xterm", "NO_COLOR": "1"}
    with TerminalProgram([*COMMAND, "train.py"], env=env, cwd=tmp_path, has_keys=True) as program:
        while any(lines != ["step #"] for lines in list_said(show(program.text)).values()):
            program.read_more()
        program.type("\x03")
        text = program.finish(None)
    said = list_said(show(text))
    assert Counter(map(tuple, said.values())) == {("step #", "saved #"): 8}, text
