"""Workers find the last checkpoint that all ranks have saved: in the next attempt, and when the job runs again."""

import contextlib
import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import Outcome, Tree, find_free_port, wait_until

PROGRAM = str(Path(__file__).parents[2] / "programs" / "resume_saves.py")


@contextlib.contextmanager
def start(
    folder: Path, how: str, *, nodes: int, flags: tuple[str, ...] = (), run_id: str = "resumes"
) -> Iterator[list[Tree]]:
    """The agents of a job of two workers on each node, as two lines on one machine would start it."""
    endpoint = f"127.0.0.1:{find_free_port()}"
    place = ["--standalone"] if nodes == 1 else ["--nnodes", str(nodes), "--rdzv-endpoint", endpoint]
    command = [sys.executable, "-m", "muster.agent", *place, "--nproc-per-node", "2", "--start", "cold", *flags]
    with contextlib.ExitStack() as stack:
        trees = []
        for index in range(nodes):
            rank = ["--node-rank", str(index)] if nodes > 1 else []
            named = ["--rdzv-id", run_id, "--log-dir", str(folder / f"logs{index}")]
            trees.append(stack.enter_context(Tree([*command, *rank, *named, "--tee", "3", PROGRAM, str(folder), how])))
        yield trees


def wait_for_all(trees: list[Tree]) -> tuple[list[Outcome], str]:
    outcomes = [tree.wait() for tree in trees]
    return outcomes, "\n".join(outcome.explain() for outcome in outcomes)


@pytest.mark.parametrize("nodes", [1, 2])
def test_the_next_attempt_resumes_from_what_all_ranks_have_saved(tmp_path: Path, nodes: int) -> None:
    with start(tmp_path, "fails", nodes=nodes, flags=("--max-restarts", "1")) as trees:
        outcomes, text = wait_for_all(trees)
    assert [each.exit_code for each in outcomes] == [0] * nodes, text
    for rank in range(2 * nodes):
        assert f"rank {rank} of attempt 0 resumes from None" in text, text
        assert f"rank {rank} of attempt 1 resumes from {tmp_path}/checkpoint0" in text, text
    assert f"all ranks: step 9, {tmp_path}/checkpoint0" in outcomes[0].stderr, text
    assert not list(tmp_path.rglob("checkpoint.json*")), "the job has succeeded"


@pytest.mark.parametrize("nodes", [1, 2])
def test_the_next_incarnation_resumes_although_all_agents_were_killed(tmp_path: Path, nodes: int) -> None:
    with start(tmp_path, "waits", nodes=nodes) as trees:
        for tree in trees:
            tree.wait_for_line("waits", count=2)
        kept = [tmp_path / f"logs{index}" / "resumes" / "checkpoint.json" for index in range(nodes)]
        wait_until(lambda: all(path.exists() for path in kept), what="the checkpoint is kept on all nodes")
        for tree in trees:
            tree.send(signal.SIGKILL)
        wait_for_all(trees)
    assert [json.loads(path.read_text()) for path in kept] == [
        {"number": 1, "step": 9, "path": f"{tmp_path}/checkpoint0"}
    ] * nodes
    kept[0].unlink()  # of one node it is enough
    if nodes == 1:
        kept[0].write_text('{"number": 1, "step": 9')  # half a file is none
    with start(tmp_path, "ends", nodes=nodes) as trees:
        outcomes, text = wait_for_all(trees)
    expected = f"{tmp_path}/checkpoint0" if nodes > 1 else "None"
    assert [each.exit_code for each in outcomes] == [0] * nodes, text
    for rank in range(2 * nodes):
        assert f"rank {rank} of attempt 0 resumes from {expected}" in text, text


def test_a_run_id_that_every_job_has_resumes_nothing(tmp_path: Path) -> None:
    kept = tmp_path / "logs0" / "none" / "checkpoint.json"
    kept.parent.mkdir(parents=True)
    kept.write_text('{"number": 1, "step": 9, "path": "/of another job"}')
    with start(tmp_path, "ends", nodes=1, run_id="none") as trees:
        outcomes, text = wait_for_all(trees)
    assert [each.exit_code for each in outcomes] == [0], text
    assert text.count("resumes from None") == 2, text


def test_what_an_adapter_carries_over_is_used_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    carried = {"number": 3, "step": 40, "path": "/data/40"}
    monkeypatch.setenv("MUSTER_CHECKPOINT", json.dumps(carried))
    with start(tmp_path, "waits", nodes=1) as trees:
        trees[0].wait_for_line("resumes from /data/40", count=2)
        trees[0].wait_for_line("waits", count=2)
        assert json.loads((tmp_path / "logs0" / "resumes" / "checkpoint.json").read_text())["number"] >= 3
        trees[0].send(signal.SIGTERM)
        outcomes, text = wait_for_all(trees)
    assert [each.exit_code for each in outcomes] == [143], text
    after = json.loads((tmp_path / "logs0" / "resumes" / "checkpoint.json").read_text())
    assert after == {"number": 4, "step": 9, "path": f"{tmp_path}/checkpoint0"}
