"""The port by which other roles see that an agent's workers run."""

import contextlib
import socket
from types import SimpleNamespace

import pytest

from muster._shared.contract import Env
from muster.agent.features.ready_port import sink
from muster.agent.node.events import WorkersGone, WorkerStarted
from muster.agent.runtime.loop import Loop


def is_open(port):
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5):
        return True
    return False


@pytest.fixture
def port():
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def build_witness(port, lines, node_index=0):
    found = []
    rendezvous = SimpleNamespace(node_index=node_index)
    context = SimpleNamespace(
        config=SimpleNamespace(nproc=2, rendezvous=rendezvous),
        environ={Env.READY_PORT: str(port)},
        loop=Loop(),
        logs=SimpleNamespace(print_line=lines.append),
        add_witness=found.append,
    )
    assert sink.connect(context) is context.config
    return context, *found


def test_it_is_open_while_all_workers_of_node_0_run(port):
    context, witness = build_witness(port, [])
    witness.read(WorkerStarted(round_number=1, local_rank=0), None)
    assert not is_open(port)
    witness.read(WorkerStarted(round_number=1, local_rank=1), None)
    for _ in range(3):
        assert is_open(port)
        context.loop.turn(1.0)
    witness.read(WorkersGone(round_number=1), None)
    assert not is_open(port)
    witness.read(WorkerStarted(round_number=2, local_rank=0), None)
    witness.read(WorkerStarted(round_number=2, local_rank=1), None)
    assert is_open(port)
    witness.read_end(None, None, None)
    assert not is_open(port)
    context.loop.close()


def test_other_nodes_have_none(port):
    assert len(build_witness(port, [], node_index=1)) == 1


def test_a_port_that_is_taken_costs_a_line(port):
    lines = []
    with socket.create_server(("", port)):
        context, witness = build_witness(port, lines)
        for rank in range(2):
            witness.read(WorkerStarted(round_number=1, local_rank=rank), None)
    assert lines == [f"port {port}: Address already in use: roles that wait for this one cannot see that it runs"]
    context.loop.close()
