"""The agent's socket for persons' requests: connections that come to nothing cost nothing."""

import contextlib
import errno
import json
import os
import socket
import sys
import threading
import time

import pytest

from muster._shared.codec import encode
from muster._shared.contract import AskKind, AskOutcome
from muster._shared.control import NO_AGENT, SILENT, parse_answer
from muster._shared.reports import Answer, Stack
from muster.agent.control import address, client
from muster.agent.control.address import SignedRequest
from muster.agent.control.server import ANSWER_LIMIT_S, FLUSH_S, PEERS, ControlServer
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
        link.connect(address.list_addresses(TOKEN)[0])
        link.settimeout(10.0)
        return link

    def turn(self) -> None:
        for _ in range(3):
            self.loop.call_soon(lambda: None)
            self.loop.turn()

    def ask(self, link: socket.socket) -> None:
        """Ask for a checkpoint, as a person does."""
        self.turn()
        nonce = json.loads(link.recv(4096))["nonce"]
        kind, limit_s = AskKind.CHECKPOINT, 5.0
        request = SignedRequest(kind=kind, limit_s=limit_s, signature=address.sign(TOKEN, nonce, kind, limit_s))
        link.sendall(encode(request, 4096).encode() + b"\n")
        self.turn()

    def close(self) -> None:
        self.server.close()
        self.loop.close()


class StandingClock:
    """Only limits and tests let its time pass."""

    def __init__(self) -> None:
        self.seconds = time.monotonic()

    def now_s(self) -> float:
        return self.seconds

    @property
    def pass_limit(self):
        """What to call instead of `settimeout`: the whole limit passes, at once."""
        set_blocking = socket.socket.setblocking

        def pass_limit(link: socket.socket, limit_s: float) -> None:
            self.seconds += limit_s
            set_blocking(link, False)

        return pass_limit


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
        assert b'"unreached"' in answer
    assert agent.asked == []


def test_peers_that_do_not_read_share_one_limit_at_the_end(agent, monkeypatch):
    """The end runs on the loop. Those that read get their answers all the same."""
    stacks = tuple(Stack(global_rank=rank, node=0, local_rank=rank, text="x" * 60_000) for rank in range(64))
    with contextlib.ExitStack() as opened:
        links = [opened.enter_context(agent.connect()) for _ in range(4)]
        for link in links:
            agent.ask(link)
        agent.server.answer((1, 2, 3), Answer(outcome=AskOutcome.DONE, line="here they are", stacks=stacks))
        clock = agent.loop.clock = StandingClock()
        began_s = clock.seconds
        monkeypatch.setattr(socket.socket, "settimeout", clock.pass_limit)
        agent.server.close()
        monkeypatch.undo()
        assert clock.seconds - began_s <= FLUSH_S
        assert b"the agent that was asked has ended" in links[3].recv(4096)


def test_an_answer_that_is_being_read_at_the_end_is_read_whole(agent, monkeypatch):
    stacks = tuple(Stack(global_rank=rank, node=0, local_rank=rank, text="x" * 60_000) for rank in range(64))
    with agent.connect() as link:
        agent.ask(link)
        agent.server.answer((1,), Answer(outcome=AskOutcome.DONE, line="here they are", stacks=stacks))
        lines = []
        reader = threading.Thread(target=lambda: lines.extend(link.makefile("rb")), daemon=True)
        reader.start()
        monkeypatch.setattr(
            socket.socket, "settimeout", lambda link, _: link.setblocking(True)
        )  # the limit is no matter
        agent.server.close()
        monkeypatch.undo()
        reader.join()
    assert len(json.loads(lines[-1])["stacks"]) == 64


def test_a_peer_that_does_not_read_its_answer_keeps_no_place(agent):
    stacks = tuple(Stack(global_rank=rank, node=0, local_rank=rank, text="x" * 60_000) for rank in range(64))
    clock = agent.loop.clock = StandingClock()
    with agent.connect() as link:
        agent.ask(link)
        agent.server.answer((1,), Answer(outcome=AskOutcome.DONE, line="here they are", stacks=stacks))
        clock.seconds += ANSWER_LIMIT_S + 1.0
        agent.turn()
        assert not agent.server._peers


def test_without_a_descriptor_left_the_agent_does_not_spin(agent, monkeypatch):
    clock = agent.loop.clock = StandingClock()
    tried = []

    def accept(_):
        tried.append(1)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with agent.connect() as link:
        with monkeypatch.context() as patch:
            patch.setattr(socket.socket, "accept", accept)
            agent.turn()
        assert len(tried) == 1
        clock.seconds += 1.0
        agent.turn()
        assert b"nonce" in link.recv(4096)


def test_an_agent_that_is_reached_answers_itself(capsys, monkeypatch):
    """One that is stopped does not greet: that differs from a job of which no agent is here."""
    monkeypatch.setenv("MUSTER_TOKEN", TOKEN)
    monkeypatch.setattr(client, "GREETING_S", 0.2)
    assert client.main(["reach"]) == NO_AGENT
    with contextlib.closing(Agent()) as agent:
        assert client.main(["reach"]) == SILENT
        thread = threading.Thread(target=lambda: [agent.turn() or time.sleep(0.01) for _ in range(100)])
        thread.start()
        monkeypatch.setattr(client, "GREETING_S", 10.0)
        assert client.main(["reach"]) == 0
        thread.join()
        assert (agent.asked, parse_answer(capsys.readouterr().out).outcome) == ([], AskOutcome.DONE)


def test_without_abstract_names_there_are_no_agents(monkeypatch, tmp_path):
    monkeypatch.setattr(address, "_SOCKETS", str(tmp_path / "none"))
    assert address.list_addresses(TOKEN) == []


def test_the_name_of_an_agents_socket_says_nothing_of_the_token():
    """Two agents of a job had one name but for the process, which a guess of the token could be compared with."""
    agents = [Agent(), Agent()]
    names = address.list_addresses(TOKEN)
    assert len(names) == 2
    first, second = (name.split(b"-") for name in names)
    assert first[:2] == second[:2] == [b"\0muster", b"control"]
    assert not set(first[2:4]) & set(second[2:4])
    assert address.list_addresses(f"{TOKEN}x") == []
    for agent in agents:
        agent.close()


def test_names_of_other_users_sockets_hide_no_agent():
    """Any user can give a socket a name with blanks and line feeds: its lines in the list are not as others are."""
    with contextlib.ExitStack() as stack:
        for name in (b"\0\n\n", b"\0 ", b"\0a b\n c", b"\0\xff\n", b"\0@muster-control-\n"):
            stack.enter_context(socket.socket(socket.AF_UNIX)).bind(name + os.urandom(8).hex().encode() + b"\n\n")
        with socket.socket(socket.AF_UNIX) as agent:
            agent.bind(address.build_address(TOKEN, 7))
            assert address.list_addresses(TOKEN) == [agent.getsockname()]
