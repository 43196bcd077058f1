"""Jobs that continue from memory, by what agents and workers have agreed on: `_shared.snapshot_file`."""

import os
import re
import signal
from pathlib import Path

import pytest
from harness import AGENT, PROGRAMS, Outcome, Tree, check_all, run_tree, start_nodes, wait_until

MOST_LOST = 12
"""Steps: at most 2 on a quiet machine. A save that is cut off while the agent waits for a core costs some more."""
CHAIN = PROGRAMS / "snapshots" / "chain.py"


def build_agent(*flags: str) -> list[str]:
    return [*AGENT, "--standalone", "--max-restarts", "9", *flags]


def run_chain(
    folder: Path, *kills: str, steps: int = 60, flags: tuple[str, ...] = (), more: tuple[str, ...] = ()
) -> Outcome:
    for name in kills:
        (folder / name).touch()
    command = [*build_agent("--nproc-per-node", "2", *flags), str(CHAIN), str(folder), str(steps), *more]
    return run_tree(command, cwd=folder)


def list_bases(outcome: Outcome) -> list[int]:
    return [int(step) for step in re.findall(r"all ranks continue at step (\d+) from memory", outcome.stderr)]


def test_a_job_loses_no_step_that_all_ranks_have_saved(tmp_path: Path) -> None:
    """Rank 1 is killed after it has saved 20, rank 0 while it saves 33, and a rank while the others may save."""
    outcome = run_chain(tmp_path, "kill-1-20", "kill-0-33-saving", "kill-1-47").check()
    assert sorted(outcome.stdout.split("\n")[-3:-1]) == ["rank 0 done 60 right", "rank 1 done 60 right"]
    first, second, third = list_bases(outcome)
    assert 20 - MOST_LOST <= first <= 20, outcome.explain()
    assert 32 - MOST_LOST <= second <= 32, outcome.explain()
    assert 47 - MOST_LOST <= third <= 47, outcome.explain()


def list_shared_memory() -> set[str]:
    """Without the semaphores of multiprocessing: tests beside this one have loaders."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.mp-")}


def test_no_file_and_no_process_is_left_after_a_kill_of_the_agent(tmp_path: Path) -> None:
    command = [*build_agent("--nproc-per-node", "1"), str(CHAIN), str(tmp_path), "100000"]
    before = list_shared_memory()
    with Tree(command, cwd=tmp_path) as tree:
        (line,) = tree.wait_for_line("^worker ")
        tree.send(signal.SIGKILL, int(line.split()[-1]))
        outcome = tree.wait()
    assert outcome.leftovers == (), outcome.explain()
    assert list_shared_memory() <= before


# -- several nodes -----------------------------------------------------------------------------------------------------


def run_and_lose(folder: Path, count: int, lost: int, step: int, *words: str | Path) -> list[Outcome]:
    """Kill all processes of a node at once when rank 0 has done a step, in any round, and start its agent again."""
    pause = folder / f"pause-{step + 10}"  # the job does not end before
    pause.touch()

    def is_done() -> bool:
        done = [int.from_bytes(file.read_bytes()[:8], "little") for file in folder.glob("steps-*")]
        return max(done, default=0) >= step

    with start_nodes(count, "--max-restarts", "9", *words, cwd=folder) as trees:
        wait_until(is_done, what=f"step {step}")
        trees[lost].kill_all()
        with trees[lost].start_again() as trees[lost]:
            pause.unlink()
            return check_all(trees)


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_node_that_takes_over_gets_its_ranks_states_from_a_neighbour(lost: int, tmp_path: Path) -> None:
    """Node 0 leads: with it the leader is lost."""
    outcomes = run_and_lose(tmp_path, 3, lost, 110, CHAIN, tmp_path, "150", "0.02", "700000")
    explained = "\n".join(outcome.explain() for outcome in outcomes)
    for rank, outcome in enumerate(outcomes):
        assert f"rank {rank} done 150 right" in outcome.stdout, explained
    assert f"rank {lost} continues at" in outcomes[lost].stdout, explained
    assert "of the snapshot" in outcomes[lost].stderr, explained


def test_without_copies_a_job_that_loses_a_node_begins_anew(tmp_path: Path) -> None:
    for outcome in run_and_lose(tmp_path, 2, 1, 40, "--snapshot-copies", "0", CHAIN, tmp_path, "60", "0.02"):
        assert "done 60 right" in outcome.stdout, outcome.explain()
        assert "continues at step" not in outcome.stdout, outcome.explain()
