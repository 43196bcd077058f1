"""What `torchx run` prints of all nodes: live rows of progress bars, warnings once, and the end of a failed job."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

pytestmark = pytest.mark.torchx

PROGRAM = """
import os, sys, time
for step in range(40):
    sys.stderr.write(f"\\r{step * 5 // 2:3d}%|{'#' * (step // 4):10}|")
    sys.stderr.flush()
    if step == 20:
        print("half", flush=True)
    time.sleep(0.1)
sys.stderr.write("\\r100%|##########|\\n")
"""
COLUMNS = 80


def run_on_terminal(command: list[str], cwd: Path, env: dict[str, str]) -> tuple[bytes, int]:
    """Everything that it writes to a terminal, and its exit code."""
    master_fd, fd = pty.openpty()
    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
    process = subprocess.Popen(command, stdin=fd, stdout=fd, stderr=fd, cwd=cwd, env=env, start_new_session=True)
    os.close(fd)
    seen = b""
    try:
        while chunk := os.read(master_fd, 65536):
            seen += chunk
    except OSError:  # how Linux reports that the last writer has closed it
        pass
    os.close(master_fd)
    return seen, process.wait()


def run_job(layout: str, program: str, tmp_path: Path) -> tuple[str, int]:
    (tmp_path / "train.py").write_text(program)
    job = ["dist.ddp", "-j", layout, "--script", "train.py"]
    command = [str(Path(sys.executable).with_name("torchx")), "run", "-s", "local_cwd", *job]
    env = {**os.environ, "TERM": "xterm", "NO_COLOR": "1", "XDG_STATE_HOME": str(tmp_path), "TORCHX_CONFIG": ""}
    seen, code = run_on_terminal(command, tmp_path, env)
    return seen.decode().replace("\r\n", "\n"), code


def test_bars_of_all_ranks_are_rows_below_the_lines(tmp_path: Path) -> None:
    text, code = run_job("2x2", PROGRAM, tmp_path)
    assert code == 0, text
    ranks = [f"train/{node} [train{local}|n{node}.r{2 * node + local}]:" for node in range(2) for local in range(2)]
    rows = [part for part in text.split("\x1b[K") if all(f"{rank} " in part for rank in ranks)]
    assert rows, text
    assert all(part.index(f"{ranks[0]} ") < part.index(f"{ranks[3]} ") for part in rows), "in the order of ranks"
    printed = text.replace("\x1b[32m", "").replace("\x1b[0m", "")
    for rank in ranks:
        assert printed.count(f"{rank}half\n") == 1, "a line between two states of a bar"
        assert printed.count(f"{rank}100%|##########|\n") == 1, "the bar's last state stays"


def test_a_failed_job_ends_with_the_reason(tmp_path: Path) -> None:
    """TorchX's dump of the state is longer than the screen, and comes after the report."""
    text, code = run_job("1x2", "raise ValueError('bad batch')", tmp_path)
    assert code == 1, text
    assert "AppStatus" in text
    last = " ".join(text.split("ui_url:")[-1].split()[1:])
    assert re.match(r"JOB FAILED train-\w+: .*ValueError: bad batch", last), text


def test_what_all_ranks_of_two_nodes_warn_of_is_printed_once(tmp_path: Path) -> None:
    program = "import os, warnings\nwarnings.warn('no NumPy')\nprint('rank', os.environ['RANK'])\n"
    text, code = run_job("2x2", program, tmp_path)
    assert code == 0, text
    assert sum("train.py:2: UserWarning: no NumPy" in line for line in text.splitlines()) == 1, text
    assert text.count("  warnings.warn('no NumPy')") == 1, text
    assert all(f"rank {rank}\n" in text for rank in range(4)), text
    logs = [path.read_text() for path in tmp_path.rglob("stderr.log")]
    assert sum(log.count("  warnings.warn('no NumPy')") for log in logs) >= 4, "each rank's file has it"
