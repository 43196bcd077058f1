"""What an agent prints while it waits for the others."""

import re
import signal
import socket
import sys
import threading
from collections.abc import Iterator

import pytest
from harness import Tree, find_free_port


@pytest.fixture
def other_program() -> Iterator[int]:
    """The port of a program that accepts connections and knows nothing of muster."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def agent(endpoint: str) -> list[str]:
    flags = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-id", "job7", "--rdzv-endpoint", endpoint]
    return [sys.executable, "-m", "muster.agent", *flags, "--no-python", "true"]


def test_alone_it_names_what_the_others_need() -> None:
    port = find_free_port()
    with Tree(agent(f"127.0.0.1:{port}")) as tree:
        needed = f"--nnodes 2 --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:{port} --rdzv-id job7"
        tree.wait_for_line(rf"waiting for nodes: 1 of 2 is here: \S+; the others need {needed}; ", stream="stderr")
        with Tree(agent(f"127.0.0.1:{port}")) as other:
            assert other.wait().exit_code == 0
        outcome = tree.wait()
    assert outcome.exit_code == 0, outcome.explain()
    assert outcome.stderr.count("waiting for nodes") == 1, outcome.explain()
    waiting, recovered = (outcome.stderr.find(line) for line in ("waiting for nodes", "2 of 2 nodes are here: the job"))
    assert 0 <= waiting < recovered, outcome.explain()


@pytest.mark.parametrize("endpoint", ["nosuchhost.invalid:29400", "127.0.0.1:{port}"])
def test_it_says_why_it_finds_no_leader(endpoint: str, other_program: int) -> None:
    where = endpoint.format(port=other_program)
    with Tree(agent(where)) as tree:
        tree.wait_for_line(f"no leader found yet: {where}: ", stream="stderr")
        threading.Event().wait(1)
        tree.send(signal.SIGTERM)
        outcome = tree.wait()
    assert outcome.stderr.count("no leader found") == 1, outcome.explain()


def test_the_first_node_names_a_port_that_another_program_has(other_program: int) -> None:
    where = f"127.0.0.1:{other_program}"
    with Tree([*agent(where)[:-2], "--node-rank", "0", "--no-python", "true"]) as tree:
        line = f"cannot listen at {where} (Address already in use): looking for the job's leader there; "
        tree.wait_for_line(re.escape(f"{line}if another program listens there, choose another port"), stream="stderr")
        tree.send(signal.SIGTERM)
        tree.wait()


def test_it_says_that_a_lost_node_is_back() -> None:
    """If it is back before a line says that the others wait for it, nothing said so."""
    flags = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{find_free_port()}"]
    command = [sys.executable, "-m", "muster.agent", *flags, "--no-python", "sh", "-c", "echo begins; sleep 60"]
    with Tree([*command[:-4], "--node-rank", "0", *command[-4:]]) as tree:
        with Tree([*command[:-4], "--node-rank", "1", *command[-4:]]) as other:
            tree.wait_for_line("begins")
            other.send(signal.SIGKILL)
        tree.wait_for_line(r"node 1 \(\S+\) (left|was lost): ", stream="stderr")  # its guard or the kernel is first
        with Tree([*command[:-4], "--node-rank", "1", *command[-4:]]) as other:
            tree.wait_for_line("2 of 2 nodes are here: the job goes on", stream="stderr")
            for each in (tree, other):
                each.send(signal.SIGTERM)
            tree.wait()
