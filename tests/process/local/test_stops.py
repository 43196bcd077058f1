"""A job that is stopped from a terminal or from another shell: what its workers get, and its last line."""

import os
import re
import sys
from pathlib import Path

from terminal import TerminalProgram

TORCHX = str(Path(sys.executable).with_name("torchx"))
PROGRAM = """
import threading
try:
    print("is up", flush=True)
    threading.Event().wait()
except KeyboardInterrupt:
    print("KeyboardInterrupt", flush=True)
"""
RANKS = ["[train0|n0.r0]:", "[train1|n0.r1]:", "[train0|n1.r2]:", "[train1|n1.r3]:"]


def test_workers_get_the_signal_and_the_last_line_is_printed(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    env = {**os.environ, "TERM": "xterm", "NO_COLOR": "1", "XDG_STATE_HOME": str(tmp_path), "TORCHX_CONFIG": ""}
    job = ["-s", "local_cwd", "dist.ddp", "-j", "2x2", "--script", "train.py"]
    with TerminalProgram([TORCHX, "run", *job], env=env, cwd=tmp_path, has_keys=True) as program:
        for rank in RANKS:
            program.read_until(f"{rank}is up")
        program.type("\x03")
        text = program.read_until(None)
        program.wait()
    records = [path.read_text() for path in sorted(tmp_path.rglob("events.jsonl"))]
    assert [rank for rank in RANKS if f"{rank}KeyboardInterrupt" in text] == RANKS, "\n".join([text, *records[:1]])
    last = r"\[muster\] stopped .* \d+ MiB; logs: /"
    assert len(re.findall(last, text)) == 1, text
