"""What an agent prints while it waits for the others."""

import re
import signal
import socket
from collections.abc import Iterator

import pytest
from harness import AGENT, Tree, find_free_port, start_nodes


@pytest.fixture
def other_program() -> Iterator[int]:
    """The port of a program that accepts connections and knows nothing of muster."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def agent(endpoint: str) -> list[str]:
    flags = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-id", "job7", "--rdzv-endpoint", endpoint]
    return [*AGENT, *flags, "--no-python", "true"]


def test_alone_it_names_what_the_others_need() -> None:
    port = find_free_port()
    with Tree(agent(f"127.0.0.1:{port}")) as tree:
        needed = f"--nnodes 2 --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:{port} --rdzv-id job7"
        tree.wait_for_line(rf"waiting for nodes: 1 of 2 is here: \S+; the others need {needed}; ", stream="stderr")
        with Tree(agent(f"127.0.0.1:{port}")) as other:
            other.wait().check()
        outcome = tree.wait().check()
    assert outcome.stderr.count("waiting for nodes") == 1, outcome.explain()
    waiting, recovered = (outcome.stderr.find(line) for line in ("waiting for nodes", "2 of 2 nodes are here: the job"))
    assert 0 <= waiting < recovered, outcome.explain()


def test_the_first_node_names_a_port_that_another_program_has(other_program: int) -> None:
    where = f"127.0.0.1:{other_program}"
    with Tree([*agent(where)[:-2], "--node-rank", "0", "--no-python", "true"]) as tree:
        line = f"cannot listen at {where} (Address already in use): looking for the job's leader there; "
        tree.wait_for_line(re.escape(f"{line}if another program listens there, choose another port"), stream="stderr")
        tree.send(signal.SIGTERM)
        tree.wait()


def test_it_says_that_a_lost_node_is_back() -> None:
    """If it is back before a line says that the others wait for it, nothing said so."""
    with start_nodes(2, "--no-python", "sh", "-c", "echo begins; sleep 60") as (tree, other):
        tree.wait_for_line("begins")
        other.send(signal.SIGKILL)
        tree.wait_for_line(r"node 1 \(\S+\) (left|was lost): ", stream="stderr")  # its guard or the kernel is first
        with other.start_again() as again:
            tree.wait_for_line("2 of 2 nodes are here: the job goes on", stream="stderr")
            for each in (tree, again):
                each.send(signal.SIGTERM)
            tree.wait()
