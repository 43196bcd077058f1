"""A second user of the machine, and of its network: where a job listens, and what it lets another user do."""

import contextlib
import hmac
import json
import os
import socket
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from doubles.rendezvous_links import FakeLink, encode_and_decode
from harness import AGENT, Tree
from other_user import OTHER, call_as_other, needs_two_users, other_dir, shared_dir
from rendezvous_nodes import wait_for_each

from muster._shared.contract import FORMAT
from muster._shared.records import replace
from muster.agent.config import RendezvousConfig
from muster.agent.control.server import ControlServer
from muster.agent.rendezvous.interface import RoundFormed
from muster.agent.rendezvous.member.server import Server
from muster.agent.rendezvous.member.state import build_initial_state
from muster.agent.rendezvous.protocol.framing import build_frame
from muster.agent.rendezvous.protocol.messages import LeaderQuery
from muster.agent.rendezvous.shared_token import find_shared_token
from muster.agent.rendezvous.transport.tcp_network import TcpNetwork
from muster.agent.runtime.loop import Loop

__all__ = ["other_dir", "shared_dir"]

pytestmark = pytest.mark.timeout(240)

TOKEN = "0123456789abcdef" * 2
PROGRAM = """
import os, sys, time
import torch.distributed as dist
dist.init_process_group("gloo")
print("trains", flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.05)
dist.barrier()
"""


def find_listeners(pids: Iterable[int]) -> dict[int, set[str]]:
    """The addresses where these processes listen, by port; as in /proc/net/tcp, where 0100007F is 127.0.0.1."""
    inodes = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            try:
                inodes.add(os.readlink(link))
            except OSError:
                continue
    found: dict[int, set[str]] = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in inodes:
                host, port = words[1].split(":")
                found.setdefault(int(port, 16), set()).add(host)
    return found


def connect_elsewhere(ports: Iterable[int]) -> list[str]:
    """Where this process reaches one of the ports although it does not use 127.0.0.1."""
    reached = []
    for port in ports:
        for family, host in ((socket.AF_INET, "127.0.0.2"), (socket.AF_INET6, "::1")):
            with contextlib.suppress(OSError), socket.socket(family) as link:
                link.connect((host, port))
                reached.append(f"{host}:{port}")
    return reached


@contextmanager
def training(folder: Path, *flags: tuple[str, ...], **env: str) -> Iterator[list[Tree]]:
    """One agent for each item of `flags`, whose workers have met; they end well."""
    script, end = folder / "program.py", folder / "end"
    script.write_text(PROGRAM)
    with ExitStack() as stack:
        trees = []
        for words in flags:
            agent = [*AGENT, "--nproc-per-node", "2", "--tee", "3", *words]
            argv = [*agent, "--log-dir", str(folder / f"logs{len(trees)}"), str(script), str(end)]
            trees.append(stack.enter_context(Tree(argv, env={**os.environ, **env})))
        for tree in trees:
            tree.wait_for_line("trains", count=2)
        yield trees
        end.touch()
        for tree in trees:
            tree.wait().check()


def check_loopback(trees: list[Tree]) -> None:
    """Every socket that the job listens at is on 127.0.0.1 alone, and no other address reaches it."""
    listeners = find_listeners([pid for tree in trees for pid in tree.descendants()])
    # gloo's own listen at the address of this host's name.
    ours = {port: hosts for port, hosts in listeners.items() if any(set(host) == {"0"} for host in hosts)}
    assert ours == {}
    kept = [port for port, hosts in listeners.items() if "0100007F" in hosts]
    assert kept

    def connect() -> None:
        assert connect_elsewhere(kept) == []

    call_as_other(connect)


@pytest.mark.torch
@needs_two_users
@pytest.mark.parametrize(("nodes", "token"), [(1, ""), (2, TOKEN), pytest.param(2, "", marks=pytest.mark.long)])
def test_nodes_on_loopback_listen_there_only(tmp_path: Path, port: int, nodes: int, token: str) -> None:
    """Another user listed and overwrote the keys of the workers' store, from any address of the machine.

    With a token, rendezvous and every agent's own port were open at all addresses.
    """
    shared = ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--start", "warm")
    flags = [("--standalone", "--start", "warm")] if nodes == 1 else [shared, shared]
    with training(tmp_path, *flags, MUSTER_TOKEN=token) as trees:
        check_loopback(trees)


# -- with other machines ----------------------------------------------------------------------------------------------


