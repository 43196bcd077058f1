"""A node of a real job is preempted: every rank saves the same step, all agents exit 143, the next run continues.

The program has DataLoader workers, an uneven cadence and gradient accumulation; an evaluation is under way, and the
agent of another node stands still for a moment. MUSTER_DRAIN_RUNS sets how often (10 in `make soak`, 50 in
`make nightly`).
"""

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fault_scenes import TreeScene, cause
from harness import LIMIT_S, Outcome, Tree, find_free_port, wait_until

from muster.cli.rehearse.faults import FAULTS

PROGRAMS = Path(__file__).parent.parent / "programs"
NODES, NPROC, ACCUMULATE = 3, 2, 4
RUNS = int(os.environ.get("MUSTER_DRAIN_RUNS", "1"))

pytestmark = [
    pytest.mark.soak,
    pytest.mark.slow,
    pytest.mark.torch,
]


@contextlib.contextmanager
def start_job(
    folder: Path, *words: str, nodes: int = NODES, nnodes: str = str(NODES), flags: tuple[str, ...] = ()
) -> Iterator[list[Tree]]:
    endpoint, patient = f"127.0.0.1:{find_free_port()}", "keep_alive_max_attempt=60"  # no node is lost
    place = ["--nnodes", nnodes, "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-conf", patient]
    place = ["--standalone"] if nodes == 1 else [*place, "--rdzv-id", "drain"]
    agent = [sys.executable, "-m", "muster.agent", *place, "--nproc-per-node", str(NPROC), "--shutdown-timeout", "20"]
    with contextlib.ExitStack() as stack:
        trees = []
        for index in range(nodes):
            rank = [] if nodes == 1 else ["--node-rank", str(index)]
            command = [*agent, *rank, *flags, "--tee", "3", "--log-dir", str(folder / f"logs{index}")]
            trees.append(stack.enter_context(Tree([*command, str(PROGRAMS / "drain_trains.py"), str(folder), *words])))
        yield trees


def preempt(trees: list[Tree], victim: int) -> None:
    """Once all train and an evaluation is under way, SIGTERM to one agent, and SIGSTOP for 50 ms to the next one."""
    for tree in trees:
        tree.wait_for_line("trains", count=NPROC)
    wait_until(lambda: any("rank 0 of 6 evaluates" in tree.stdout for tree in trees), what="an evaluation")
    scene = TreeScene(*trees, node=victim)
    stalled = scene.find_agent((victim + 1) % NODES)
    cause(FAULTS["preempted"], scene)
    os.kill(stalled, signal.SIGSTOP)
    time.sleep(0.05)
    os.kill(stalled, signal.SIGCONT)


def wait_for_all(trees: list[Tree]) -> list[Outcome]:
    return [tree.wait(LIMIT_S) for tree in trees]


def explain(outcomes: list[Outcome]) -> str:
    return "\n".join(outcome.explain() for outcome in outcomes)


def read_saved(folder: Path) -> list[dict[str, int]]:
    """What was saved, in the order of steps. The result of an undisturbed job can be computed: each must have it."""
    found = [json.loads(path.read_text()) for path in folder.glob("step*.json")]
    assert all(each["weight"] == sum(range(each["step"] + 1)) for each in found), "a step was lost, or done twice"
    return sorted(found, key=lambda saved: saved["step"])


def list_victims(first: int) -> list[object]:
    """One in each run of `make test`; MUSTER_DRAIN_RUNS says how many more in the soak."""
    return [first, *(pytest.param(run % NODES, marks=pytest.mark.long) for run in range(first + 1, first + 1 + RUNS))]


