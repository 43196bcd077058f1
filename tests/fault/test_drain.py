"""A node of a real job is preempted: every rank saves the same step, all agents exit 143, the next run continues.

The program has DataLoader workers, an uneven cadence and gradient accumulation; an evaluation is under way, and the
agent of another node stands still for a moment. MUSTER_DRAIN_RUNS sets how often (10 in `make soak`, 50 in
`make nightly`).
"""

import json
import os
import signal
import time
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from harness import AGENT, PROGRAMS, Outcome, Tree, check_all, start_nodes, wait_until

NODES, NPROC, ACCUMULATE = 3, 2, 4
RUNS = int(os.environ.get("MUSTER_DRAIN_RUNS", "1"))

pytestmark = [
    pytest.mark.soak,
    pytest.mark.slow,
    pytest.mark.torch,
]


def start_job(folder: Path, *flags: str, nodes: int = NODES) -> AbstractContextManager[list[Tree]]:
    patient = ["--rdzv-conf", "keep_alive_max_attempt=60", "--shutdown-timeout", "20"]  # no node is lost
    own = [*patient, "--nproc-per-node", str(NPROC), "--tee", "3", "--log-dir", folder / "logs{node}", *flags]
    return start_nodes(nodes, *own, PROGRAMS / "drain_trains.py", folder)


def preempt(trees: list[Tree], victim: int) -> None:
    """Once all train and an evaluation is under way, SIGTERM to one agent, and SIGSTOP for 50 ms to the next one."""
    for tree in trees:
        tree.wait_for_line("trains", count=NPROC)
    wait_until(lambda: any("rank 0 of 6 evaluates" in tree.stdout for tree in trees), what="an evaluation")
    stalled = trees[(victim + 1) % NODES].children()[0]
    trees[victim].send(signal.SIGTERM)
    os.kill(stalled, signal.SIGSTOP)
    time.sleep(0.05)
    os.kill(stalled, signal.SIGCONT)


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
        outcomes = check_all(trees, 143)
    [step] = {each["step"] for each in read_saved(tmp_path)}
    assert (step + 1) % ACCUMULATE == 0
    assert [each.stdout.count(f"stopped at step {step},") for each in outcomes] == [NPROC] * NODES, explain(outcomes)
    console = "".join(outcome.stderr for outcome in outcomes)
    assert f"stop at step {step}" in " ".join(console.split())
    assert f"stopped at step {step} " in console
    with start_job(tmp_path) as trees:
        outcomes = check_all(trees)
    begins = [outcome.stdout.count(f"of {NODES * NPROC} begins at step {step + 1}") for outcome in outcomes]
    assert begins == [NPROC] * NODES, explain(outcomes)
    assert [each["step"] for each in read_saved(tmp_path)] == [step, step + 10 * ACCUMULATE]


@pytest.mark.long
@pytest.mark.parametrize("victim", list_victims(0))
def test_the_others_of_an_elastic_job_go_on_at_the_next_step(tmp_path: Path, victim: int) -> None:
    with start_job(tmp_path, "--nnodes", "1:3") as trees:
        preempt(trees, victim)
        outcomes = [tree.wait() for tree in trees]
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
    with start_job(tmp_path, "--preempt-signal", "USR1", nodes=1) as [tree]:
        tree.wait_for_line("trains", count=NPROC)
        tree.send(signal.SIGUSR1)
        outcome = tree.wait().check(143)
    [step] = {each["step"] for each in read_saved(tmp_path)}
    console = " ".join(outcome.stderr.split())
    assert f"stop at step {step}, " in console, outcome.explain()
    assert f"stopped at step {step} " in console, outcome.explain()
    assert outcome.stdout.count(f"at step {step}, deadline") == NPROC


def test_the_workers_of_a_dataloader_live_as_long_as_their_rank(tmp_path: Path) -> None:
    """They get no polite signal: a rank that saves may still need a batch."""
    script = [str(PROGRAMS / "drain_ignores.py"), str(tmp_path)]
    flags = ["--standalone", "--shutdown-timeout", "60"]
    with Tree([*AGENT, *flags, *script], cwd=tmp_path) as tree:
        tree.wait_for_line("trains")
        tree.send(signal.SIGTERM)
        outcome = tree.wait().check(143)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["loads", "saved"], outcome.explain()
