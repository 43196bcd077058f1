"""A job that is stopped from a terminal or from another shell: what its workers get, and its last line."""

import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest
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
    last = r"\[muster\] stopped after \S+ s; no restarts; peak memory of a worker \d+ MiB; logs: /"
    assert len(re.findall(last, text)) == 1, text


SAVES_LONG_ON_NODE_1 = """
import os, pathlib, signal, sys, threading, time
folder = pathlib.Path({folder!r})
def save(signum, frame):
    time.sleep(6 if os.environ["GROUP_RANK"] == "1" else 0)
    (folder / ("saved-by-" + os.environ["RANK"])).touch()
    sys.exit(1)
signal.signal(signal.SIGTERM, save)
print("is up", flush=True)
threading.Event().wait()
"""


@pytest.mark.long  # the others wait until the lease of the leader is over
def test_workers_save_after_a_signal_has_ended_those_of_node_0_and_the_job_goes_on(tmp_path: Path) -> None:
    """Node 1 killed its workers once it had lost its leader. If all nodes are stopped, its signal may come later."""
    (tmp_path / "train.py").write_text(SAVES_LONG_ON_NODE_1.format(folder=str(tmp_path)))
    env = {**os.environ, "TERM": "xterm", "NO_COLOR": "1", "XDG_STATE_HOME": str(tmp_path), "TORCHX_CONFIG": ""}
    job = ["-s", "local_cwd", "dist.ddp", "-j", "2x2", "--script", "train.py"]
    with TerminalProgram([TORCHX, "run", *job], env=env, cwd=tmp_path, has_keys=True) as program:
        for rank in RANKS:
            program.read_until(f"{rank}is up")
        (path,) = tmp_path.rglob(".muster/state.json")
        state = json.loads(path.read_text())
        os.kill(next(each["handle"]["pid"] for each in state["replicas"] if each["index"] == 0), signal.SIGTERM)
        while any(program.text.count(f"{rank}is up") < 2 for rank in RANKS[2:]):
            program.read_more()
        assert sorted(each.name for each in tmp_path.glob("saved-by-*")) == [f"saved-by-{rank}" for rank in range(4)]