class Peer:
    """What a server reports to, and the links that it is given."""

    def __init__(self, endpoint: str, local_addr: str | None = None) -> None:
        config = RendezvousConfig(
            backend="muster", run_id="run", host=endpoint, port=1, node_index=1, min_nodes=2, max_nodes=2
        )
        self.loop = Loop()
        self.network = TcpNetwork(self.loop, None)
        config = replace(config, local_addr=local_addr)
        state = build_initial_state(config, "id")
        self.server = Server(self.loop, self.network, lambda: state, print, print)
        self.server.open()

    def listen(self, near: str, *, joins: bool) -> set[str]:
        """Where the process listens once there is a link whose near address is this."""
        link = FakeLink()
        link.local_host = near
        assert self.server.listen_for(link, joins=joins)
        return self.find_hosts()

    def find_hosts(self) -> set[str]:
        found = find_listeners([os.getpid()]).get(self.server.port, set())
        return {NAMES.get(host, host) for host in found}

    def close(self) -> None:
        self.server.close()
        self.network.close()
        self.loop.close()


NAMES = {"0100007F": "127.0.0.1", "0200007F": "127.0.0.2", "0" * 32: "all", "00000000000000000000000001000000": "::1"}


@pytest.mark.parametrize(
    ("endpoint", "local_addr", "links"),
    [
        ("127.0.0.1", None, [("127.0.0.1", True, {"127.0.0.1"})]),
        ("::1", None, [("::1", True, {"::1"})]),
        ("node-0", None, [("127.0.0.1", True, {"all"})]),
        ("127.0.0.1", "127.0.0.2", [("127.0.0.1", True, {"127.0.0.1", "127.0.0.2"})]),
        ("127.0.0.1", "a-name", [("127.0.0.1", True, {"all"})]),
        ("127.0.0.1", "192.0.2.1", [("127.0.0.1", True, {"all"})]),
        (
            "10.0.0.1",
            None,
            [
                ("127.0.0.2", False, {"127.0.0.2"}),
                ("127.0.0.1", False, {"127.0.0.1", "127.0.0.2"}),
                ("127.0.0.1", False, {"127.0.0.1", "127.0.0.2"}),
            ],
        ),
        ("node-0", None, [("127.0.0.1", False, {"127.0.0.1"}), ("127.0.0.1", True, {"all"})]),
        ("10.0.0.1", None, [("127.0.0.1", False, {"127.0.0.1"}), ("fe80::1", False, {"all"})]),
        ("10.0.0.1", None, [("127.0.0.1", False, {"127.0.0.1"}), ("192.0.2.1", False, {"all"})]),
    ],
    ids=[
        "loopback",
        "IPv6",
        "a leader on this machine, and nodes elsewhere",
        "--local-addr",
        "--local-addr NAME",
        "--local-addr of NAT",
        "each interface that is used, for a later round may come by another one",
        "a node that joins from this machine widens to all",
        "a link-local address cannot be bound",
        "an address of NAT cannot be bound",
    ],
)
def test_an_agents_own_port_is_open_where_others_reach_it(
    endpoint: str, local_addr: str | None, links: list[tuple[str, bool, set[str]]]
) -> None:
    """It listened at 127.0.0.1 as before, and said that all was well: others took its refusal for its end."""
    peer = Peer(endpoint, local_addr)
    try:
        for near, joins, listens in links:
            assert peer.listen(near, joins=joins) == listens
    finally:
        peer.close()


def test_a_port_that_is_taken_is_no_success_and_both_sides_learn_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    peer = Peer("10.0.0.1")
    port = peer.server.port
    assert peer.listen("127.0.0.1", joins=False) == {"127.0.0.1"}
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.bind(("127.0.0.2", port))
    try:
        listening.listen()
        links = [FakeLink(), FakeLink()]
        for link in links:
            link.local_host = "127.0.0.2"
            peer.server.on_message(link, encode_and_decode(LeaderQuery(run_id="run")))
        assert all(link.closed for link in links)
        reasons = [link.sent[-1].reason for link in links]
        assert [f"on port {port} at 127.0.0.2" in reason for reason in reasons] == [True] * 2
        assert capsys.readouterr().out.count("a node at 10.0.0.9: ") == 1
    finally:
        listening.close()
        peer.close()


