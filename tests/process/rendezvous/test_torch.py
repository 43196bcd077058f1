"""torch's rendezvous behind the agent's protocol, and muster's inside torchrun. Real stores, real processes."""

import gc
import logging
import os
import re
import sys
import threading
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from doubles.samples import make_failure
from harness import PROGRAMS, Tree, wait_until
from rendezvous_nodes import Node, wait_for, wait_for_each

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

pytestmark = [
    pytest.mark.torch,
    pytest.mark.timeout(300),  # six processes import torch: a minute where seven others wait for each core
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning"),
]
SUMS = PROGRAMS / "rendezvous_sum.py"


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
    build_plugin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second call waited for a round that no member would form, and `shutdown` failed."""

    def fail(*_args: object, **_how: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr("muster.agent.rendezvous.torch_handlers.plugin.TcpNetwork", fail)
    handler = build_plugin(nodes=(1, 1))
    for _ in range(2):
        with pytest.raises(OSError, match="Too many open files"):
            handler.next_rendezvous()
    assert handler.shutdown()


def test_another_users_torchrun_cannot_join_on_one_machine(
    tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Two torchruns without a token: it joined. Agents of muster had a common token there."""
    caplog.set_level(logging.INFO)
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    first = TorchrunNode(port, 0, mine, monkeypatch)
    other = TorchrunNode(port, 1, theirs, monkeypatch)
    wait_until(lambda: other.rounds or "cannot join" in caplog.text, what="an answer")
    assert (other.rounds, first.rounds) == ([], [])
    second = TorchrunNode(port, 1, mine, monkeypatch)
    wait_until(lambda: first.rounds and second.rounds, what="a round")
    for node in (second, first, other):
        node.handler.shutdown()


@pytest.fixture
def start_by_torch(start):
    """Let a node join by torch's rendezvous."""

    def start_by_torch(backend: str, endpoint: str) -> Node:
        host, _, port = endpoint.rpartition(":")
        conf = {"join_timeout": "60", "read_timeout": "30"}
        return start(None, backend=backend, endpoint=endpoint, host=host, port=int(port), conf=conf)

    return start_by_torch


def run_job(*nodes: Node) -> None:
    """Form, fail on one node, form again with a fresh port, succeed on both."""
    wait_for_each(RoundFormed, *nodes)
    rounds = [node.find(RoundFormed).round for node in nodes]
    assert sorted((r.number, r.node_index, r.group_rank, r.rank_offset) for r in rounds) == [(1, 0, 0, 0), (1, 1, 1, 2)]
    assert {r.world_size for r in rounds} == {4}
    assert len({(r.master_addr, r.master_port) for r in rounds}) == 1
    nodes[0].member.send(Failed(round_number=1, failures=(make_failure(exit_code=1),)))
    for node, kind in zip(nodes, (BreakKind.FAILURE, BreakKind.MEMBERSHIP), strict=True):
        wait_for(lambda node=node: node.find(RoundBroken), *nodes)
        assert node.find(RoundBroken).kind is kind
        node.member.send(Stopped(round_number=1))
    wait_for(lambda: all(node.find(RoundFormed).round.number == 2 for node in nodes), *nodes)
    again = [node.find(RoundFormed).round for node in nodes]
    assert {r.attempt for r in again} == {0, 1}  # every agent has its own restart budget, as under torchrun
    assert again[0].master_port != rounds[0].master_port
    for node in nodes:
        node.member.send(AllSucceeded(round_number=2))
    wait_for_each(JobEnded, *nodes)
    assert all(node.find(JobEnded).succeeded for node in nodes)


def test_torchs_c10d(start_by_torch, port: int) -> None:
    run_job(*(start_by_torch("c10d-torch", f"127.0.0.1:{port}") for _ in range(2)))


@pytest.mark.etcd
def test_etcd_v2(start_by_torch, etcd: str) -> None:
    run_job(*(start_by_torch("etcd-v2", etcd) for _ in range(2)))


class PlugInError(Exception):
    """As python-etcd's: of no class that the agent knows."""


@pytest.mark.parametrize("kind", [PlugInError, TypeError])
def test_whatever_a_handler_raises_ends_the_job(kind, start_by_torch, monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    def break_down(_parameters: object) -> None:
        raise kind("no list of servers")

    rendezvous = pytest.importorskip("torch.distributed.elastic.rendezvous")
    monkeypatch.setattr(rendezvous.registry, "get_rendezvous_handler", break_down)
    node = start_by_torch("etcd-v2", "127.0.0.1:1")
    wait_for_each(RendezvousFailed, node)
    lost = node.find(RendezvousFailed)
    assert not lost.usage
    assert f"etcd-v2 failed: {kind.__name__}: " in lost.reason
    assert ("Traceback" in capfd.readouterr().err) == (kind is TypeError)  # a bug shows a traceback


def test_an_unknown_backend_is_the_callers_mistake(start_by_torch) -> None:
    node = start_by_torch("no-such-backend", "127.0.0.1:1")
    wait_for_each(RendezvousFailed, node)
    assert node.find(RendezvousFailed).usage
    assert "no-such-backend" in node.find(RendezvousFailed).reason


@pytest.mark.long
def test_torchrun_with_our_backend_restarts_after_a_crash(tmp_path: Path, port: int) -> None:
    torchrun = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run"]
    words = "--nnodes 2 --nproc-per-node 1 --max-restarts 1 --rdzv-backend muster --rdzv-id run --rdzv-endpoint"
    command = [*torchrun, *words.split(), f"127.0.0.1:{port}", str(SUMS)]
    env = {**os.environ, "CRASH_ATTEMPT": "0", "PYTHONWARNINGS": "ignore"}
    with ExitStack() as stack:
        agents = [stack.enter_context(Tree(command, env=env, cwd=tmp_path)) for _ in range(2)]
        for agent in agents:
            assert "sum 2 of 2" in agent.wait(280).check().stdout


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_bug_of_ours_reaches_torchs_agent(build_plugin, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's agent waits for the next round without a limit of its own."""

    def fail(*_args: object) -> None:
        raise TypeError("our own bug")

    monkeypatch.setattr("muster.agent.rendezvous.leader.leader.decide", fail)
    handler = build_plugin(nodes=(1, 2))
    with pytest.raises(InternalError, match="with an error"):
        handler.next_rendezvous()
    handler.shutdown()


@pytest.fixture
def build_plugin(port: int):
    """Build muster's handler as torch does, with values of --rdzv-conf."""
    api = pytest.importorskip("torch.distributed.elastic.rendezvous.api")
    from muster.agent.rendezvous.torch_handlers import plugin

    def build(*, endpoint: str = f"127.0.0.1:{port}", nodes: tuple[int, int] = (2, 2), **conf: object):
        return plugin.build_handler(api.RendezvousParameters("muster", endpoint, "run", *nodes, rank=0, **conf))

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
