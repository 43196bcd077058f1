"""What any process that can reach the port may do to a job: over real sockets, with a clock that the test moves."""

import contextlib
import json
import os
import resource
import socket
import struct
from collections.abc import Iterator
from typing import Any

import pytest
from doubles.rendezvous_links import StandingClock
from harness import find_free_port
from rendezvous_nodes import Node

from muster._shared.contract import FORMAT
from muster.agent.rendezvous.interface import BreakKind, Notice, RendezvousFailed, RoundBroken, RoundFormed
from muster.agent.rendezvous.protocol.framing import UNAUTHENTICATED_LIMIT_BYTES
from muster.agent.rendezvous.transport import addresses
from muster.agent.rendezvous.transport import tcp_network as network_module
from muster.agent.rendezvous.transport.links import Cause, LinkEnd
from muster.agent.rendezvous.transport.tcp_network import UNAUTHENTICATED_LIMIT_S, TcpListener, TcpNetwork
from muster.agent.runtime.loop import Loop

HELLO = {"hello": FORMAT, "auth": False, "nonce": "00"}
QUERY = {"type": "LeaderQuery", "run_id": "run"}


def build_frame(message: dict[str, Any]) -> bytes:
    payload = json.dumps(message).encode()
    return struct.pack(">I", len(payload)) + payload


class Job(Node):
    """One node that leads and waits for another, in this process; time passes only in `pass_time`."""

    def __init__(self, index: int = 0, **changes: Any) -> None:
        self.clock = StandingClock()
        # Without a token: all these peers are unauthenticated, and the file of this user's own is not used.
        super().__init__(index, **{"port": find_free_port(), "clock": self.clock, "token": "", **changes})
        self.sockets = contextlib.ExitStack()

    def turn(self, often: int = 20) -> None:
        for _ in range(often):
            self.loop.turn(0.002)

    def pass_time(self, seconds: float) -> None:
        """In small steps, so that timers run in order."""
        for _ in range(int(seconds * 10)):
            self.clock.passed_s += 0.1
            self.turn(1)
        self.turn()

    def connect(self, *messages: dict[str, Any]) -> socket.socket:
        sock = self.sockets.enter_context(socket.create_connection(("127.0.0.1", self.port)))
        sock.setblocking(False)
        for message in messages:
            sock.sendall(build_frame(message))
        self.turn()
        return sock

    def close(self) -> None:
        self.sockets.close()
        super().close()


@pytest.fixture
def job() -> Iterator[Job]:
    made = Job()
    made.member.join()
    made.turn()
    yield made
    made.close()


@contextlib.contextmanager
def open_pair(**changes: Any) -> Iterator[tuple[Job, Job]]:
    """Two nodes with one clock, which join."""
    with contextlib.ExitStack() as stack:
        one = Job(**changes)
        stack.callback(one.close)
        two = Job(1, port=one.port, clock=one.clock, **changes)
        stack.callback(two.close)
        for each in (one, two):
            each.member.join()
        yield one, two


def turn_both(pair: tuple[Job, Job], often: int, step_s: float) -> None:
    for _ in range(often):
        for each in pair:
            each.turn(1)
        pair[0].clock.passed_s += step_s


def receive(sock: socket.socket) -> bytes | None:
    """What has arrived; empty when the other side has closed, None when nothing has."""
    try:
        return sock.recv(1 << 16)
    except BlockingIOError:
        return None
    except ConnectionResetError:
        return b""


def test_an_unauthenticated_peer_that_asks_again_and_again_is_closed_at_its_deadline(job: Job) -> None:
    peer = job.connect(HELLO, QUERY)
    assert b"QueryReply" in (receive(peer) or b"")
    for _ in range(int(UNAUTHENTICATED_LIMIT_S) - 1):
        job.pass_time(1.0)
        peer.sendall(build_frame(QUERY))
        job.turn()
        assert b"QueryReply" in (receive(peer) or b"")
    job.pass_time(2.0)
    assert receive(peer) == b""


