"""Both nodes of a job are stopped: each has its whole grace period, also if node 0 has ended long before."""

import signal
import sys
import time
from pathlib import Path

import pytest
from harness import Tree, find_free_port, wait_until

PROGRAM = """
import os, pathlib, signal, sys, threading, time
folder, rank = pathlib.Path({folder!r}), os.environ["RANK"]
def save(signum, frame):
    if rank == "1":
        time.sleep({seconds})
    (folder / ("saved-by-" + rank)).touch()
    sys.exit(1)
signal.signal(signal.SIGTERM, save)
(folder / ("up-" + rank)).touch()
threading.Event().wait()
"""
LONG_S = 8.0
"""Longer than a node may live without a leader."""


@pytest.mark.parametrize("backend", ["muster", "static"])
def test_node_0_leads_until_the_workers_of_the_others_have_saved(backend: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(PROGRAM.format(folder=str(tmp_path), seconds=LONG_S))
    flags = ["--rdzv-backend", "muster", "--rdzv-endpoint", f"127.0.0.1:{find_free_port()}"]
    if backend == "static":
        flags = ["--master-addr", "127.0.0.1", "--master-port", str(find_free_port())]
    agent = [sys.executable, "-m", "muster.agent", "--nnodes", "2", *flags, "--start", "cold", "--rdzv-id", "saves"]

    def start(index: int) -> Tree:
        return Tree([*agent, "--node-rank", str(index), "--log-dir", str(tmp_path / f"logs-{index}"), str(script)])

    with start(0) as first, start(1) as second:
        wait_until(lambda: len(list(tmp_path.glob("up-*"))) == 2, timeout_s=60, what="workers that run")
        begun_s = time.monotonic()
        for node in (first, second):
            node.send(signal.SIGTERM, node.pid)
        outcomes = [node.wait(60) for node in (first, second)]
    shown = "\n".join(each.explain() for each in outcomes)
    assert sorted(each.name for each in tmp_path.glob("saved-by-*")) == ["saved-by-0", "saved-by-1"], shown
    assert [each.exit_code for each in outcomes] == [143, 143], shown
    assert time.monotonic() - begun_s < LONG_S + 10, shown
