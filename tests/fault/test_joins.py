"""Nodes join a running job at random moments: the ranks stop at one step and save, and no step is done twice.

MUSTER_JOIN_RUNS sets how often (50 in `make nightly`).
"""

import contextlib
import itertools
import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest
from harness import LIMIT_S, Tree, find_free_port, wait_until
from netns_world import Node, World

PROGRAM = Path(__file__).parent.parent / "programs" / "join_steps.py"
LOSSES = PROGRAM.with_name("join_losses.py")
RUNS = int(os.environ.get("MUSTER_JOIN_RUNS", "2"))

pytestmark = [pytest.mark.soak, pytest.mark.skipif(sys.platform != "linux", reason="the status page is for Linux")]


@contextlib.contextmanager
def start_job(folder: Path, words: tuple[str, ...] = (), program: Path = PROGRAM):
    """Return what starts a node of a job of one or two nodes."""
    endpoint = f"127.0.0.1:{find_free_port()}"
    place = ["--nnodes", "1:2", "--nproc-per-node", "2", "--start", "cold", "--rdzv-backend", "c10d"]
    conf = ["--rdzv-endpoint", endpoint, "--rdzv-id", "joins", "--rdzv-conf", "last_call_timeout=0"]
    script = [str(program), str(folder), "4", *words]
    with contextlib.ExitStack() as stack:

        def start(index: int) -> Tree:
            flags = ["--node-rank", str(index), "--tee", "3", "--log-dir", str(folder / f"logs{index}")]
            return stack.enter_context(Tree([sys.executable, "-m", "muster.agent", *place, *conf, *flags, *script]))

        yield start


def read_steps(folder: Path) -> list[tuple[int, int]]:
    """The steps that rank 0 has done, each with the number of ranks."""
    with contextlib.suppress(FileNotFoundError):
        return [tuple(map(int, line.split())) for line in (folder / "steps").read_text().splitlines()]
    return []


@pytest.mark.parametrize("how", ["", "snapshots", "handled"])
@pytest.mark.parametrize("run", range(RUNS))
def test_a_join_costs_no_step(tmp_path: Path, run: int, how: str) -> None:
    draw = random.Random(f"{run} {how}")
    with start_job(tmp_path, (how,) if how else ()) as start:
        first = start(0)
        count = draw.randint(2, 60)  # both ranks have asked
        wait_until(lambda: len(read_steps(tmp_path)) > count, what="steps")
        time.sleep(draw.random() / 10)
        second = start(1)
        outcomes = [first.wait(LIMIT_S), second.wait(LIMIT_S)]
    explained = "\n".join(each.explain() for each in outcomes)
    assert [(each.exit_code, each.leftovers) for each in outcomes] == [(0, ())] * 2, explained
    steps = read_steps(tmp_path)
    assert [step for step, _ in steps] == [*range(len(steps))], explained
    assert sorted({size for _, size in steps}) == [2, 4]
    begun = next(step for step, size in steps if size == 4)
    assert f"joins after step {begun - 1}: the job continues" in " ".join(first.stderr.split()), explained


def test_if_no_rank_asks_they_are_stopped_at_once_and_a_line_says_so(tmp_path: Path) -> None:
    with start_job(tmp_path, ("quiet",)) as start:
        first = start(0)
        wait_until(lambda: len(read_steps(tmp_path)) > 20, what="steps")
        second = start(1)
        outcomes = [first.wait(LIMIT_S), second.wait(LIMIT_S)]
    assert [each.exit_code for each in outcomes] == [0, 0], "\n".join(each.explain() for each in outcomes)
    assert "joins, but rank " in " ".join(first.stderr.split()), outcomes[0].explain()


