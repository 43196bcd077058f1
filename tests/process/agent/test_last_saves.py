"""Node 0 of a job is stopped: all workers have their whole grace period, also if those of node 0 have ended before."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import Tree, check_all, start_nodes, wait_until
from launchers import SCALED

PROGRAM = """
import os, pathlib, signal, sys, threading, time
folder, rank = pathlib.Path({folder!r}), os.environ["RANK"]
def save(signum, frame):
    if rank == "1":
        time.sleep({seconds})
    (folder / ("saved-by-" + rank)).touch()
    sys.exit(1)
signal.signal(signal.SIGTERM, save)
signal.signal(signal.SIGINT, save)
(folder / ("up-" + rank)).touch()
threading.Event().wait()
"""
LONG_S = 3.0
"""Longer than a node may live without a leader, which is 2 s here."""


@contextlib.contextmanager
def start(tmp_path: Path, backend: str) -> Iterator[list[Tree]]:
    """Two nodes, whose workers run."""
    script = tmp_path / "train.py"
    script.write_text(PROGRAM.format(folder=str(tmp_path), seconds=LONG_S))
    flags = ["--rdzv-backend", backend, "--start", "cold", "--log-dir", tmp_path / "logs-{node}"]
    with start_nodes(2, *flags, script, envs=[{**os.environ, **SCALED}] * 2) as trees:
        wait_until(lambda: len(list(tmp_path.glob("up-*"))) == 2, what="workers that run")
        yield trees


@pytest.mark.parametrize(
    ("backend", "later_s"),
    [
        ("muster", 1.0),
        ("static", None),
        *(pytest.param(*each, marks=pytest.mark.long) for each in (("muster", 0.0), ("muster", None), ("static", 0.0))),
    ],
)
def test_node_0_leads_until_the_workers_of_the_others_have_saved(
    backend: str, later_s: float | None, tmp_path: Path
) -> None:
    """Node 1 gets its signal at once (0), this long after the save of node 0, or only after the end of node 0 (None).

    If node 0 had ended before the signal came, the workers of node 1 were killed at once, although they still saved.
    """
    with start(tmp_path, backend) as (first, second):
        first.send(signal.SIGTERM, first.pid)
        if later_s:
            wait_until((tmp_path / "saved-by-0").exists, what="the save of node 0")
            time.sleep(later_s)
        if later_s is not None:
            second.send(signal.SIGTERM, second.pid)
        first.wait()
        if later_s is None:
            second.send(signal.SIGTERM, second.pid)
        check_all([first, second], 143)
    assert sorted(each.name for each in tmp_path.glob("saved-by-*")) == ["saved-by-0", "saved-by-1"]


def test_a_second_ctrl_c_ends_node_0_although_others_still_save(tmp_path: Path) -> None:
    with start(tmp_path, "muster") as (first, second):
        for name in ("saved-by-0", ""):
            first.send(signal.SIGINT, first.pid)
            wait_until((tmp_path / name).exists, what="the save of node 0")
        first.wait().check(130)
        assert not (tmp_path / "saved-by-1").exists()
        second.send(signal.SIGTERM, second.pid)
        second.wait().check(143)
