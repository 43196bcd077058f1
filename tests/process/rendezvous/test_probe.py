"""Has a process ended? What its address says, over real sockets on loopback."""

import select
import socket
import time
from collections.abc import Callable, Iterator

import pytest

from muster.agent.rendezvous.transport import probe as probe_module
from muster.agent.rendezvous.transport.probe import Probe
from muster.agent.runtime.loop import Loop

LIMIT_S = 30.0


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.close()


@pytest.fixture
def server() -> Iterator[socket.socket]:
    """Listens; accepts nobody by itself."""
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


def begin(loop: Loop, port: int) -> list[bool]:
    """Start a probe; its result will be in the list."""
    results: list[bool] = []
    Probe(loop, (socket.AF_INET, "127.0.0.1"), port, results.append)
    return results


def turn_until(loop: Loop, condition: Callable[[], object]) -> None:
    end_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end_s
        loop.turn(0.005)


def has_caller(server: socket.socket) -> bool:
    """Somebody is in the backlog."""
    return bool(select.select([server], [], [], 0)[0])


def test_nobody_listens(loop: Loop, server: socket.socket) -> None:
    port = server.getsockname()[1]
    server.close()
    results = begin(loop, port)
    turn_until(loop, lambda: results)
    assert results == [True]


def test_a_listener_that_goes_after_the_dial(loop: Loop, server: socket.socket) -> None:
    """A process in the middle of dying: the kernel has accepted, nobody ever will."""
    results = begin(loop, server.getsockname()[1])
    turn_until(loop, lambda: has_caller(server))
    server.close()
    turn_until(loop, lambda: results)
    assert results == [True]


def test_somebody_speaks(loop: Loop, server: socket.socket) -> None:
    results = begin(loop, server.getsockname()[1])
    turn_until(loop, lambda: has_caller(server))
    with server.accept()[0] as accepted:
        accepted.sendall(b"x")
        turn_until(loop, lambda: results)
    assert results == [False]


def test_somebody_hangs_up_and_listens_on(loop: Loop, server: socket.socket) -> None:
    results: list[bool] = []
    probe = Probe(loop, (socket.AF_INET, "127.0.0.1"), server.getsockname()[1], results.append)
    for _ in range(3):
        turn_until(loop, lambda: has_caller(server))
        server.accept()[0].close()
    assert not results
    probe.close()


def test_nobody_answers_in_time(loop: Loop, server: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_module, "LIMIT_S", 0.05)
    results = begin(loop, server.getsockname()[1])
    turn_until(loop, lambda: results)
    assert results == [False]


def test_closed_before_it_knows(loop: Loop, server: socket.socket) -> None:
    results: list[bool] = []
    probe = Probe(loop, (socket.AF_INET, "127.0.0.1"), server.getsockname()[1], results.append)
    turn_until(loop, lambda: has_caller(server))
    probe.close()
    server.close()
    loop.turn(0.0)
    assert not results