@pytest.mark.parametrize("victim", list_victims(0))
def test_all_ranks_save_the_same_step_and_the_next_run_continues(tmp_path: Path, victim: int) -> None:
    with start_job(tmp_path) as trees:
        preempt(trees, victim)
        outcomes = wait_for_all(trees)
    assert [(each.exit_code, each.leftovers) for each in outcomes] == [(143, ())] * NODES, explain(outcomes)
    [step] = {each["step"] for each in read_saved(tmp_path)}
    assert (step + 1) % ACCUMULATE == 0
    assert [each.stdout.count(f"stopped at step {step},") for each in outcomes] == [NPROC] * NODES, explain(outcomes)
    console = "".join(outcome.stderr for outcome in outcomes)
    assert f"all ranks stop at step {step}" in " ".join(console.split())
    assert f"stopped at step {step} " in console
    with start_job(tmp_path) as trees:
        outcomes = wait_for_all(trees)
    assert [each.exit_code for each in outcomes] == [0] * NODES, explain(outcomes)
    begins = [outcome.stdout.count(f"of {NODES * NPROC} begins at step {step + 1}") for outcome in outcomes]
    assert begins == [NPROC] * NODES, explain(outcomes)
    assert [each["step"] for each in read_saved(tmp_path)] == [step, step + 10 * ACCUMULATE]


@pytest.mark.long
@pytest.mark.parametrize("victim", list_victims(0))
def test_the_others_of_an_elastic_job_go_on_at_the_next_step(tmp_path: Path, victim: int) -> None:
    with start_job(tmp_path, nnodes="1:3") as trees:
        preempt(trees, victim)
        outcomes = wait_for_all(trees)
    expected = [(143 if index == victim else 0, ()) for index in range(NODES)]
    assert [(each.exit_code, each.leftovers) for each in outcomes] == expected, explain(outcomes)
    first, last = read_saved(tmp_path)
    assert (first["world"], last["world"]) == (NODES * NPROC, (NODES - 1) * NPROC)
    assert last["step"] == first["step"] + 10 * ACCUMULATE
    for index, outcome in enumerate(outcomes):
        assert outcome.stdout.count(f"stopped at step {first['step']},") == NPROC, explain(outcomes)
        resumed = f"of {(NODES - 1) * NPROC} begins at step {first['step'] + 1}"
        assert outcome.stdout.count(resumed) == (0 if index == victim else NPROC), explain(outcomes)
    console = " ".join("".join(outcome.stderr for outcome in outcomes).split())
    assert f"after step {first['step']}: " in console, explain(outcomes)
    assert "restart 1" not in console, explain(outcomes)


def test_a_job_of_one_node_saves_at_one_step_too(tmp_path: Path) -> None:
    with start_job(tmp_path, nodes=1, flags=("--preempt-signal", "USR1")) as [tree]:
        tree.wait_for_line("trains", count=NPROC)
        tree.send(signal.SIGUSR1)
        outcome = tree.wait(LIMIT_S)
    assert (outcome.exit_code, outcome.leftovers) == (143, ()), outcome.explain()
    [step] = {each["step"] for each in read_saved(tmp_path)}
    console = " ".join(outcome.stderr.split())
    assert f"stop at step {step}, " in console, outcome.explain()
    assert f"stopped at step {step} " in console, outcome.explain()
    assert outcome.stdout.count(f"at step {step}, deadline") == NPROC


def test_a_program_that_never_asks_gets_the_stop_signal_at_once(tmp_path: Path) -> None:
    with start_job(tmp_path, "quiet", nodes=1) as [tree]:
        tree.wait_for_line("trains", count=NPROC)
        tree.send(signal.SIGTERM)
        outcome = tree.wait(LIMIT_S)
    assert (outcome.exit_code, outcome.leftovers) == (143, ()), outcome.explain()
    assert "received SIGTERM: stopping" in " ".join(outcome.stderr.split()), outcome.explain()
    assert read_saved(tmp_path) == []


def test_the_workers_of_a_dataloader_live_as_long_as_their_rank(tmp_path: Path) -> None:
    """They get no polite signal: a rank that saves may still need a batch."""
    script = [str(PROGRAMS / "drain_ignores.py"), str(tmp_path)]
    flags = ["--standalone", "--shutdown-timeout", "60"]
    with Tree([sys.executable, "-m", "muster.agent", *flags, *script], cwd=tmp_path) as tree:
        tree.wait_for_line("trains")
        tree.send(signal.SIGTERM)
        outcome = tree.wait(LIMIT_S)
    assert (outcome.exit_code, outcome.leftovers) == (143, ()), outcome.explain()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["loads", "saved"], outcome.explain()
