"""What two agents record of a job with a crash is told afterwards as it was: one clock, phases, where time went."""

import sys
from pathlib import Path

import pytest
from harness import Tree, find_free_port

from muster.cli import commands
from muster.cli.afterwards import sources
from muster.cli.afterwards.clocks import place
from muster.cli.afterwards.story import PHASES, tell

PROGRAMS = Path(__file__).parents[2] / "programs"


def test_a_crash_of_two_nodes_is_told_as_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    work, logs = tmp_path / "work", tmp_path / "logs"
    work.mkdir()
    program = [str(PROGRAMS / "afterwards_steps.py"), str(work), "60", "0.05", "crash=30:3"]
    flags = ["--nnodes", "2", "--nproc-per-node", "2", "--max-restarts", "2", "--rdzv-id", "told"]
    where = ["--rdzv-endpoint", f"127.0.0.1:{find_free_port()}"]
    nodes = [
        [sys.executable, "-m", "muster.agent", *flags, *where, "--node-rank", str(index), "--log-dir", str(logs)]
        for index in range(2)
    ]
    with Tree([*nodes[0], *program]) as first, Tree([*nodes[1], *program]) as second:
        outcomes = [first.wait(), second.wait()]
    assert [outcome.exit_code for outcome in outcomes] == [0, 0], outcomes[0].explain()
    placed = place(sources.load(str(logs)).events)
    # both agents run on this machine, whose clock is one: what the heartbeats say must be within what they promise
    compared = [each for each in placed if each.event.what == "clock_compared"]
    assert {each.event.node_index for each in compared} == {0, 1}
    for each in compared:
        assert abs(each.event.detail["ahead_s"]) <= each.event.detail["uncertainty_s"] + 0.001
    assert {each.incarnation for each in placed} == {0}
    story = tell("told", placed)
    total_s = story.end_s - story.start_s
    assert sum(story.buckets.values()) == pytest.approx(total_s, abs=0.5)
    assert story.failures == {"worker": 1}
    assert story.buckets["productive"] == pytest.approx(60 * 0.05, abs=max(1.5, 0.1 * total_s))
    assert story.succeeded
    (recovery,) = story.recoveries
    assert "bad batch" in recovery.cause
    assert len(story.nodes) == 2
    for node in story.nodes:
        assert {"training", "stop", "first step"} <= {PHASES[bar.phase] for bar in node.bars}
        assert all(one.end_s <= other.start_s + 1e-6 for one, other in zip(node.bars, node.bars[1:], strict=False))
    assert commands.main(["timeline", str(logs), "-o", str(tmp_path / "page.html")]) == 0
    assert "interrupted by a failed worker" in capsys.readouterr().out
    assert "\\u003c/script\\u003e\\u003cb\\u003e17" in (tmp_path / "page.html").read_text()