@pytest.mark.parametrize(
    ("host", "changes", "listens"),
    [
        ("127.0.0.1", {}, {"127.0.0.1"}),
        ("localhost", {}, {"127.0.0.1"}),
        ("::1", {}, {"::1"}),
        ("127.0.0.2", {}, {"127.0.0.2"}),
        ("192.0.2.1", {}, {"all"}),
        ("::", {}, {"all"}),
        ("0.0.0.0", {}, {"all"}),
        ("localhost", {"has_stock_host": True}, {"all"}),
    ],
    ids=["IPv4", "localhost", "IPv6", "one interface", "NAT", "all of IPv6", "all of IPv4", "TorchX's own scheduler"],
)
def test_node_0_listens_at_the_jobs_endpoint(start, port: int, host: str, changes: dict[str, bool], listens: set[str]):
    start(0, host=host, token=TOKEN, **changes)
    assert {NAMES.get(each, each) for each in find_listeners([os.getpid()])[port]} == listens
    if listens == {"all"}:
        socket.create_connection(("127.0.0.1", port)).close()


# -- the token of agents that are started by hand ----------------------------------------------------------------------


@needs_two_users
def test_another_user_cannot_join_agents_started_by_hand(
    shared_dir: Path, other_dir: Path, start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It joined, and could run code with a pickle in `all_gather_object`; no line had warned."""
    mine = shared_dir / "mine"
    mine.mkdir(0o755)
    monkeypatch.setenv("XDG_STATE_HOME", str(mine))
    leader = start(0, host="localhost")
    assert leader.events == []
    secret = mine / "muster" / "agents-token"
    assert secret.stat().st_mode & 0o777 == 0o600
    import encodings.idna  # noqa: F401  # the other user cannot read it

    import muster._shared.reports
    import muster.agent.rendezvous.transport.dial  # noqa: F401

    def join() -> list[bool]:
        joined = []
        for state_dir in (other_dir, mine):  # with a token of its own, and with none
            os.environ["XDG_STATE_HOME"] = str(state_dir)
            other = start(1, host="localhost")
            while not (other.find(RoundFormed) or any("cannot join" in str(event) for event in other.events)):
                other.loop.turn(0.05)
            joined.append(bool(other.find(RoundFormed)))
        return joined

    assert call_as_other(join, lambda: leader.loop.turn(0.05)) == [False, False]
    wait_for_each(RoundFormed, leader, start(1, host="localhost"))


@needs_two_users
def test_a_token_file_that_others_can_know_is_not_used(shared_dir: Path, port: int, monkeypatch) -> None:
    folder = shared_dir / "muster"
    folder.mkdir(0o777)
    file = folder / "agents-token"
    monkeypatch.setenv("XDG_STATE_HOME", str(shared_dir))
    for change in (lambda: os.chown(file, OTHER, OTHER), lambda: file.chmod(0o644), lambda: file.write_bytes(b"short")):
        file.unlink(missing_ok=True)
        file.write_bytes(bytes(32))
        file.chmod(0o600)
        assert find_shared_token(port) == find_shared_token(port) != find_shared_token(port + 1)
        change()
        with pytest.raises(PermissionError, match="remove it"):
            find_shared_token(port)
    file.unlink()
    file.symlink_to("/etc/hostname")
    with pytest.raises(OSError, match="symbolic links"):
        find_shared_token(port)


def test_agents_that_start_together_get_one_token(tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(lambda _: find_shared_token(port), range(32)))) == 1
    assert [path.name for path in (tmp_path / "muster").iterdir()] == ["agents-token"]


@needs_two_users
def test_another_user_gets_nothing_that_depends_on_the_token(start, port: int) -> None:
    """The first answer had a MAC of the token, and so had the abstract names: enough to try words in peace."""
    node = start(0, token=TOKEN)
    control = ControlServer(node.loop, TOKEN, lambda *_request: None)
    hello = build_frame(json.dumps({"hello": FORMAT, "auth": True, "nonce": "00" * 16}).encode())

    def ask() -> tuple[str, str]:
        with socket.socket() as link:
            link.connect(("127.0.0.1", port))
            link.sendall(hello)
            answer = link.recv(4096)
        sockets = [line for line in Path("/proc/net/unix").read_text().splitlines() if "@muster" in line]
        return answer[4:].decode(), "\n".join(sockets)

    try:
        answer, sockets = call_as_other(ask, lambda: node.loop.turn(0.02))
    finally:
        control.close()
    assert list(json.loads(answer)) == ["nonce"]
    assert "@muster-control-" in sockets
    assert hmac.new(TOKEN.encode(), b"address", "sha256").hexdigest()[:32] not in answer + sockets


def test_one_node_only_listens_at_localhost(port: int) -> None:
    """The second one took the IPv6 address of the name, and led a job of its own."""
    loop = Loop()
    network = TcpNetwork(loop, None)
    listener = network.listen("localhost", port, print)
    with pytest.raises(OSError, match="in use"):
        network.listen("localhost", port, print)
    for closing in (listener, network, loop):
        closing.close()
