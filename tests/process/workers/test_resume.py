"""Workers find the last checkpoint that all ranks have saved: in the next attempt, and when the job runs again."""

import json
import signal
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from harness import PROGRAMS, Tree, check_all, start_nodes, wait_until

PROGRAM = PROGRAMS / "resume_saves.py"


def start(
    folder: Path, how: str, *flags: str, nodes: int = 1, run_id: str = "resumes"
) -> AbstractContextManager[list[Tree]]:
    """The agents of a job of two workers on each node."""
    named = ["--rdzv-id", run_id, "--log-dir", folder / "logs{node}", "--nproc-per-node", "2", "--start", "cold"]
    return start_nodes(nodes, *named, "--tee", "3", *flags, PROGRAM, folder, how)


@pytest.mark.parametrize("nodes", [1, 2])
def test_the_next_attempt_resumes_from_what_all_ranks_have_saved(tmp_path: Path, nodes: int) -> None:
    with start(tmp_path, "fails", "--max-restarts", "1", nodes=nodes) as trees:
        outcomes = check_all(trees)
    for rank in range(2 * nodes):
        text = outcomes[rank // 2].stdout
        assert f"rank {rank} of attempt 0 resumes from None" in text, text
        assert f"rank {rank} of attempt 1 resumes from {tmp_path}/checkpoint0" in text, text
    assert f"all ranks: step 9, {tmp_path}/checkpoint0" in outcomes[0].stderr, outcomes[0].explain()
    assert not list(tmp_path.rglob("checkpoint.json*"))


@pytest.mark.parametrize("nodes", [1, 2])
def test_the_next_incarnation_resumes_although_all_agents_were_killed(tmp_path: Path, nodes: int) -> None:
    with start(tmp_path, "waits", nodes=nodes) as trees:
        for tree in trees:
            tree.wait_for_line("waits", count=2)
        kept = [tmp_path / f"logs{index}" / "resumes" / "checkpoint.json" for index in range(nodes)]
        wait_until(lambda: all(path.exists() for path in kept), what="the checkpoint is kept on all nodes")
        for tree in trees:
            tree.send(signal.SIGKILL)
            tree.wait()
    assert [json.loads(path.read_text()) for path in kept] == [
        {"number": 1, "step": 9, "path": f"{tmp_path}/checkpoint0"}
    ] * nodes
    kept[0].unlink()  # of one node it is enough
    if nodes == 1:
        kept[0].write_text('{"number": 1, "step": 9')  # half a file is none
    with start(tmp_path, "ends", nodes=nodes) as trees:
        outcomes = check_all(trees)
    expected = f"{tmp_path}/checkpoint0" if nodes > 1 else "None"
    for rank in range(2 * nodes):
        text = outcomes[rank // 2].stdout
        assert f"rank {rank} of attempt 0 resumes from {expected}" in text, text


def test_a_run_id_that_every_job_has_resumes_nothing(tmp_path: Path) -> None:
    kept = tmp_path / "logs0" / "none" / "checkpoint.json"
    kept.parent.mkdir(parents=True)
    kept.write_text('{"number": 1, "step": 9, "path": "/of another job"}')
    with start(tmp_path, "ends", run_id="none") as trees:
        [outcome] = check_all(trees)
    assert outcome.stdout.count("resumes from None") == 2, outcome.explain()


def test_what_an_adapter_carries_over_is_used_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    carried = {"number": 3, "step": 40, "path": "/data/40"}
    monkeypatch.setenv("MUSTER_CHECKPOINT", json.dumps(carried))
    with start(tmp_path, "waits") as trees:
        trees[0].wait_for_line("resumes from /data/40", count=2)
        trees[0].wait_for_line("waits", count=2)
        assert json.loads((tmp_path / "logs0" / "resumes" / "checkpoint.json").read_text())["number"] >= 3
        trees[0].send(signal.SIGTERM)
        check_all(trees, 143)
    after = json.loads((tmp_path / "logs0" / "resumes" / "checkpoint.json").read_text())
    assert after == {"number": 4, "step": 9, "path": f"{tmp_path}/checkpoint0"}
