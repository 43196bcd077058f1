"""torch's rendezvous behind the agent's protocol, and muster's inside torchrun. Real stores, real processes."""

import gc
import logging
import os
import re
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
from doubles.samples import make_failure
from harness import LIMIT_S, find_free_port, wait_until

from muster.agent.config import RendezvousConfig
from muster.agent.errors import InternalError
from muster.agent.rendezvous.interface import (
    AllSucceeded,
    BreakKind,
    JobEnded,
    RendezvousFailed,
    RoundBroken,
    RoundFormed,
)
from muster.agent.rendezvous.report_messages import Failed, Stopped
from muster.agent.rendezvous.selection import create_rendezvous
from muster.agent.runtime.loop import Loop

pytestmark = [
    pytest.mark.torch,
    pytest.mark.timeout(300),  # six processes import torch: a minute where seven others wait for each core
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning"),
]
SUMS = Path(__file__).parents[2] / "programs" / "rendezvous_sum.py"


class TorchrunNode:
    """What torchrun does with our handler; its user is the one whose state folder this is."""

    def __init__(self, port: int, index: int, state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from torch.distributed.elastic.rendezvous import RendezvousParameters

        from muster.agent.rendezvous.torch_handlers.plugin import build_handler

        monkeypatch.setenv("XDG_STATE_HOME", str(state_dir))
        self.handler = build_handler(RendezvousParameters("muster", f"127.0.0.1:{port}", "job", 2, 2, rank=index))
        self.rounds: list = []
        threading.Thread(target=self._join, daemon=True).start()

    def _join(self) -> None:
        with suppress(RuntimeError):
            self.rounds.append(self.handler.next_rendezvous())


def test_a_handler_that_cannot_start_says_so_each_time_and_shuts_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second call waited for a round that no member would form, and `shutdown` failed."""
    from torch.distributed.elastic.rendezvous import RendezvousParameters

    from muster.agent.rendezvous.torch_handlers import plugin

    def fail(*_args: object, **_how: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(plugin, "TcpNetwork", fail)
    handler = plugin.build_handler(RendezvousParameters("muster", f"127.0.0.1:{find_free_port()}", "job", 1, 1, rank=0))
    for _ in range(2):
        with pytest.raises(OSError, match="Too many open files"):
            handler.next_rendezvous()
    assert handler.shutdown()


def test_another_users_torchrun_cannot_join_on_one_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Two torchruns without a token: it joined. Agents of muster had a common token there."""
    caplog.set_level(logging.INFO)
    port = find_free_port()
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    first = TorchrunNode(port, 0, mine, monkeypatch)
    other = TorchrunNode(port, 1, theirs, monkeypatch)
    wait_until(lambda: other.rounds or "cannot join" in caplog.text, what="an answer")
    assert (other.rounds, first.rounds) == ([], [])
    second = TorchrunNode(port, 1, mine, monkeypatch)
    wait_until(lambda: first.rounds and second.rounds, what="a round")
    for node in (second, first, other):
        node.handler.shutdown()


class Node:
    def __init__(self, backend: str, endpoint: str, *, max_restarts: int = 1) -> None:
        host, _, port = endpoint.rpartition(":")
        self.loop = Loop()
        config = RendezvousConfig(
            backend=backend,
            run_id="torch-test",
            host=host,
            port=int(port),
            endpoint=endpoint,
            node_index=None,
            min_nodes=2,
            max_nodes=2,
            max_restarts=max_restarts,
            conf={"join_timeout": "60", "read_timeout": "30"},
        )
        self.events: list = []
        self.member = create_rendezvous(config, 3, "default", self.loop, None, "host", self.events.append)

    def find(self, kind):
        return next((event for event in reversed(self.events) if isinstance(event, kind)), None)

    def round_number(self) -> int:
        formed = self.find(RoundFormed)
        return formed.round.number if formed else 0

    def close(self) -> None:
        self.member.close()
        self.loop.close()


def wait_for(condition, *nodes: Node) -> None:
    end_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end_s, [node.events for node in nodes]
        for node in nodes:
            node.loop.turn(0.01)


def run_job(backend: str, endpoint: str) -> None:
    """Form, fail on one node, form again with a fresh port, succeed on both."""
    nodes = [Node(backend, endpoint), Node(backend, endpoint)]
    try:
        for node in nodes:
            node.member.join()
        wait_for(lambda: all(node.round_number() == 1 for node in nodes), *nodes)
        rounds = [node.find(RoundFormed).round for node in nodes]
        assert sorted((r.node_index, r.group_rank, r.rank_offset) for r in rounds) == [(0, 0, 0), (1, 1, 3)]
        assert {r.world_size for r in rounds} == {6}
        assert len({(r.master_addr, r.master_port) for r in rounds}) == 1
        failure = make_failure(exit_code=1)
        nodes[0].member.send(Failed(round_number=1, failures=(failure,)))
        wait_for(lambda: nodes[0].find(RoundBroken), *nodes)
        assert nodes[0].find(RoundBroken).kind is BreakKind.FAILURE
        nodes[0].member.send(Stopped(round_number=1))
        wait_for(lambda: nodes[1].find(RoundBroken), *nodes)
        assert nodes[1].find(RoundBroken).kind is BreakKind.MEMBERSHIP
        nodes[1].member.send(Stopped(round_number=1))
        wait_for(lambda: all(node.round_number() == 2 for node in nodes), *nodes)
        again = [node.find(RoundFormed).round for node in nodes]
        assert {r.attempt for r in again} == {0, 1}  # every agent has its own restart budget, as under torchrun
        assert again[0].master_port != rounds[0].master_port
        for node in nodes:
            node.member.send(AllSucceeded(round_number=2))
        wait_for(lambda: all(node.find(JobEnded) for node in nodes), *nodes)
        assert all(node.find(JobEnded).succeeded for node in nodes)
    finally:
        for node in nodes:
            node.close()


def test_torchs_c10d() -> None:
    run_job("c10d-torch", f"127.0.0.1:{find_free_port()}")


@pytest.mark.etcd
def test_etcd_v2(etcd: str) -> None:
    run_job("etcd-v2", etcd)


class PlugInError(Exception):
    """As python-etcd's: of no class that the agent knows."""


@pytest.mark.parametrize("kind", [PlugInError, TypeError])
def test_whatever_a_handler_raises_ends_the_job(kind, monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    def break_down(_parameters: object) -> None:
        raise kind("no list of servers")

    rendezvous = pytest.importorskip("torch.distributed.elastic.rendezvous")
    monkeypatch.setattr(rendezvous.registry, "get_rendezvous_handler", break_down)
    node = Node("etcd-v2", "127.0.0.1:1")
    try:
        node.member.join()
        wait_for(lambda: node.find(RendezvousFailed), node)
        lost = node.find(RendezvousFailed)
        assert not lost.usage
        assert f"etcd-v2 failed: {kind.__name__}: " in lost.reason
    finally:
        node.close()
    assert ("Traceback" in capfd.readouterr().err) == (kind is TypeError)  # a bug shows a traceback


def test_an_unknown_backend_is_the_callers_mistake() -> None:
    node = Node("no-such-backend", "127.0.0.1:1")
    try:
        node.member.join()
        wait_for(lambda: node.find(RendezvousFailed), node)
        assert node.find(RendezvousFailed).usage
        assert "no-such-backend" in node.find(RendezvousFailed).reason
    finally:
        node.close()


@pytest.mark.long
def test_torchrun_with_our_backend_restarts_after_a_crash(tmp_path: Path) -> None:
    endpoint = f"127.0.0.1:{find_free_port()}"
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "torch.distributed.run",
        "--nnodes",
        "2",
        "--nproc-per-node",
        "1",
        "--max-restarts",
        "1",
        "--rdzv-backend",
        "muster",
        "--rdzv-endpoint",
        endpoint,
        "--rdzv-id",
        "run",
        str(SUMS),
    ]
    env = {**os.environ, "CRASH_ATTEMPT": "0", "PYTHONWARNINGS": "ignore"}
    agents = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env, cwd=tmp_path)
        for _ in range(2)
    ]
    try:
        outputs = [agent.communicate(timeout=280)[0] for agent in agents]
    finally:
        for agent in agents:
            if agent.poll() is None:
                agent.kill()
                agent.wait()
    assert [agent.returncode for agent in agents] == [0, 0], outputs
    assert "sum 2 of 2" in outputs[0]
    assert "sum 2 of 2" in outputs[1]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_bug_of_ours_reaches_torchs_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's agent waits for the next round without a limit of its own."""
    api = pytest.importorskip("torch.distributed.elastic.rendezvous.api")
    from muster.agent.rendezvous.torch_handlers import plugin

    def fail(*_args: object) -> None:
        raise TypeError("our own bug")

    monkeypatch.setattr("muster.agent.rendezvous.leader.leader.decide", fail)
    port = find_free_port()
    parameters = api.RendezvousParameters("muster", f"127.0.0.1:{port}", "run", 1, 2, rank=0)
    handler = plugin.build_handler(parameters)
    with pytest.raises(InternalError, match="with an error"):
        handler.next_rendezvous()
    handler.shutdown()


