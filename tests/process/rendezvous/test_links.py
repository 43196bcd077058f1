"""Members and leader over real sockets on loopback: forming, authentication, unknown connections, ports."""

import errno
import socket

import pytest
from rendezvous_nodes import wait_for, wait_for_each

from muster.agent.rendezvous.interface import AllSucceeded, JobEnded, Notice, RendezvousFailed, RoundBroken, RoundFormed
from muster.agent.rendezvous.leader.newcomers import UNPROVED
from muster.agent.rendezvous.protocol.framing import ProtocolError
from muster.agent.rendezvous.protocol.messages import LeaderQuery
from muster.agent.rendezvous.report_messages import Stopped
from muster.agent.rendezvous.transport import tcp_network as network_module
from muster.agent.rendezvous.transport.tcp_network import TcpNetwork
from muster.agent.runtime.loop import Loop
from muster.agent.runtime.ports import PortReservation

NO_TOKEN = (
    "has no MUSTER_TOKEN: any process that reaches it can join this job and run code in it; set one on all nodes, made "
    "with `openssl rand -hex 32`"
)


@pytest.fixture
def without_file(tmp_path, monkeypatch) -> None:
    """No token can be kept for this user's agents."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))


@pytest.mark.parametrize("token", [None, "secret"])
@pytest.mark.parametrize("indices", [(0, 1), (None, None)])
def test_two_nodes_form_restart_and_end(start, token, indices) -> None:
    two = start(indices[1], token=token)
    two.loop.turn(0.005)
    one = start(indices[0], token=token)
    nodes = (one, two)
    wait_for_each(RoundFormed, *nodes)
    rounds = [node.find(RoundFormed).round for node in nodes]
    assert {r.group_rank for r in rounds} == {0, 1}
    assert {(r.world_size, r.master_addr, r.master_port) for r in rounds} == {(4, "127.0.0.1", rounds[0].master_port)}
    first_port = rounds[0].master_port
    two.member.send(Stopped(round_number=1))
    wait_for(lambda: one.find(RoundBroken), one, two)
    one.member.send(Stopped(round_number=1))
    wait_for(lambda: all(node.find(RoundFormed).round.number == 2 for node in nodes), one, two)
    assert one.find(RoundFormed).round.master_port != first_port
    for node in nodes:
        node.member.send(AllSucceeded(round_number=2))
    wait_for_each(JobEnded, *nodes)
    assert one.find(JobEnded).succeeded


def test_without_token_on_the_network_there_is_a_warning(start, port) -> None:
    one = start(0, host=socket.gethostname())
    wait_for(lambda: one.find(Notice), one)
    assert one.list_notices() == [f"rendezvous at {socket.gethostname()}:{port} {NO_TOKEN}"]


def test_without_token_on_this_machine_there_is_a_warning(start, port, without_file) -> None:
    one = start(0)
    reason, line = one.list_notices()
    assert reason.startswith("no token for ")
    assert line == f"rendezvous at 127.0.0.1:{port} {NO_TOKEN}"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"run_id": "other"}, "it asks for run 'other', and this is run 'run' (--rdzv-id)"),
        ({"max_restarts": 3}, "it was started with --max-restarts 3 (the job: 1); all agents of a job must"),
        ({"node_index": 0}, "node rank 0 is already taken by host-0: every node needs its own --node-rank"),
    ],
    ids=["run id", "rules", "index"],
)
def test_a_refusal_tells_nothing_to_a_node_without_the_token(start, port, without_file, changes, why) -> None:
    """It told any peer the run id, which rules differ, and the names of hosts. Node 0's own console has the reason."""
    one, other = start(0), start(1, **changes)
    wait_for(lambda: other.find(RendezvousFailed), one, other)
    assert other.find(RendezvousFailed).reason == UNPROVED
    assert "use another port" in UNPROVED, "it may be the leader of another job"
    assert why in one.list_notices()[-1]


