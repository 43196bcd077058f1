"""What `torchx run` prints of all nodes: live rows of progress bars, and warnings once."""

import os
import sys
from pathlib import Path

import pytest
from terminal import TerminalProgram

PROGRAM = """
import os, sys, time, warnings
warnings.warn("no NumPy")
for step in range(20):
    sys.stderr.write(f"\\r{step * 5:3d}%|{'#' * (step // 2):10}|")
    sys.stderr.flush()
    if step == 10:
        print("half", flush=True)
    time.sleep(0.1)
sys.stderr.write("\\r100%|##########|\\n")
"""


@pytest.mark.torchx
def test_bars_of_all_ranks_are_rows_below_the_lines(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    job = ["dist.ddp", "-j", "2x2", "--script", "train.py"]
    command = [str(Path(sys.executable).with_name("torchx")), "run", "-s", "local_cwd", *job]
    env = {**os.environ, "TERM": "xterm", "NO_COLOR": "1", "XDG_STATE_HOME": str(tmp_path), "TORCHX_CONFIG": ""}
    with TerminalProgram(command, env=env, cwd=tmp_path) as terminal:
        text, code = terminal.read_until(None).replace("\r\n", "\n"), terminal.wait()
    assert code == 0, text
    ranks = [f"train/{node} [train{local}|n{node}.r{2 * node + local}]:" for node in range(2) for local in range(2)]
    rows = [part for part in text.split("\x1b[K") if all(f"{rank} " in part for rank in ranks)]
    assert rows, text
    assert all(part.index(f"{ranks[0]} ") < part.index(f"{ranks[3]} ") for part in rows), "in the order of ranks"
    printed = text.replace("\x1b[32m", "").replace("\x1b[0m", "")
    for rank in ranks:
        assert printed.count(f"{rank}half\n") == 1, "a line between two states of a bar"
        assert printed.count(f"{rank}100%|##########|\n") == 1, "the bar's last state stays"
    assert text.count('  warnings.warn("no NumPy")') == 1, "what all ranks of both nodes warn of is printed once"
    logs = [path.read_text() for path in tmp_path.rglob("stderr.log")]
    assert sum(log.count('  warnings.warn("no NumPy")') for log in logs) >= 4, "each rank's file has it"
