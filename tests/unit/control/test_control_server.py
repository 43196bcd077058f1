"""The agent's socket for persons' requests: connections that come to nothing cost nothing."""

import os
import socket
import sys

import pytest

from muster.agent.control import address
from muster.agent.control.server import PEERS, ControlServer
from muster.agent.runtime.loop import Loop

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="abstract names of sockets")

TOKEN = "test-control-server"


class Agent:
    """A server on its loop, and what was asked."""

    def __init__(self) -> None:
        self.loop = Loop()
        self.asked = []
        self.server = ControlServer(self.loop, TOKEN, lambda *request: self.asked.append(request))

    def connect(self) -> socket.socket:
        link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        link.connect(address.build_address(TOKEN, os.getpid()))
        link.settimeout(10.0)
        return link

    def turn(self) -> None:
        for _ in range(3):
            self.loop.call_soon(lambda: None)
            self.loop.turn()

    def close(self) -> None:
        self.server.close()
        self.loop.close()


@pytest.fixture
def agent():
    made = Agent()
    yield made
    made.close()


def test_those_that_have_gone_before_the_greeting_take_no_place(agent):
    """As they do while the job is suspended, when its agents greet nobody."""
    for _ in range(PEERS + 1):
        agent.connect().close()
        agent.turn()
    with agent.connect() as link:
        agent.turn()
        assert b"nonce" in link.recv(4096)


@pytest.mark.parametrize("line", [b"[" * 4000, b"\xff", b'{"kind":"stop","limit_s":5.0,"signature":"\\ud800"}'])
def test_what_is_no_request_is_refused(agent, line):
    with agent.connect() as link:
        link.sendall(line + b"\n")
        agent.turn()
        answer = b""
        while part := link.recv(4096):
            answer += part
        assert b'"refused"' in answer
    assert agent.asked == []


def test_without_abstract_names_there_are_no_agents(monkeypatch, tmp_path):
    monkeypatch.setattr(address, "_SOCKETS", str(tmp_path / "none"))
    assert address.list_addresses(TOKEN) == []
