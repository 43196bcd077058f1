"""Jobs of two nodes whose programs call the Python API, through muster's own rendezvous."""

from pathlib import Path

import pytest
from harness import find_free_port
from launchers import run_api

# On a loaded machine two programs, two agents and four workers take their time to start.
pytestmark = pytest.mark.timeout(300)


def run_nodes(scenario: str, folder: Path, *node: str) -> list[str]:
    env = {"MUSTER_TOKEN": "0123456789abcdef" * 2}
    outcome = run_api("nodes.py", scenario, str(find_free_port()), *node, folder=folder, env=env, timeout_s=250)
    # the logs of a job that did not succeed stay
    assert [*folder.glob("muster_job_*"), *folder.glob("muster_call_*"), *folder.glob("muster_result_*")] == [], (
        outcome.explain()
    )
    print(outcome.explain())
    return outcome.stdout.splitlines()


def show(ranks: range, *, nodes: int = 2, attempt: int = 0) -> str:
    return str({rank: (rank, 2 * nodes, rank // 2, attempt) for rank in ranks})


def test_results_of_this_node_or_of_all(tmp_path: Path) -> None:
    everything, sizes = show(range(4)), str({0: 0, 1: 8, 2: 16, 3: 24})
    assert run_nodes("results", tmp_path) == [
        *(show(range(2)), everything, sizes),
        *(show(range(2, 4)), everything, sizes),
    ]


def test_both_programs_learn_of_a_failure(tmp_path: Path) -> None:
    # the exception itself is known only where it was raised
    assert run_nodes("fail", tmp_path) == ["WorkerFailed [(3, 1)]", "ValueError [(3, 1)]"]


def test_closures_start_again_on_both_nodes(tmp_path: Path) -> None:
    everything = {0: [0, 0, 0, 0], 1: [0, 0, 0, 1], 2: [1, 1, 1, 2], 3: [1, 1, 1, 3]}
    assert run_nodes("forks", tmp_path) == [f"{everything} 1 True"] * 2


def test_the_job_continues_without_a_program_that_is_killed(tmp_path: Path) -> None:
    assert run_nodes("lost", tmp_path) == [
        "['running 0\\n', 'running 1\\n']",
        "['running 2\\n', 'running 3\\n']",
        "['running 0\\n', 'running 1\\n']",
        show(range(2), nodes=1),
    ]


def test_nodes_that_do_not_find_each_other(tmp_path: Path) -> None:
    first, second = run_nodes("alone", tmp_path, "0")
    assert "within 2 s" in first
    assert "leader at 127.0.0.1:" in second
    assert "within 2 s" in second


@pytest.mark.long
@pytest.mark.torch
@pytest.mark.timeout(600)
def test_elastic_launch(tmp_path: Path) -> None:
    first, failed, second, failed_there, alone = run_nodes("elastic_launch", tmp_path)
    # which of the two has the endpoint, and with it rank 0, is decided by which comes first
    assert sorted([first, second]) == [show(range(2), attempt=1), show(range(2, 4), attempt=1)]
    assert sorted([failed, failed_there]) == ["3 ValueError", "3 WorkerFailed"]
    assert "at 127.0.0.1:1 within 2 s" in alone