@pytest.mark.parametrize("said", [(), (HELLO, QUERY)], ids=["silent", "asked a valid question"])
def test_unauthenticated_peers_are_limited_and_another_node_can_join(
    job: Job, said: tuple[dict[str, Any], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network_module, "UNAUTHENTICATED_LIMIT", 10)
    peers = [job.connect(*said) for _ in range(25)]
    assert all(b"QueryReply" in (receive(peer) or b"") for peer in peers) == bool(said)
    job.turn()
    assert [receive(peer) for peer in peers] == [b""] * 15 + [None] * 10
    with contextlib.closing(Job(1, port=job.port, clock=job.clock)) as other:
        other.member.join()
        turn_both((job, other), 300, 0.01)
        assert other.find(RoundFormed)


def test_an_unauthenticated_peer_may_not_send_long_frames(job: Job) -> None:
    peer = job.connect(HELLO, QUERY)
    assert b"QueryReply" in (receive(peer) or b"")
    peer.sendall(struct.pack(">I", UNAUTHENTICATED_LIMIT_BYTES + 1) + b'{"type":"LeaderQuery"')
    job.turn()
    assert receive(peer) == b""


def test_a_member_stays_beyond_the_deadline_of_unauthenticated_peers() -> None:
    with open_pair() as pair:
        turn_both(pair, 300, 0.01)
        assert all(each.find(RoundFormed) for each in pair)
        turn_both(pair, int(UNAUTHENTICATED_LIMIT_S * 20), 0.1)
        assert [type(event) for event in pair[1].events] == [RoundFormed]


def test_a_node_that_searches_for_long_connects_again_before_it_is_closed() -> None:
    """The other node knows no leader: one that asks it is a peer for as long as it asks."""
    loop = Loop(StandingClock())  # type: ignore[arg-type]
    network = TcpNetwork(loop, None)
    links: list[Any] = []

    class Owner:
        def on_message(self, link: Any, frame: Any) -> None:
            from muster.agent.rendezvous.protocol.messages import Goodbye

            link.send(Goodbye(reason="a message of no use to the search, but an answer"))

        def on_closed(self, link: Any, end: LinkEnd) -> None:
            ends.append(end)

    ends: list[LinkEnd] = []

    def on_link(link: Any, frame: Any) -> None:
        link.owner = Owner()
        links.append(link)
        link.owner.on_message(link, frame)

    listener = network.listen("127.0.0.1", 0, on_link)
    searching = Job(1, port=listener.port, join_timeout_s=1000.0)
    searching.member.join()
    try:
        for _ in range(400):
            searching.clock.passed_s += 0.1
            loop.clock.passed_s += 0.1  # type: ignore[attr-defined]
            searching.turn(1)
            loop.turn(0)
        assert len(links) > 3
        assert {end.reason for end in ends} == {"connection closed"}  # by the node that searches
    finally:
        searching.close()
        for link in links:
            link.close()
        network.close()
        listener.close()
        loop.close()


@contextlib.contextmanager
def without_descriptors() -> Iterator[None]:
    """Nothing can be opened inside."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    fillers = []
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, hard))
    try:
        while True:
            try:
                fillers.append(os.dup(0))
            except OSError:
                break
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in fillers:
            os.close(descriptor)


def test_a_listener_without_descriptors_pauses_and_accepts_later(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    on_readable = TcpListener._on_readable
    monkeypatch.setattr(TcpListener, "_on_readable", lambda self: (calls.append(1), on_readable(self)))
    clock = StandingClock()
    loop = Loop(clock)  # type: ignore[arg-type]
    network = TcpNetwork(loop, None)
    links: list[Any] = []
    listener = network.listen("127.0.0.1", 0, lambda link, _frame: links.append(link))
    client = socket.socket()
    try:
        client.connect(("127.0.0.1", listener.port))
        client.sendall(build_frame(HELLO) + build_frame(QUERY))
        with without_descriptors():
            for _ in range(200):
                loop.turn(0)
            assert len(calls) == 1
            clock.passed_s += network_module.ACCEPT_PAUSE_S
            for _ in range(200):
                loop.turn(0)
            assert len(calls) == 2
        clock.passed_s += network_module.ACCEPT_PAUSE_S
        for _ in range(20):
            loop.turn(0.002)
        assert len(links) == 1
    finally:
        client.close()
        listener.close()
        for link in links:
            link.close()
        network.close()
        loop.close()


def test_without_descriptors_the_oldest_unauthenticated_peer_makes_room_for_a_node(job: Job) -> None:
    peer = job.connect(HELLO, QUERY)
    assert b"QueryReply" in (receive(peer) or b"")
    client = socket.socket()
    with without_descriptors():
        client.connect(("127.0.0.1", job.port))
        client.sendall(build_frame(HELLO) + build_frame(QUERY))
        job.turn()
        client.setblocking(False)
        assert b"QueryReply" in (receive(client) or b"")
        assert receive(peer) == b""
    client.close()


# -- names --------------------------------------------------------------------------------------------------------


def test_nodes_find_each_other_over_a_host_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is resolved in a thread."""
    monkeypatch.setattr(addresses, "resolve", lambda host: [(int(socket.AF_INET), "127.0.0.1")])
    with open_pair(host="a-name") as (one, two):
        for _ in range(500):
            turn_both((one, two), 1, 0.01)
            if one.find(RoundFormed) and two.find(RoundFormed):
                break
        assert two.find(RoundFormed)
        one.member.close()
        two.turn(50)
        assert two.find(RoundBroken).kind is BreakKind.FENCED
        assert two.member.state.recovery.record.quorum_rounds[0].ended == {0}  # a dial proved the leader's end


def fail_to_resolve(host: str) -> list[tuple[int, str]]:
    raise RuntimeError("the resolver has a bug")


def test_a_refusal_is_named_at_the_end_although_the_last_attempt_found_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([fail_to_resolve])

    def resolve(host: str) -> list[tuple[int, str]]:
        return next(answers, lambda _: [(socket.AF_INET, "127.0.0.1")])(host)

    monkeypatch.setattr(addresses, "resolve", resolve)
    node = Job(1, host="a-name", join_timeout_s=5.0)
    try:
        node.member.join()
        for _ in range(100):
            node.turn(10)
            node.pass_time(0.1)
        assert next(answers, None) is None
        assert "has a bug" in node.find(RendezvousFailed).reason
    finally:
        node.close()


def test_an_error_of_the_resolver_becomes_a_line_at_once_and_the_reason_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(addresses, "resolve", fail_to_resolve)
    node = Job(1, host="a-name", join_timeout_s=5.0)
    try:
        node.member.join()
        for _ in range(50):
            node.turn(10)
            if node.find(Notice):
                break
        line = "'a-name': RuntimeError: "
        assert f"a-name:{node.port}: cannot resolve {line}" in node.find(Notice).text
        for _ in range(60):
            node.pass_time(0.1)
        assert line in node.find(RendezvousFailed).reason
        assert len([notice for notice in node.list_notices() if notice.startswith("cannot join")]) == 1
    finally:
        node.close()


def test_a_resolver_that_cannot_start_answers_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_args: object) -> None:
        raise RuntimeError("can't start")

    loop = Loop()
    network = TcpNetwork(loop, None)
    ends: list[LinkEnd] = []
    local: list[bool] = []
    monkeypatch.setattr("threading.Thread.start", fail)
    network.connect("a-name", 1, lambda link: None, ends.append, 5.0)
    network.check_local("a-name", local.append)
    loop.turn(0)
    monkeypatch.undo()
    assert [end.cause for end in ends] == [Cause.FAULT]
    assert "can't start" in ends[0].reason
    assert local == [False]
    network.close()
    loop.close()
