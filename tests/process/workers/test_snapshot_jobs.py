"""Jobs that continue from memory, by what agents and workers have agreed on: `_shared.snapshot_file`."""

import os
import re
import signal
import sys
from pathlib import Path

import pytest
from harness import Outcome, Tree, find_free_port, run_tree, wait_until

MOST_LOST = 12
"""Steps: at most 2 on a quiet machine. A save that is cut off while the agent waits for a core costs some more."""
CHAIN = Path(__file__).parents[2] / "programs" / "snapshots" / "chain.py"


def build_agent(*flags: str) -> list[str]:
    return [sys.executable, "-m", "muster.agent", "--standalone", "--max-restarts", "9", *flags]


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
    outcome = run_chain(tmp_path, "kill-1-20", "kill-0-33-saving", "kill-1-47")
    assert outcome.exit_code == 0, outcome.explain()
    assert sorted(outcome.stdout.split("\n")[-3:-1]) == ["rank 0 done 60 right", "rank 1 done 60 right"]
    first, second, third = list_bases(outcome)
    assert 20 - MOST_LOST <= first <= 20, outcome.explain()
    assert 32 - MOST_LOST <= second <= 32, outcome.explain()
    assert 47 - MOST_LOST <= third <= 47, outcome.explain()
    assert outcome.leftovers == ()


def test_where_snapshots_are_switched_off_the_job_begins_anew(tmp_path: Path) -> None:
    outcome = run_chain(tmp_path, "kill-1-20", flags=("--snapshot-memory", "0"), steps=30)
    assert outcome.exit_code == 0, outcome.explain()
    assert outcome.stdout.count(" right") == 2
    assert list_bases(outcome) == []


def test_no_file_and_no_process_is_left_after_a_kill_of_the_agent(tmp_path: Path) -> None:
    command = [*build_agent("--nproc-per-node", "1"), str(CHAIN), str(tmp_path), "100000"]
    before = set(os.listdir("/dev/shm"))
    with Tree(command, cwd=tmp_path) as tree:
        (line,) = tree.wait_for_line("^worker ")
        tree.send(signal.SIGKILL, int(line.split()[-1]))
        outcome = tree.wait()
    assert outcome.leftovers == (), outcome.explain()
    assert set(os.listdir("/dev/shm")) <= before


# -- several nodes -----------------------------------------------------------------------------------------------------


class Nodes:
    """Agents of one job on this machine, each a tree of its own."""

    def __init__(self, folder: Path, count: int, *words: str, flags: tuple[str, ...] = ()) -> None:
        self.folder, self.count, self.words, self.flags = folder, count, words, flags
        self.port = find_free_port()
        self.trees = [self.start(index) for index in range(count)]

    def start(self, index: int) -> Tree:
        env = {**os.environ, "MUSTER_TOKEN": "0123456789abcdef" * 3}
        agent = [sys.executable, "-m", "muster.agent", "--nnodes", str(self.count), "--node-rank", str(index)]
        agent += ["--rdzv-backend", "muster", "--rdzv-endpoint", f"127.0.0.1:{self.port}", "--max-restarts", "9"]
        return Tree([*agent, *self.flags, str(CHAIN), str(self.folder), *self.words], env=env, cwd=self.folder)

    def wait_for_step(self, step: int) -> None:
        """Until rank 0 has done it, in any round."""

        def is_done() -> bool:
            done = [int.from_bytes(file.read_bytes()[:8], "little") for file in self.folder.glob("steps-*")]
            return max(done, default=0) >= step

        wait_until(is_done, what=f"step {step}")

    def lose(self, index: int) -> None:
        """Kill all processes of a node at once, and start its agent again."""
        self.trees[index].kill_all()
        self.trees[index] = self.start(index)

    def finish(self) -> list[Outcome]:
        return [tree.wait(timeout_s=60) for tree in self.trees]

    def close(self) -> None:
        for tree in self.trees:
            tree.__exit__(None, None, None)


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_node_that_takes_over_gets_its_ranks_states_from_a_neighbour(lost: int, tmp_path: Path) -> None:
    """Node 0 leads: with it the leader is lost."""
    pause = tmp_path / "pause-120"  # the job does not end before
    pause.touch()
    nodes = Nodes(tmp_path, 3, "150", "0.02", "700000")
    try:
        nodes.wait_for_step(100)
        nodes.lose(lost)
        pause.unlink()
        outcomes = nodes.finish()
    finally:
        nodes.close()
    explained = "\n".join(outcome.explain() for outcome in outcomes)
    assert [outcome.exit_code for outcome in outcomes] == [0, 0, 0], explained
    for rank, outcome in enumerate(outcomes):
        assert f"rank {rank} done 150 right" in outcome.stdout, explained
    assert f"rank {lost} continues at step" in outcomes[lost].stdout, explained
    assert "of the snapshot" in outcomes[lost].stderr, explained


def test_without_copies_a_job_that_loses_a_node_begins_anew(tmp_path: Path) -> None:
    pause = tmp_path / "pause-50"  # the job does not end before
    pause.touch()
    nodes = Nodes(tmp_path, 2, "60", "0.02", flags=("--snapshot-copies", "0"))
    try:
        nodes.wait_for_step(40)
        nodes.lose(1)
        pause.unlink()
        outcomes = nodes.finish()
    finally:
        nodes.close()
    explained = "\n".join(outcome.explain() for outcome in outcomes)
    assert [outcome.exit_code for outcome in outcomes] == [0, 0], explained
    assert all("done 60 right" in outcome.stdout for outcome in outcomes), explained
    assert not any("continues at step" in outcome.stdout for outcome in outcomes), explained
