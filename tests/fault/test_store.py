"""The round's store, and what ends while workers use it: the job goes on, and what succeeds is quiet."""

import os
import signal
import sys
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from harness import AGENT, PROGRAMS, Outcome, Tree, run_tree, start_nodes, wait_until
from subreaper import list_processes

PROGRAM = str(PROGRAMS / "store_points.py")
FLAGS = ("--max-restarts", "1", "--shutdown-timeout", "2", "--redirects", "3")
ALONE = (*AGENT, *FLAGS, "--standalone", "--nproc-per-node", "3", "--log-dir")
POINTS = ("init", "new_group", "reduce", "destroy")

pytestmark = [
    pytest.mark.soak,
    pytest.mark.slow,
]


def find_store(tree: Tree) -> int | None:
    """The store's process in this tree."""
    for pid in tree.descendants():
        try:
            name = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if name.startswith(b"muster-store"):
            return pid
    return None


def read_quiet(log_dir: Path, attempt: int) -> dict[str, str]:
    """What the workers of an attempt wrote on their stderr, without those that wrote nothing."""
    files = sorted(log_dir.glob(f"*/attempt_{attempt}/*/stderr.log"))
    assert files
    return {str(path): path.read_text() for path in files if path.read_text()}


def check(outcome: Outcome, log_dir: Path, attempt: int = 1) -> None:
    outcome.check()
    assert read_quiet(log_dir, attempt) == {}
    assert "unexpected" not in outcome.stderr


@pytest.mark.parametrize("words", [pytest.param(["none"], marks=pytest.mark.long), ["none", "apart"]], ids=" ".join)
def test_a_job_that_succeeds_is_quiet(tmp_path: Path, words: list[str]) -> None:
    outcome = run_tree([*ALONE, str(tmp_path / "logs"), PROGRAM, *words])
    check(outcome, tmp_path / "logs", attempt=0)
    lines = [line for line in outcome.stderr.splitlines() if "muster" in line and "logs" not in line]
    assert [line for line in lines if "OMP_NUM_THREADS" not in line] == []


@pytest.mark.long  # in `make test` it is the conformance suite's crash of one of a gloo group
@pytest.mark.parametrize("point", POINTS)
def test_a_worker_is_killed_while_the_others_wait_for_it(tmp_path: Path, point: str) -> None:
    outcome = run_tree([*ALONE, str(tmp_path / "logs"), PROGRAM, point])
    check(outcome, tmp_path / "logs")


@pytest.mark.parametrize(
    ("words", "word", "count"),
    [
        (["wait"], "ready", 0),
        pytest.param(["wait"], "ready", 3, marks=pytest.mark.long),
        pytest.param(["new_group", "held"], "held", 1, marks=pytest.mark.long),
        pytest.param(["destroy", "held"], "held", 1, marks=pytest.mark.long),
    ],
    ids=["init", "wait", "new_group", "destroy"],
)
def test_the_store_is_killed(tmp_path: Path, words: list[str], word: str, count: int) -> None:
    """While workers are on the way to it, when all have used it, and while they wait for one of them."""
    with Tree([*ALONE, str(tmp_path / "logs"), PROGRAM, *words, "apart"]) as tree:
        wait_until(lambda: count_said(tmp_path / "logs", word) == count, what=f"{count} x {word}")
        wait_until(lambda: find_store(tree), what="a store")
        store = find_store(tree)
        assert store is not None
        tree.send(signal.SIGKILL, store)
        outcome = tree.wait()
    check(outcome, tmp_path / "logs")
    line = " ".join(outcome.stderr.split())
    assert "store's process" in line  # and perhaps what rank 0 raised then
    assert "; restart 1 of 1" in line


def test_the_agent_that_hosts_the_store_is_killed(tmp_path: Path) -> None:
    """Its store ends with it, and the other node continues with a store of its own. It has nothing of the workers."""
    with start_pair(tmp_path, "wait") as (host, survivor):
        wait_until(lambda: count_said(tmp_path, "ready") == 4, what="four workers")
        store = find_store(host)
        assert store is not None
        assert find_store(survivor) is None
        links = {os.readlink(f"/proc/{store}/fd/{fd}") for fd in os.listdir(f"/proc/{store}/fd")}
        assert not [link for link in links if "logs" in link or "memfd" in link]
        host.kill_agent()
        assert store not in list_processes()
        wait_until(lambda: find_store(survivor), what="the survivor's store")
        survivor.send(signal.SIGTERM)
        survivor.wait().check(143)


@pytest.mark.long
@pytest.mark.parametrize("point", ["init", "new_group", "destroy"])
def test_the_agent_that_hosts_the_store_is_killed_while_workers_wait_for_one_of_them(
    tmp_path: Path, point: str
) -> None:
    """The workers of the other node finish the job in a round of their own."""
    with start_pair(tmp_path, point, "held", "nodes") as (host, survivor):
        wait_until(lambda: count_said(tmp_path, "held") == 1, what="a worker that is held")
        host.kill_agent()
        outcome = survivor.wait().check()
    assert "SIGABRT" not in outcome.stderr
    assert not [text for text in read_quiet(tmp_path / "logs1" / "job", 0).values() if "terminate called" in text]


def start_pair(tmp_path: Path, *words: str) -> AbstractContextManager[list[Tree]]:
    """Two nodes of two workers each; one is enough."""
    own = ["--nproc-per-node", "2", "--log-dir", tmp_path / "logs{node}", "--rdzv-conf", "last_call_timeout=5"]
    return start_nodes(2, *FLAGS, "--nnodes", "1:2", *own, PROGRAM, *words, "apart")


def count_said(logs: Path, word: str) -> int:
    """How many workers of the first attempt have printed this word; "ready" after an all-reduce."""
    return sum(word in path.read_text() for path in logs.glob("**/attempt_0/*/stdout.log"))


def test_the_store_asks_no_name_server(tmp_path: Path) -> None:
    """torch's store would look up each client that connects; while it waits for a name server it answers no other."""
    (tmp_path / "resolv.conf").write_text("nameserver 127.77.0.1\n")
    mount = f'mount --bind {tmp_path}/resolv.conf /etc/resolv.conf && exec "$@"'
    shell = ["unshare", "--mount", "sh", "-c", mount, "sh"]
    program = [sys.executable, str(PROGRAMS / "store_names.py")]
    if run_tree([*shell, *program, "look-up"]).stdout != "asked for 1 names\n":
        pytest.skip("a name server of this test's own is not possible here")
    outcome = run_tree([*shell, *program]).check()
    assert outcome.stdout == "asked for 0 names\n", outcome.explain()
