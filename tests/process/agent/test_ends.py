"""Exit 0 means that every worker of the job has succeeded, whatever the agents meet through."""

import itertools
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from harness import AGENT, PROGRAMS, Tree, check_all, reserve_port, wait_until

ENDS = PROGRAMS / "agent" / "ends.py"
SILENCE = "keep_alive_interval=1,keep_alive_max_attempt=2"
BACKENDS = [
    "static",
    pytest.param("muster", marks=pytest.mark.long),  # the same member; what it adds is in the conformance suite
    pytest.param("c10d-torch", marks=[pytest.mark.torch, pytest.mark.long]),
    pytest.param("etcd-v2", marks=[pytest.mark.torch, pytest.mark.etcd, pytest.mark.long]),
]


class Job:
    """Two agents of one job on this machine; node 0 holds the store where there is one."""

    def __init__(self, backend: str, endpoint: str, folder: Path, stack: ExitStack) -> None:
        self.backend = backend
        self._endpoint = endpoint
        self._folder = folder
        self._stack = stack

    def start(self, index: int, *, patience_s: int = 60, max_restarts: int = 0) -> Tree:
        """The agent of one node, which waits so long for the other to come (back)."""
        host, _, port = self._endpoint.rpartition(":")
        if self.backend == "static":
            where = ["--master-addr", host, "--master-port", port, "--node-rank", str(index)]
        else:
            where = ["--rdzv-backend", self.backend, "--rdzv-endpoint", self._endpoint, "--rdzv-id", "ends"]
            where += ["--node-rank", str(index)] if self.backend == "muster" else []
        conf = f"{SILENCE},join_timeout={patience_s}"
        if self.backend == "c10d-torch":
            conf += f",is_host={1 - index}"
        flags = ["--nnodes", "2", "--max-restarts", str(max_restarts), "--start", "cold", "--rdzv-conf", conf]
        command = [*AGENT, *flags, *where, str(ENDS), str(self._folder)]
        env = {**os.environ, "PYTHONWARNINGS": "ignore", "PYTHONUNBUFFERED": "1"}
        return self._stack.enter_context(Tree(command, env=env))

    def start_both(self, **options: int) -> list[Tree]:
        """Both agents, by index. Their workers run."""
        trees = [self.start(index, **options) for index in range(2)]
        assert sorted(map(find_rank, trees)) == [0, 1]
        return trees

    def end(self, rank: int, code: int, attempt: int = 0) -> None:
        """Let the worker of a global rank end in this attempt, now or when it comes to it."""
        end = self._folder / f"end{rank}.{attempt}"
        end.with_suffix(".new").write_text(str(code))
        end.with_suffix(".new").rename(end)


def find_rank(tree: Tree, *, count: int = 1) -> int:
    """The global rank of a node's only worker, once it has come up so often. Some backends do not let us choose."""
    line = tree.wait_for_line(r"rank \d+ attempt", count=count)[-1]
    return int(re.findall(r"rank (\d+)", line)[0])


def wait_for_worker_end(tree: Tree) -> None:
    """Wait until a node's first worker is gone."""
    pid = tree.wait_for_line(r"rank \d+ attempt")[0].split()[-1]
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), what="the worker's end")


@pytest.fixture(params=BACKENDS)
def job(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Job]:
    with ExitStack() as stack:
        if request.param == "etcd-v2":
            endpoint = request.getfixturevalue("etcd")
        else:
            endpoint = f"127.0.0.1:{stack.enter_context(reserve_port())}"
        yield Job(request.param, endpoint, tmp_path, stack)


@pytest.mark.parametrize("first", [pytest.param(0, marks=pytest.mark.long), 1])
def test_a_failure_after_the_other_nodes_success_fails_both(job: Job, first: int) -> None:
    nodes = job.start_both()
    done, fails = nodes[first], nodes[1 - first]
    job.end(find_rank(done), 0)
    wait_for_worker_end(done)
    job.end(find_rank(fails), 3)
    outcomes = check_all([done, fails], 1)
    assert sum(outcome.stderr.count("JOB FAILED") for outcome in outcomes) == 1


def test_a_node_that_is_done_takes_part_again(job: Job) -> None:
    """The other one restarts; only when both have succeeded together is the job done."""
    done, fails = job.start_both(max_restarts=1)
    job.end(find_rank(done), 0)
    wait_for_worker_end(done)
    job.end(find_rank(fails), 3)
    for tree in (done, fails):
        tree.wait_for_line(r"rank \d+ attempt", count=2)
    for rank, attempt in itertools.product((0, 1), (0, 1)):  # some backends count the attempts of each node
        job.end(rank, 0, attempt)
    check_all([done, fails])


def test_a_node_that_is_killed_late_is_no_success(job: Job) -> None:
    """Nothing replaces it: the other one gives up when its patience has passed."""
    stays, goes = job.start_both(patience_s=5 if job.backend in ("static", "muster") else 30)  # torch's import counts
    job.end(find_rank(stays), 0)
    wait_for_worker_end(stays)
    goes.kill_all()
    stays.wait().check(69)


def test_a_replacement_of_a_killed_node_completes_the_job(job: Job) -> None:
    stays, goes = job.start_both()
    job.end(find_rank(stays), 0)
    wait_for_worker_end(stays)
    goes.kill_all()
    again = job.start(1)
    find_rank(again)
    for rank in (0, 1):
        job.end(rank, 0)
    check_all([stays, again])
