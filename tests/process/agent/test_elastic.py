"""Agents of one job on this machine: one node alone, spares, and a node that finishes before another fails."""

import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from freezer import make_freezer
from harness import AGENT, PROGRAMS, Tree, check_all, read_events, reserve_port, wait_until
from launchers import ONE_START, SCALED
from subreaper import list_processes

Launch = Callable[..., Tree]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    """Starts the agent of a node: its index, --nnodes, the program and its arguments, more flags."""
    with ExitStack() as stack:
        endpoint = f"127.0.0.1:{stack.enter_context(reserve_port())}"

        def start(
            index: int,
            nnodes: str,
            *program: str,
            conf: str = "last_call_timeout=0.3",
            **flags: str,
        ) -> Tree:
            given = {
                "nnodes": nnodes,
                "node-rank": str(index),
                "rdzv-backend": "c10d",
                "rdzv-endpoint": endpoint,
                "rdzv-conf": conf,
                "rdzv-id": "elastic",
                "tee": "3",
                "start": ONE_START or "cold",
                "log-dir": str(tmp_path / f"logs{index}"),
                **flags,
            }
            words = [word for name, value in given.items() for word in (f"--{name}", value)]
            script = str(PROGRAMS / program[0])
            command = [*AGENT, *words, script, *program[1:]]
            return stack.enter_context(Tree(command, env={**os.environ, **SCALED, "PYTHONUNBUFFERED": "1"}))

        yield start


@pytest.fixture
def sums(tmp_path: Path) -> tuple[str, str, str]:
    """A program that sums ones over the world until `tmp_path / "stop"` exists."""
    return "netns_sums.py", "plain", str(tmp_path)


def wait_for_world(size: int, *trees: Tree) -> None:
    """Wait until these nodes' last sum is that of a world of `size`."""

    def is_there() -> bool:
        return all(re.findall(r"sum (\d+) of (\d+)", tree.stdout)[-1:] == [(str(size), str(size))] for tree in trees)

    wait_until(is_there, what=f"a world of {size}: {[(tree.stdout[-500:], tree.stderr[-500:]) for tree in trees]}")


SLOW = """
import os, pathlib, time
def count():
    return sum(each.read_text().count('"worker_released"') for each in pathlib.Path(LOGS1).rglob("events.jsonl"))
if os.environ["NODE"] == "0":
    while not IS_OVER:
        time.sleep(0.02)
"""


@pytest.mark.parametrize(("is_over", "first"), [("time.sleep(1.5) is None", 0), ("count() == 2", 1)])
def test_workers_wait_a_limited_time_for_global_rank_0(
    is_over: str, first: int, launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that connects before the store listens is refused, and torch's client then sleeps."""
    if ONE_START == "cold":
        pytest.skip("cold workers have nothing to prepare")
    text = SLOW.replace("LOGS1", repr(str(tmp_path / "logs1"))).replace("IS_OVER", is_over)
    (tmp_path / "slow.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    nodes = []
    for index in (0, 1):
        monkeypatch.setenv("NODE", str(index))
        nodes.append(
            launch(index, "2", "conf_exits.py", "0", "all", start="warm", preload="slow", **{"nproc-per-node": "2"})
        )
    check_all(nodes)
    released = sorted(
        (one["monotonic_s"], one["node"]) for one in read_events(tmp_path) if one["what"] == "worker_released"
    )
    assert [node for _, node in released] == [first, first, 1 - first, 1 - first]


def test_a_running_job_continues_while_a_new_node_imports(
    launch: Launch, sums: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if ONE_START == "cold":
        pytest.skip("cold workers have nothing to prepare")
    go = tmp_path / "go"
    (tmp_path / "slow.py").write_text(
        f"import os, time\nwhile os.environ['NODE'] == '1' and not os.path.exists({str(go)!r}):\n    time.sleep(0.01)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    nodes = []
    for index in (0, 1):
        monkeypatch.setenv("NODE", str(index))
        nodes.append(launch(index, "1:2", *sums, start="warm", preload="slow"))
        wait_for_world(1, nodes[0])
    nodes[0].wait_for_line("node 1 .* is waiting to join while it imports: the job continues", stream="stderr")
    sums_before = nodes[0].stdout.count("sum 1 of 1")
    wait_until(lambda: nodes[0].stdout.count("sum 1 of 1") > sums_before + 20, what="more sums")
    assert "joined" not in nodes[0].stderr
    go.touch()
    wait_for_world(2, *nodes)
    (tmp_path / "stop").touch()
    check_all(nodes)
    assert not (tmp_path / "overlaps").exists()


@pytest.mark.skipif(ONE_START == "cold", reason="cold workers have no template")
def test_one_template_serves_all_memberships(
    launch: Launch, sums: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")  # the program's own sums are at MASTER_PORT
    survivor = launch(0, "1:2", *sums, start="warm")
    wait_for_world(1, survivor)
    guest = launch(1, "1:2", *sums, start="warm")
    wait_for_world(2, survivor)
    guest.kill_agent()
    wait_for_world(1, survivor)
    (tmp_path / "stop").touch()
    check_all([survivor])
    events = read_events(tmp_path / "logs0")
    story = [event["what"] for event in events]
    assert (story.count("template_ready"), story.count("template_ended")) == (1, 0)
    ways = [event["detail"]["how"] for event in events if event["what"] == "worker_released"]
    assert set(ways) == {"warm"}
    assert len(ways) >= 3
    ready = events[story.index("template_ready")]["detail"]
    assert 0 < ready["pss_bytes"] <= ready["rss_bytes"]


def find_worker(folder: Path, rank: int) -> int:
    """The process of the newest worker of this rank, from the mark that it has made."""
    marks = [mark for mark in folder.glob("*.mark") if mark.name.split(".")[-3] == str(rank)]
    return int(max(marks, key=lambda mark: mark.stat().st_mtime_ns).name.split(".")[-2])


@pytest.mark.parametrize("stuck", [0, pytest.param(1, marks=pytest.mark.long)])
def test_the_others_go_on_beside_a_worker_that_cannot_be_killed(
    stuck: int, launch: Launch, sums: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Node 0 is the leader: without it another one takes over."""
    monkeypatch.setenv("TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT", "0.5")
    flags = {"max-restarts": "1", "shutdown-timeout": "0.2"}
    with make_freezer() as freezer:
        nodes = [launch(index, "1:3", *sums, **flags) for index in range(3)]
        wait_for_world(3, *nodes)
        left = nodes.pop(stuck)
        pid = find_worker(tmp_path, stuck)
        freezer.freeze(pid)
        nodes[-1].send(signal.SIGKILL, find_worker(tmp_path, 2))
        wait_for_world(2, *nodes)
        wait_until(lambda: list_processes().get(left.pid, (0, "Z", ""))[1] in "ZX", what="the end of the node")
        assert pid in list_processes()
        (tmp_path / "stop").touch()
        outcomes = check_all(nodes)
        freezer.thaw()
        outcome = left.wait()
    # It leaves the frozen process, and no other; that one has ended since: the freezer waits for it.
    assert (outcome.exit_code, {left[0] for left in outcome.leftovers} <= {pid}) == (69, True), outcome.explain()
    assert f"cannot end process {pid}" in outcome.stderr, outcome.explain()
    assert [f"sum 2 of 2 rank {rank} attempt 1" in each.stdout for rank, each in enumerate(outcomes)] == [True, True]
