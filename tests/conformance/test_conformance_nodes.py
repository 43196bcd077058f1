"""Several agents on this machine: ranks, waiting for other nodes, and lost nodes."""

import signal
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
from harness import Outcome, Tree, wait_until
from launchers import Launcher, read_facts


def c10d(port: int, *more: str, nnodes: str = "2") -> list[str]:
    return [
        "--nnodes",
        nnodes,
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        f"localhost:{port}",
        "--rdzv-id",
        "j",
        *more,
    ]


def run_nodes(
    launcher: Launcher, nodes: Sequence[list[str]], program: Sequence[str], *, timeout_s: float = 60
) -> list[Outcome]:
    with ExitStack() as stack:
        trees = [stack.enter_context(launcher.start(flags, program)) for flags in nodes]
        return [tree.wait(timeout_s) for tree in trees]


def assert_succeeded(outcomes: Sequence[Outcome]) -> None:
    assert [outcome.exit_code for outcome in outcomes] == [0] * len(outcomes), "\n".join(o.explain() for o in outcomes)


@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_two_nodes_have_one_numbering(launcher: Launcher, free_port: int, backend: str) -> None:
    if backend == "static":
        master = ["--nnodes=2", "--master-addr=localhost", f"--master-port={free_port}", "--nproc-per-node=2"]
        nodes = [[*master, f"--node-rank={rank}"] for rank in range(2)]
    else:
        nodes = [c10d(free_port, "--nproc-per-node", "2")] * 2
    outcomes = run_nodes(launcher, nodes, ["conf_facts.py"])
    assert_succeeded(outcomes)
    envs = [facts["env"] for outcome in outcomes for facts in read_facts(outcome.stdout)]
    if backend == "static":
        assert [env["GROUP_RANK"] for env in envs] == ["0", "0", "1", "1"]
        assert {env["MASTER_ADDR"] for env in envs} == {"localhost"}
        assert {env["MASTER_PORT"] for env in envs} == {str(free_port)}
    assert sorted(env["RANK"] for env in envs) == ["0", "1", "2", "3"]
    assert {env["WORLD_SIZE"] for env in envs} == {"4"}
    assert {env["GROUP_WORLD_SIZE"] for env in envs} == {"2"}
    assert len({(env["MASTER_ADDR"], env["MASTER_PORT"], env["TORCHELASTIC_RUN_ID"]) for env in envs}) == 1
    assert all(int(env["RANK"]) == 2 * int(env["GROUP_RANK"]) + int(env["LOCAL_RANK"]) for env in envs)


@pytest.mark.fault(11, "--node-rank is ignored with c10d: the first node to join gets rank 0")
def test_the_node_rank_decides(launcher: Launcher, free_port: int) -> None:
    with ExitStack() as stack:
        # Node 1 starts first, and is first in the order of process ids.
        trees = [
            stack.enter_context(launcher.start(c10d(free_port, "--node-rank", rank), ["conf_facts.py"]))
            for rank in ("1", "0")
        ]
        outcomes = [tree.wait() for tree in trees]
    assert_succeeded(outcomes)
    assert [read_facts(outcome.stdout)[0]["env"]["GROUP_RANK"] for outcome in outcomes] == ["1", "0"]


@pytest.mark.fault(5, "33 s to the first worker: it waits 30 s for a second node", recorded=True)
def test_an_elastic_job_starts_soon_with_the_nodes_that_joined(launcher: Launcher, free_port: int) -> None:
    outcome = launcher.run(c10d(free_port, nnodes="1:2"), ["conf_facts.py"], timeout_s=20).check()
    assert read_facts(outcome.stdout)[0]["env"]["WORLD_SIZE"] == "1"


def test_missing_nodes_are_not_waited_for_without_end(launcher: Launcher, free_port: int) -> None:
    launcher.run(c10d(free_port, "--rdzv-conf", "join_timeout=2"), ["conf_facts.py"], timeout_s=60).check(
        69 if launcher.is_muster else 1
    )


def test_a_node_with_is_host_0_does_not_lead(launcher: Launcher, free_port: int) -> None:
    conf = "is_host=0,join_timeout=2,read_timeout=2,last_call_timeout=1"
    outcome = launcher.run(c10d(free_port, "--rdzv-conf", conf, nnodes="1:2"), ["conf_facts.py"], timeout_s=90).check(
        69 if launcher.is_muster else 1
    )
    assert read_facts(outcome.stdout) == []


@pytest.mark.fault(
    "end", "the node without the failure learns of it late or never: now and then not ended after 90 s", recorded=True
)
def test_a_failure_on_one_node_fails_all(launcher: Launcher, free_port: int) -> None:
    outcomes = run_nodes(launcher, [c10d(free_port)] * 2, ["conf_exits.py", "3", "1"], timeout_s=90)
    assert [outcome.exit_code for outcome in outcomes] == [1, 1], "\n".join(o.explain() for o in outcomes)
    assert all(outcome.leftovers == () for outcome in outcomes)


@pytest.mark.fault(
    14, "neither node shows the exception, and node 0 never learns of it: not ended after 90 s", recorded=True
)
def test_one_report_for_the_whole_job(launcher: Launcher, free_port: int) -> None:
    nodes = [c10d(free_port, "--nproc-per-node", "2", "-r", "3")] * 2
    outcomes = run_nodes(launcher, nodes, ["conf_raises.py", "3"], timeout_s=90)
    assert [outcome.exit_code for outcome in outcomes] == [1, 1], "\n".join(o.explain() for o in outcomes)
    assert sum(outcome.stderr.count("ValueError: the very error") > 0 for outcome in outcomes) == 1


