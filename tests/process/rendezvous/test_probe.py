"""The probe for an ended process, over real sockets on loopback."""

import select
import socket
import time
from collections.abc import Callable, Iterator

import pytest

from muster.agent.rendezvous.transport import dial as probe_module
from muster.agent.rendezvous.transport.dial import Probe
from muster.agent.runtime.loop import Loop

LIMIT_S = 30.0


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.close()


@pytest.fixture
def server() -> Iterator[socket.socket]:
    """Listens, and accepts only when the test does."""
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


def start_probe(loop: Loop, port: int) -> list[bool]:
    """Start a probe; its result will be in the list."""
    results: list[bool] = []
    Probe(loop, (socket.AF_INET, "127.0.0.1"), port, results.append)
    return results


def turn_until(loop: Loop, condition: Callable[[], object]) -> None:
    end_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end_s
        loop.turn(0.005)


def has_connection(server: socket.socket) -> bool:
    """True when a connection waits in the backlog."""
    return bool(select.select([server], [], [], 0)[0])


def test_no_listener(loop: Loop, server: socket.socket) -> None:
    port = server.getsockname()[1]
    server.close()
    results = start_probe(loop, port)
    turn_until(loop, lambda: results)
    assert results == [True]


def test_a_listener_that_closes_after_the_dial(loop: Loop, server: socket.socket) -> None:
    """The process is ending: the kernel has accepted the connection, the process never will."""
    results = start_probe(loop, server.getsockname()[1])
    turn_until(loop, lambda: has_connection(server))
    server.close()
    turn_until(loop, lambda: results)
    assert results == [True]


def test_a_listener_that_sends_data(loop: Loop, server: socket.socket) -> None:
    results = start_probe(loop, server.getsockname()[1])
    turn_until(loop, lambda: has_connection(server))
    with server.accept()[0] as accepted:
        accepted.sendall(b"x")
        turn_until(loop, lambda: results)
    assert results == [False]


def test_a_listener_that_closes_the_connection_and_listens_on(loop: Loop, server: socket.socket) -> None:
    results: list[bool] = []
    probe = Probe(loop, (socket.AF_INET, "127.0.0.1"), server.getsockname()[1], results.append)
    for _ in range(3):
        turn_until(loop, lambda: has_connection(server))
        server.accept()[0].close()
    assert not results
    probe.close()


def test_no_answer_in_time(loop: Loop, server: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_module, "LIMIT_S", 0.05)
    results = start_probe(loop, server.getsockname()[1])
    turn_until(loop, lambda: results)
    assert results == [False]


def test_closed_before_a_result(loop: Loop, server: socket.socket) -> None:
    results: list[bool] = []
    probe = Probe(loop, (socket.AF_INET, "127.0.0.1"), server.getsockname()[1], results.append)
    turn_until(loop, lambda: has_connection(server))
    probe.close()
    server.close()
    loop.turn(0.0)
    assert not results