def test_ipv6(start, port) -> None:
    try:
        socket.create_server(("::1", port), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 on this machine")
    one, two = start(0, host="::1", token="t"), start(1, host="::1", token="t")
    wait_for_each(RoundFormed, one, two)


def test_no_leader_is_one_clear_line(start, port) -> None:
    one = start(1, host="no-such-host.invalid", join_timeout_s=0.5)
    wait_for(lambda: one.find(RendezvousFailed), one)
    reason = one.find(RendezvousFailed).reason
    assert f"no-such-host.invalid:{port} within 0.5 s" in reason
    assert "does not resolve" in reason


@pytest.mark.parametrize("index", [0, 1])
def test_a_node_whose_index_is_taken_is_refused_at_once_and_node_0_says_so(start, index) -> None:
    """The leader's own node sends no heartbeats over a link: its index was claimed until the join timeout."""
    how = {"token": "right", "keep_alive_interval_s": 0.2}
    nodes = [start(each, **how) for each in range(index + 1)]
    if index:
        wait_for_each(RoundFormed, *nodes)
    twin = start(index, **how)
    wait_for(lambda: twin.find(RendezvousFailed), *nodes, twin)
    failed = twin.find(RendezvousFailed)
    assert failed.usage
    assert f"already taken by host-{index}" in failed.reason
    [notice] = nodes[0].list_notices()
    assert notice.endswith(f"(host-{index}) at 127.0.0.1: {failed.reason}")


OTHER_TOKEN = "the other node has a different job token (MUSTER_TOKEN)"
OTHER_RUN = "it asks for run 'other', and this is run 'run' (--rdzv-id)"


@pytest.mark.parametrize(
    ("tokens", "run_id", "line", "told"),
    [
        (("right", "wrong"), "run", OTHER_TOKEN, "MUSTER_TOKEN"),
        (("right", None), "run", OTHER_TOKEN, "MUSTER_TOKEN"),
        (
            ("right", ""),
            "run",
            "one of the two nodes has a job token (MUSTER_TOKEN), the other has none",
            "MUSTER_TOKEN",
        ),
        ((None, "wrong"), "run", OTHER_TOKEN, "MUSTER_TOKEN"),
        (("right", "right"), "other", OTHER_RUN, "'run', not 'other'"),
        ((None, None), "other", OTHER_RUN, "'run', not 'other'"),
    ],
)
def test_node_0_says_once_who_was_refused_and_why(start, tokens, run_id, line, told) -> None:
    """A node that has another token tries again until its join timeout."""
    one = start(0, token=tokens[0])
    other = start(1, token=tokens[1], run_id=run_id, join_timeout_s=1.5)
    wait_for(lambda: other.find(RendezvousFailed), one, other)
    assert [f"127.0.0.1: {line}" in each for each in one.list_notices()] == [True]
    assert told in other.find(RendezvousFailed).reason
    assert one.find(RoundFormed) is None
    assert not any(token and token in str(one.events) for token in tokens)


GARBAGE = (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x80\x04\x95" * 40, b"\x00\x00\x00\x05[1,2]", b"\xff" * 64)


def test_garbage_and_silent_connections_do_no_harm(start, port, monkeypatch) -> None:
    monkeypatch.setattr(network_module, "UNAUTHENTICATED_LIMIT_S", 0.3)
    one = start(0)
    one.loop.turn(0.005)
    connections = [socket.create_connection(("127.0.0.1", port)) for _ in range(40)]
    try:
        for place, connection in enumerate(connections):
            if place % 2:
                connection.sendall(GARBAGE[place % len(GARBAGE)])
            else:
                connection.sendall(b"\x00\x00")  # half a length, then silence
        two = start(1)
        wait_for_each(RoundFormed, one, two)
        for connection in connections:
            connection.setblocking(False)
        wait_for(lambda: all(map(_is_closed, connections)), one, two)
    finally:
        for connection in connections:
            connection.close()


def _is_closed(sock: socket.socket) -> bool:
    try:
        return sock.recv(4096) == b"" if sock.fileno() >= 0 else True
    except BlockingIOError:
        return False
    except OSError:
        return True


def test_reserved_ports_are_distinct_and_cannot_be_bound() -> None:
    held = [PortReservation() for _ in range(300)]
    try:
        assert len({reservation.port for reservation in held}) == len(held)
        with socket.socket() as other, pytest.raises(OSError) as caught:
            other.bind(("0.0.0.0", held[0].port))
        assert caught.value.errno == errno.EADDRINUSE
    finally:
        for reservation in held:
            reservation.close()


@pytest.mark.torch
@pytest.mark.parametrize("use_libuv", [True, False])
def test_a_store_listens_on_a_reserved_port(use_libuv) -> None:
    torch_distributed = pytest.importorskip("torch.distributed")
    reservation = PortReservation()
    try:
        store = torch_distributed.TCPStore(
            "127.0.0.1", reservation.port, is_master=True, wait_for_workers=False, use_libuv=use_libuv
        )
        client = torch_distributed.TCPStore(
            "127.0.0.1", reservation.port, is_master=False, wait_for_workers=False, use_libuv=use_libuv
        )
        store.set("key", "value")
        assert client.get("key") == b"value"
    finally:
        reservation.close()


def test_only_reading_can_be_the_other_sides_fault() -> None:
    """An error of ours while a message is handled must not cost its sender the connection."""
    loop = Loop()
    network = TcpNetwork(loop, None)
    arrived, opened = [], []

    class Owner:
        def on_message(self, link, message) -> None:
            raise ProtocolError("a message of ours is too long to send")

        def on_closed(self, link, end) -> None:
            raise AssertionError(end.reason)

    def on_link(link, message) -> None:
        link.owner = Owner()
        arrived.append(link)

    listener = network.listen("127.0.0.1", 0, on_link)
    network.connect("127.0.0.1", listener.port, opened.append, lambda end: None, 5.0)
    while not opened:
        loop.turn(0.1)
    opened[0].send(LeaderQuery(run_id="first"))
    while not arrived:
        loop.turn(0.1)
    opened[0].send(LeaderQuery(run_id="second"))

    def turn_often() -> None:
        for _ in range(50):
            loop.turn(0.1)

    with pytest.raises(ProtocolError, match="of ours"):
        turn_often()
    for closing in (arrived[0], opened[0], listener, network, loop):
        closing.close()