@pytest.fixture
def build_plugin():
    """Build muster's handler as torch does, with values of --rdzv-conf."""
    api = pytest.importorskip("torch.distributed.elastic.rendezvous.api")
    from muster.agent.rendezvous.torch_handlers import plugin

    def build(**conf: object):
        endpoint = conf.pop("endpoint", f"127.0.0.1:{find_free_port()}")
        return plugin.build_handler(api.RendezvousParameters("muster", endpoint, "run", 2, 2, rank=0, **conf))

    return build


def test_torchs_agent_learns_of_the_end_each_time_it_asks(build_plugin) -> None:
    from torch.distributed.elastic.rendezvous.api import RendezvousClosedError, RendezvousTimeoutError

    handler = build_plugin(join_timeout="0.2")
    try:
        for _ in range(2):
            with pytest.raises(RendezvousTimeoutError, match="at least 2 nodes"):
                handler.next_rendezvous()
    finally:
        handler.shutdown()
    with pytest.raises(RendezvousClosedError):
        handler.next_rendezvous()


def test_a_handler_that_was_never_used_leaves_no_descriptor_open(build_plugin) -> None:
    gc.collect()
    before = set(os.listdir("/proc/self/fd"))
    handler = build_plugin()
    handler.shutdown()
    handler.shutdown()
    assert set(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("conf", "line"),
    [
        ({"endpoint": "host:70000"}, "'70000' is not a port"),
        ({"join_timeout": "soon"}, "--rdzv-conf join_timeout=soon: must be a number above 0"),
        ({"keep_alive_interval": "nan"}, "--rdzv-conf keep_alive_interval=nan: must be a number above 0"),
        ({"last_call_timeout": -1}, "--rdzv-conf last_call_timeout=-1: must be a number from 0 on"),
    ],
)
def test_a_value_that_torchs_agent_passes_on_is_checked(build_plugin, conf: dict[str, object], line: str) -> None:
    with pytest.raises(ValueError, match=re.escape(line)):
        build_plugin(**conf)
