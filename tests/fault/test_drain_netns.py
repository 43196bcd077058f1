"""Three nodes in network namespaces, one is preempted while an agent stands still: every rank saves the same step.

The program has DataLoader workers, an uneven cadence and gradient accumulation, and an evaluation is under way. The
result of an undisturbed job can be computed: the resumed one must have it. MUSTER_DRAIN_RUNS sets how often (10 in
`make soak`, 50 in `make nightly`).
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from netns_world import Node, World

PROGRAMS = Path(__file__).parent.parent / "programs"
NODES, ACCUMULATE, LONG, LIMIT_S = 3, 4, 40_000, 150.0
RUNS = int(os.environ.get("MUSTER_DRAIN_RUNS", "1"))

pytestmark = [
    pytest.mark.netns,
    pytest.mark.torch,
    pytest.mark.slow,
    pytest.mark.long,  # test_drain has the same without namespaces; `make soak` runs these ten times
    pytest.mark.skipif(sys.platform != "linux", reason="the status page is for Linux"),
]


def start(world: World, nnodes: str, run_id: str, *program: object) -> list[Node]:
    words, patient = tuple(map(str, program)), "keep_alive_max_attempt=60"  # no node is lost
    return [world.launch(index, nnodes, program=words, conf=patient, **{"rdzv-id": run_id}) for index in range(NODES)]


def preempt(world: World, nodes: list[Node], victim: int) -> None:
    """Once all train and an evaluation is under way, SIGTERM to one agent, and SIGSTOP for 50 ms to the next one."""
    world.wait_for(lambda: all("trains" in node.tree.stdout for node in nodes), "all ranks train")
    world.wait_for(lambda: "rank 0 evaluates" in nodes[0].tree.stdout, "rank 0 evaluates")
    stalled = nodes[(victim + 1) % NODES]
    agent = stalled.find_agent()
    nodes[victim].tree.send(signal.SIGTERM)
    os.kill(agent, signal.SIGSTOP)
    time.sleep(0.05)
    os.kill(agent, signal.SIGCONT)


def wait_for_codes(nodes: list[Node], codes: list[int]) -> str:
    """The consoles, once all have ended with these codes."""
    outcomes = [node.tree.wait(LIMIT_S) for node in nodes]
    text = "\n".join(outcome.explain() for outcome in outcomes)
    assert [outcome.exit_code for outcome in outcomes] == codes, text
    assert [outcome.leftovers for outcome in outcomes] == [()] * len(nodes), text
    return text


@pytest.mark.parametrize("run", range(RUNS))
def test_every_rank_saves_the_same_step_and_the_job_resumes(tmp_path: Path, run: int) -> None:
    program = PROGRAMS / "drain_trains.py"
    with World(tmp_path) as world:
        nodes = start(world, str(NODES), "first", program, tmp_path, LONG)
        preempt(world, nodes, run % NODES)
        text = wait_for_codes(nodes, [143] * NODES)
        saved = read_ranks(tmp_path)
        [step] = {each["step"] for each in saved}
        assert {each["weight"] for each in saved} == {compute_weight(step)}, text
        assert f"all ranks have stopped at step {step} and ended, " in text, text
        total = step + 1 + 10 * ACCUMULATE
        nodes = start(world, str(NODES), "second", program, tmp_path, total)
        text = wait_for_codes(nodes, [0] * NODES)
        assert text.count(f"resumes at step {step + 1}") == NODES, text
        assert {each["weight"] for each in read_ranks(tmp_path)} == {compute_weight(total - 1)}, text


def read_ranks(folder: Path) -> list[dict[str, int]]:
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(NODES)]


def compute_weight(last: int) -> int:
    """What an undisturbed job has after a step: the sum of all batches of all ranks."""
    return sum(range(last + 1)) * sum(range(1, NODES + 1))


@pytest.mark.parametrize("run", range((RUNS + 1) // 2))
def test_the_others_of_an_elastic_job_go_on(tmp_path: Path, run: int) -> None:
    victim = (run + 1) % NODES
    with World(tmp_path) as world:
        nodes = start(world, f"1:{NODES}", "elastic", PROGRAMS / "drain_elastic.py", tmp_path)
        preempt(world, nodes, victim)
        text = wait_for_codes(nodes, [143 if index == victim else 0 for index in range(NODES)])
    first, last = sorted(
        (json.loads(path.read_text()) for path in tmp_path.glob("step*.json")), key=lambda saved: saved["step"]
    )
    assert (first["world"], last["world"]) == (NODES, NODES - 1), text
    assert last["step"] == first["step"] + 10 * ACCUMULATE, text
    assert last["weight"] == sum(range(last["step"] + 1)), "a step was lost, or done twice"
    assert text.count(f"of {NODES - 1} begins at step {first['step'] + 1}") == NODES - 1, text