@pytest.mark.torch
@pytest.mark.slow
def test_the_losses_of_4_ranks_then_2_then_4_are_those_of_4(tmp_path: Path) -> None:
    """Of a linear model in float64, to the bit: the node is preempted, and joins again."""
    losses = tmp_path / "losses"

    def count(size: int) -> int:
        return sum(f" {size} " in line for line in losses.read_text().splitlines()) if losses.exists() else 0

    with start_job(tmp_path, program=LOSSES) as start:
        first, second = start(0), start(1)
        wait_until(lambda: count(4) > 20, what="steps of 4 ranks")
        second.send(signal.SIGTERM)
        wait_until(lambda: count(2) > 20, what="steps of 2 ranks")
        third = start(1)
        outcomes = [each.wait(LIMIT_S) for each in (first, second, third)]
    explained = "\n".join(each.explain() for each in outcomes)
    assert [each.exit_code for each in outcomes] == [0, 143, 0], explained
    found = [line.split() for line in losses.read_text().splitlines()]
    assert [size for size, _ in itertools.groupby(found, lambda line: line[1])] == ["4", "2", "4"], explained
    assert [(int(step), loss) for step, _, loss in found] == [*enumerate(train_alone(len(found)))], explained


def train_alone(steps: int) -> list[str]:
    """The losses of one process that takes the whole batch of each step."""
    import torch

    from muster.data import Sampler

    whole = torch.randint(-8, 8, (64, 4), generator=torch.Generator().manual_seed(0)).double()
    inputs, targets, weights = whole[:, :3], whole[:, 3], torch.zeros(3, dtype=torch.float64)
    sampler, losses = Sampler(64, batch=8, rank=0, world_size=1), []
    parts = (part for _ in sampler.epochs(steps) for part in sampler.read(sampler))
    for part in itertools.islice(parts, steps):
        rows = inputs[part.data]
        gradient = 2 * rows.T @ (rows @ weights - targets[part.data]) / 8
        weights = weights - (gradient / 128).mul(2**20).round().div(2**20)
        losses.append((inputs @ weights - targets).square().mean().item().hex())
        sampler.commit()
    return losses


# -- in namespaces ---------------------------------------------------------------------------------------------------


@pytest.fixture
def planned(tmp_path: Path):
    """A job of two nodes that saves for a third one as long as a file exists."""
    with World(tmp_path) as world:
        nodes = [launch(world, index) for index in range(2)]
        world.wait_for(lambda: 2 in {size for _, size in read_steps(tmp_path)}, "two nodes train")
        (tmp_path / "saving").touch()
        text = "joins: all ranks stop at step"
        before = read_console(nodes[0]).count(text)  # the second one may have joined, too
        nodes.append(launch(world, 2))
        world.wait_for(lambda: read_console(nodes[0]).count(text) > before, "a planned join")
        yield world, nodes


def launch(world: World, index: int) -> Node:
    """Three nodes end the job."""
    return world.launch(index, "1:4", sums="plain", program=(str(PROGRAM), str(world.folder), "3", "slow"))


def read_console(node: Node) -> str:
    return " ".join(node.tree.stderr.split())


def finish(world: World, *nodes: Node) -> None:
    (world.folder / "saving").unlink()
    world.finish(*nodes)
    sizes = [size for _, size in read_steps(world.folder)]
    assert sizes[-1] == 3, "\n".join(node.explain() for node in world.nodes)


@pytest.mark.netns
@pytest.mark.timeout(240)
class TestWhileAJoinIsPlanned:
    def test_the_leader_is_lost(self, planned: tuple[World, list[Node]]) -> None:
        world, (leader, second, third) = planned
        leader.kill_agent()
        finish(world, launch(world, 0), second, third)

    def test_the_new_node_is_lost(self, planned: tuple[World, list[Node]]) -> None:
        world, (first, second, third) = planned
        third.kill_agent()
        fourth = launch(world, 3)
        finish(world, first, second, fourth)

    def test_another_node_joins_and_one_is_lost(self, planned: tuple[World, list[Node]]) -> None:
        world, (first, second, third) = planned
        fourth = launch(world, 3)
        second.kill_agent()
        finish(world, first, third, fourth)
