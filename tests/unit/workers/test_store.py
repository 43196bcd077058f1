"""What the store's process says about workers that connect to it again."""

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from muster.agent.workers.warm import store

WORKERS = 2


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int, bytes], bytes]]:
    """Watch a store that counts `connected` clients while the agent sends `words`; what the agent receives."""
    monkeypatch.setattr(store, "_POLL_S", 3600.0)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve(connected: int) -> None:
            client, _address = listener.accept()
            with client, client.makefile("rb") as requests:
                requests.read(len(store._VALIDATE))
                while requests.read(len(store._COUNT)):
                    client.sendall(struct.pack("=q", connected))

        def run(connected: int, words: bytes) -> bytes:
            thread = threading.Thread(target=serve, args=(connected,), daemon=True)
            thread.start()
            agent, control = socket.socketpair()
            with closing(agent):
                with closing(control):
                    agent.sendall(words)
                    agent.shutdown(socket.SHUT_WR)
                    store._watch(control, listener.getsockname(), WORKERS)
                thread.join()
                return agent.recv(16)

        yield run


def test_workers_that_connect_again_are_told_of_at_once_when_the_agent_asks(
    watch: Callable[[int, bytes], bytes],
) -> None:
    """The job may fail of it long before the next look."""
    assert watch(WORKERS + 1, b"?") == b"!"


def test_no_more_clients_than_workers_are_nothing_to_tell_of(watch: Callable[[int, bytes], bytes]) -> None:
    assert watch(WORKERS, b"???") == b""


def test_without_a_question_nothing_is_looked_at(watch: Callable[[int, bytes], bytes]) -> None:
    assert watch(WORKERS + 1, b"") == b""
