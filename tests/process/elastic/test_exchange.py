"""Results between the programs of two nodes, here two threads of one process."""

import hashlib
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress

import pytest
from doubles.clocks import HandClock
from harness import LIMIT_S, find_free_port

from muster.agent.rendezvous.protocol.handshake import Codec
from muster.elastic import ResultsMissing
from muster.elastic.jobs import exchange
from muster.elastic.jobs.exchange import exchange_results
from muster.elastic.jobs.results import RoundPosition, close_fds

LARGE = os.urandom(1 << 10) * (3 << 10)


@pytest.fixture
def port() -> int:
    return find_free_port()


def build_place(node: int, port: int, nodes: int = 2) -> RoundPosition:
    return RoundPosition(
        number=3, node=node, nodes=nodes, world_size=2 * nodes, master_addr="127.0.0.1", master_port=port
    )


def make_file(data: bytes) -> int:
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.flush()
        return os.dup(file.fileno())


def read(gathered: dict[int, int]) -> dict[int, bytes | None]:
    found = {rank: None if fd < 0 else os.pread(fd, os.fstat(fd).st_size, 0) for rank, fd in sorted(gathered.items())}
    close_fds(gathered.values())
    return found


def run_node(node: int, port: int, *, token: str = "secret", nodes: int = 2) -> "dict[int, bytes | None] | str":
    own = {2 * node: make_file(b"small %d" % node), 2 * node + 1: make_file(LARGE) if node else -1}
    try:
        return read(exchange_results(build_place(node, port, nodes), own, token))
    except ResultsMissing as error:
        return str(error)
    finally:
        close_fds(own.values())


def run_all(*calls: Callable[[], object]) -> list[object]:
    found: list[object] = [None] * len(calls)

    def run(at: int) -> None:
        found[at] = calls[at]()

    threads = [threading.Thread(target=run, args=(at,)) for at in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_every_program_gets_every_result(port: int) -> None:
    found = run_all(*(lambda node=node: run_node(node, port, nodes=3) for node in range(3)))  # type: ignore[misc]
    values = {0: b"small 0", 1: None, 2: b"small 1", 3: LARGE, 4: b"small 2", 5: LARGE}
    assert found == [{rank: value for rank, value in values.items() if rank // 2 != node} for node in range(3)]


def send_noise(port: int, connected: threading.Event, done: threading.Event) -> None:
    """One stranger after the other sends what is no message."""
    while not done.is_set():
        try:
            with socket.create_connection(("127.0.0.1", port), 5) as stranger:
                connected.set()
                stranger.sendall(os.urandom(200))
                stranger.settimeout(0.05)
                stranger.recv(100)
        except OSError:
            done.wait(0.01)


def be_silent(port: int, connected: threading.Event, done: threading.Event) -> None:
    """Eight strangers say nothing, and one sends a byte now and then."""
    with ExitStack() as stack:
        strangers = [stack.enter_context(connect(port)) for _ in range(9)]
        connected.set()
        while not done.wait(0.05):
            with suppress(OSError):  # the oldest ones are closed
                strangers[-1].send(b"x")


@pytest.mark.parametrize(("disturb", "most"), [(send_noise, 64), (be_silent, 4), (be_silent, 64)])
def test_connections_that_prove_nothing_change_nothing_and_keep_no_program_waiting(
    port: int, monkeypatch: pytest.MonkeyPatch, disturb: Callable[..., None], most: int
) -> None:
    """Any process can connect, and be there first."""
    monkeypatch.setattr(exchange, "_MEETING_LIMIT_S", 5.0)
    monkeypatch.setattr(exchange, "_STRANGERS", most)
    connected, done = threading.Event(), threading.Event()

    def run_late() -> object:
        connected.wait(LIMIT_S)
        try:
            return run_node(1, port)
        finally:
            done.set()

    first, second, _ = run_all(lambda: run_node(0, port), run_late, lambda: disturb(port, connected, done))
    assert first == {2: b"small 1", 3: LARGE}
    assert second == {0: b"small 0", 1: None}


def test_an_answer_that_comes_byte_by_byte_has_one_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = HandClock()
    parts = (bytes([byte]) for byte in (1000).to_bytes(4, "big") + b"x" * 1000)

    class Dripping:
        limit_s = 0.0

        def settimeout(self, limit_s: float) -> None:
            self.limit_s = limit_s

        def recv(self, _size: int) -> bytes:
            clock.at_s += 1.0
            if self.limit_s < 1.0:
                raise TimeoutError
            return next(parts)

    monkeypatch.setattr(exchange.time, "monotonic", clock.now_s)
    with pytest.raises(TimeoutError):
        exchange._shake_hands(Dripping(), Codec("key", is_server=False, write=lambda _: None))  # type: ignore[arg-type]


def test_a_result_that_was_changed_on_its_way_is_not_kept() -> None:
    """Results are unpickled."""

    class Changed:
        frames = iter(({"rank": 0, "size": 3}, {"digest": hashlib.sha256(b"abc").hexdigest()}))

        def receive(self) -> object:
            return next(self.frames)

        def receive_raw(self, into: memoryview) -> None:
            into[:] = b"xyz"

    gathered: dict[int, int] = {}
    with pytest.raises(ConnectionError, match="changed on"):
        exchange._receive_results(Changed(), gathered)  # type: ignore[arg-type]
    assert gathered == {}


def connect(port: int) -> socket.socket:
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), 5)
        except ConnectionRefusedError:
            time.sleep(0.01)


def test_another_token_is_refused(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "_MEETING_LIMIT_S", 3.0)
    first, second = run_all(lambda: run_node(0, port), lambda: run_node(1, port, token="another"))
    assert "ranks 2, 3 " in first
    assert "job token" in first
    assert isinstance(second, str)
    assert f"127.0.0.1:{port} within 3 s" in second


def test_a_program_that_is_gone_is_named(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "_MEETING_LIMIT_S", 1.0)
    assert "ranks 2, 3 did" in run_node(0, port)
    assert f"127.0.0.1:{port} within 1 s: " in run_node(1, port)


def test_the_others_get_what_came_when_one_is_gone(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "_MEETING_LIMIT_S", 3.0)
    first, second = run_all(lambda: run_node(0, port, nodes=3), lambda: run_node(1, port, nodes=3))
    text = "ranks 4, 5 did"
    assert (text in first, second) == (True, first)
