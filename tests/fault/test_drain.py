"""A node of a real job is preempted: every rank saves the same step, all agents exit 143, the next run continues."""

import contextlib
import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fault_scenes import TreeScene, cause
from harness import LIMIT_S, Outcome, Tree, find_free_port

from muster.cli.rehearse.faults.nodes import PREEMPTED

PROGRAMS = Path(__file__).parent.parent / "programs"
PROGRAM, ELASTIC = str(PROGRAMS / "drain_trains.py"), str(PROGRAMS / "drain_elastic.py")
NODES, NPROC, ACCUMULATE = 3, 2, 4
LONG = 40_000

pytestmark = [
    pytest.mark.soak,
    pytest.mark.slow,
    pytest.mark.torch,
    pytest.mark.skipif(sys.platform != "linux", reason="the status page is for Linux"),
]


@contextlib.contextmanager
def start_job(
    folder: Path,
    *words: object,
    program: str = PROGRAM,
    nodes: int = NODES,
    nnodes: str = "",
    flags: tuple[str, ...] = (),
) -> Iterator[list[Tree]]:
    number = ["--nnodes", nnodes or str(nodes)]
    place = ["--standalone"] if nodes == 1 else [*number, "--rdzv-endpoint", f"127.0.0.1:{find_free_port()}"]
    agent = [sys.executable, "-m", "muster.agent", *place, "--nproc-per-node", str(NPROC), "--shutdown-timeout", "20"]
    with contextlib.ExitStack() as stack:
        trees = []
        for index in range(nodes):
            rank = [] if nodes == 1 else ["--node-rank", str(index), "--rdzv-id", "drain"]
            command = [*agent, *rank, *flags, "--tee", "3", "--log-dir", str(folder / f"logs{index}")]
            trees.append(stack.enter_context(Tree([*command, program, str(folder), *map(str, words)])))
        yield trees


def wait_for_all(trees: list[Tree]) -> list[Outcome]:
    return [tree.wait(LIMIT_S) for tree in trees]


def explain(outcomes: list[Outcome]) -> str:
    return "\n".join(outcome.explain() for outcome in outcomes)


def read_checkpoints(folder: Path, nodes: int = NODES) -> list[dict[str, int]]:
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(nodes * NPROC)]


def compute_weight(last: int, nodes: int = NODES) -> int:
    """What an undisturbed job has after a step: the sum of all batches of all ranks."""
    return sum(range(last + 1)) * sum(range(1, nodes * NPROC + 1))


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.long)])
def test_all_ranks_save_the_same_step_and_the_next_run_continues(tmp_path: Path, victim: int) -> None:
    with start_job(tmp_path, LONG) as trees:
        for tree in trees:
            tree.wait_for_line("trains", count=NPROC)
        cause(PREEMPTED, TreeScene(*trees, node=victim))
        outcomes = wait_for_all(trees)
    assert [(each.exit_code, each.leftovers) for each in outcomes] == [(143, ())] * NODES, explain(outcomes)
    saved = read_checkpoints(tmp_path)
    [step] = {each["step"] for each in saved}
    assert (step + 1) % ACCUMULATE == 0
    assert {each["weight"] for each in saved} == {compute_weight(step)}
    console = "".join(outcome.stderr for outcome in outcomes)
    assert f"received SIGTERM: all ranks stop at step {step}, agreed in " in " ".join(console.split())
    assert f"all ranks have stopped at step {step} and ended" in console
    total = step + 1 + 10 * ACCUMULATE
    with start_job(tmp_path, total) as trees:
        outcomes = wait_for_all(trees)
    assert [each.exit_code for each in outcomes] == [0] * NODES, explain(outcomes)
    for outcome in outcomes:
        assert outcome.stdout.count(f"resumes at step {step + 1}") == NPROC, explain(outcomes)
    assert {each["weight"] for each in read_checkpoints(tmp_path)} == {compute_weight(total - 1)}


@pytest.mark.long
@pytest.mark.parametrize("victim", [0])  # another node's is in test_drain_netns
def test_the_others_of_an_elastic_job_go_on_at_the_next_step(tmp_path: Path, victim: int) -> None:
    with start_job(tmp_path, program=ELASTIC, nnodes="1:3", flags=("--rdzv-backend", "c10d")) as trees:
        for tree in trees:
            tree.wait_for_line("trains", count=NPROC)
        cause(PREEMPTED, TreeScene(*trees, node=victim))
        outcomes = wait_for_all(trees)
    expected = [143 if index == victim else 0 for index in range(NODES)]
    assert [each.exit_code for each in outcomes] == expected, explain(outcomes)
    assert [each.leftovers for each in outcomes] == [()] * NODES, explain(outcomes)
    first, last = sorted(
        (json.loads(path.read_text()) for path in tmp_path.glob("step*.json")), key=lambda saved: saved["step"]
    )
    assert (first["world"], last["world"]) == (NODES * NPROC, (NODES - 1) * NPROC)
    assert last["weight"] == sum(range(last["step"] + 1)), "a step was lost, or done twice"
    assert last["step"] == first["step"] + 10 * ACCUMULATE
    for index, outcome in enumerate(outcomes):
        assert outcome.stdout.count(f"stopped at step {first['step']}") == NPROC, explain(outcomes)
        resumed = f"of {(NODES - 1) * NPROC} begins at step {first['step'] + 1}"
        assert outcome.stdout.count(resumed) == (0 if index == victim else NPROC), explain(outcomes)
    console = " ".join("".join(outcome.stderr for outcome in outcomes).split())
    assert f"leaves after step {first['step']}: the job continues" in console, explain(outcomes)
    assert "restart 1" not in console, explain(outcomes)


def test_a_job_of_one_node_saves_at_one_step_too(tmp_path: Path) -> None:
    with start_job(tmp_path, LONG, nodes=1, flags=("--preempt-signal", "USR1")) as [tree]:
        tree.wait_for_line("trains", count=NPROC)
        tree.send(signal.SIGUSR1)
        outcome = tree.wait(LIMIT_S)
    assert (outcome.exit_code, outcome.leftovers) == (143, ()), outcome.explain()
    [step] = {each["step"] for each in read_checkpoints(tmp_path, 1)}
    console = " ".join(outcome.stderr.split())
    assert f"all ranks stop at step {step}, agreed in" in console, outcome.explain()
    assert f"all ranks have stopped at step {step} and ended, " in console, outcome.explain()
    assert outcome.stdout.count(f"stopped at step {step}, deadline") == NPROC


def test_a_program_that_never_asks_gets_the_stop_signal_at_once(tmp_path: Path) -> None:
    with start_job(tmp_path, LONG, "quiet", nodes=1) as [tree]:
        tree.wait_for_line("trains", count=NPROC)
        tree.send(signal.SIGTERM)
        outcome = tree.wait(LIMIT_S)
    assert (outcome.exit_code, outcome.leftovers) == (143, ()), outcome.explain()
    assert "received SIGTERM: stopping, up to 20 s" in " ".join(outcome.stderr.split()), outcome.explain()
    assert not list(tmp_path.glob("rank*.json"))


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