@pytest.mark.fault(10, "the count is per agent: the other node's workers start again with 0", recorded=True)
def test_a_restart_on_one_node_is_the_next_attempt_of_all(launcher: Launcher, free_port: int, tmp_path: Path) -> None:
    nodes = [c10d(free_port, "--max-restarts", "1")] * 2
    outcomes = run_nodes(launcher, nodes, ["conf_node_fails.py", str(tmp_path / "mark")], timeout_s=90)
    assert_succeeded(outcomes)
    lines = sorted(line for outcome in outcomes for line in outcome.stdout.splitlines() if "group" in line)
    assert [line[-17:] for line in lines] == [
        "group 0 attempt 0",
        "group 0 attempt 1",
        "group 1 attempt 0",
        "group 1 attempt 1",
    ]


@pytest.mark.fault(9, "the node that is done waits 300 s in its exit barrier and the other fails", recorded=True)
def test_a_node_that_has_succeeded_takes_part_again(launcher: Launcher, free_port: int, tmp_path: Path) -> None:
    mark = tmp_path / "go"
    with ExitStack() as stack:
        start = [
            launcher.start(c10d(free_port, "--max-restarts", "1"), ["conf_node_exits.py", str(mark)]) for _ in range(2)
        ]
        trees = [stack.enter_context(tree) for tree in start]
        wait_until(lambda: any("group 0" in tree.stdout for tree in trees), what="the first worker of group 0")
        [line] = [line for tree in trees for line in tree.stdout.splitlines() if "group 0" in line]
        wait_until(lambda: not Path(f"/proc/{line.split()[-1]}").exists(), what="its end")
        mark.write_text("")
        outcomes = [tree.wait(60) for tree in trees]
    assert_succeeded(outcomes)
    assert sum("attempt 1" in outcome.stdout for outcome in outcomes) == 2


@pytest.mark.fault(3, "150 s after the SIGKILL of one of two elastic nodes nothing had happened", recorded=True)
def test_a_lost_node_is_detected(launcher: Launcher, free_port: int) -> None:
    flags = c10d(free_port, "--rdzv-conf", "last_call_timeout=1", nnodes="1:2")
    with ExitStack() as stack:
        survivor = stack.enter_context(launcher.start([*flags, "--node-rank", "0"], ["conf_waits.py"]))
        lost = stack.enter_context(launcher.start([*flags, "--node-rank", "1"], ["conf_waits.py"]))
        survivor.wait_for_line("waits")
        lost.wait_for_line("rank 1 waits")
        lost.kill_all()
        survivor.wait_for_line("rank 0 waits", count=2, timeout_s=30)


@pytest.mark.fault(4, "every survivor exits 1 within about a second of the end of node 0's agent", recorded=True)
def test_the_job_survives_the_loss_of_the_leader(launcher: Launcher, free_port: int) -> None:
    flags = c10d(free_port, "--rdzv-conf", "last_call_timeout=1", nnodes="1:3")
    with ExitStack() as stack:
        trees = [
            stack.enter_context(launcher.start([*flags, "--node-rank", str(rank)], ["conf_waits.py"]))
            for rank in range(3)
        ]
        wait_until(lambda: list_waiting(trees) == ["0", "1", "2"], timeout_s=60, what="all three wait")
        trees[0].kill_all()
        wait_until(lambda: list_waiting(trees[1:]) == ["0", "1"], timeout_s=30, what="the others wait")


def list_waiting(trees: list[Tree]) -> list[str]:
    """Ranks of those that have said last that they wait."""
    last = [line for tree in trees for line in tree.stdout.splitlines()[-1:]]
    return sorted(line.split()[-3] for line in last if "waits" in line)


@pytest.mark.fault(2, "hangs for 60 s and fails when the new node sorts before the old one", recorded=True)
def test_a_new_node_joins_a_running_job(launcher: Launcher, free_port: int) -> None:
    flags = c10d(free_port, "--rdzv-conf", "last_call_timeout=1", nnodes="1:2")
    with ExitStack() as stack:
        first = stack.enter_context(launcher.start([*flags, "--node-rank", "0"], ["conf_waits.py"]))
        first.wait_for_line("rank 0 waits")
        second = stack.enter_context(launcher.start([*flags, "--node-rank", "1"], ["conf_waits.py"]))
        second.wait_for_line("waits", timeout_s=30)
        first.wait_for_line("waits", count=2, timeout_s=30)


@pytest.mark.fault(10, "a surplus node ends with an error", recorded=True)
def test_a_surplus_node_waits_and_succeeds(launcher: Launcher, free_port: int) -> None:
    flags = c10d(free_port)
    with ExitStack() as stack:
        trees = [stack.enter_context(launcher.start(flags, ["conf_waits.py"])) for _ in range(2)]
        for tree in trees:
            tree.wait_for_line("waits")
        spare = stack.enter_context(launcher.start(flags, ["conf_waits.py"]))
        spare.wait_for_line("as a spare", stream="stderr")
        for tree in trees:
            for line in tree.wait_for_line("waits"):
                tree.send(signal.SIGUSR1, int(line.split()[-1]))
        assert_succeeded([tree.wait() for tree in [*trees, spare]])
