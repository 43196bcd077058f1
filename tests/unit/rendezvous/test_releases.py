"""Agents of different releases that speak one protocol: both say so once, and neither needs the other's to say it."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from doubles.rendezvous_links import FakeHandle, FakeLink, FakeNetwork, StandingClock

from muster import __version__
from muster._shared.codec import encode_message
from muster.agent.config import RendezvousConfig
from muster.agent.rendezvous.consensus.recovery import RecoveryRecord
from muster.agent.rendezvous.interface import Notice
from muster.agent.rendezvous.leader.peer_lines import LIMIT, PeerLines
from muster.agent.rendezvous.member.member import Member
from muster.agent.rendezvous.protocol.framing import FRAME_LIMIT_BYTES
from muster.agent.rendezvous.protocol.job_rules import build_job_rules
from muster.agent.rendezvous.protocol.leader_messages import Welcome
from muster.agent.rendezvous.protocol.member_messages import Join
from muster.agent.rendezvous.protocol.messages import DiscoveryRole, QueryReply
from muster.agent.runtime.loop import Loop

OTHERS = [("9.9.9", "muster 9.9.9"), ("", "an earlier release of muster"), ("9\x1b[2J", "an earlier release of muster")]


class Node:
    """A member without a network: the test is the other side."""

    def __init__(self, index: int) -> None:
        self.loop = Loop(StandingClock())
        self.network = FakeNetwork()
        self.events: list[Any] = []
        config = RendezvousConfig(
            backend="muster", run_id="run", host="h", port=1, node_index=index, min_nodes=2, max_nodes=2, token="t"
        )
        self.rules = build_job_rules(config)
        self.member = Member(
            config,
            nproc=1,
            role="default",
            loop=self.loop,
            post=self.events.append,
            lease=None,
            node_name=f"host-{index}",
            network=self.network,  # type: ignore[arg-type]
            reserve=FakeHandle,
        )
        self.member.join()

    def list_lines(self) -> list[str]:
        for _ in range(3):
            self.loop.turn(0)
        return [event.text for event in self.events if isinstance(event, Notice)]

    def receive_join(self, release: str | None, host: str = "host-1") -> FakeLink:
        """Receive the join of node 1 with its release; None: of an agent whose messages have no such field."""
        join = Join(
            run_id="run",
            id="m1",
            index=1,
            nproc=1,
            role="default",
            host=host,
            port=1,
            listen_port=2,
            local_addr=None,
            rules=self.rules,
            recovery=RecoveryRecord(),
            group_ranks=(),
            release=release or "",
        )
        frame = json.loads(encode_message(join, FRAME_LIMIT_BYTES))
        if release is None:
            del frame["release"]
        link = FakeLink()
        self.network.listeners[-1](link, frame)
        return link

    def join_leader(self, release: str) -> FakeLink:
        """Find a leader, and be accepted by it."""
        link = FakeLink("10.0.0.1")
        self.network.dials.pop(0)[2](link)
        reply = QueryReply(
            role=DiscoveryRole.LEADER,
            round_number=0,
            group_rank=None,
            id="leader",
            index=0,
            leader=None,
            rules=self.rules,
        )
        link.deliver(reply)
        link.deliver(Welcome(leader_id="leader", listen_port=5000, release=release))
        return link


@pytest.fixture
def node(request: pytest.FixtureRequest) -> Iterator[Node]:
    made = Node(request.param)
    yield made
    made.member.close()
    made.loop.close()


@pytest.mark.parametrize("node", [0], indirect=True)
@pytest.mark.parametrize(("release", "named"), OTHERS)
def test_the_leader_names_a_node_of_another_release_once(node: Node, release: str, named: str) -> None:
    for _ in range(3):  # it reconnects
        welcome = node.receive_join(release).sent[0]
        assert isinstance(welcome, Welcome)
        assert welcome.release == __version__
    assert node.list_lines() == [f"node 1 (host-1) runs {named}, this node runs {__version__}"]


@pytest.mark.parametrize("node", [0], indirect=True)
def test_the_host_name_of_a_node_forges_no_line(node: Node) -> None:
    node.receive_join("9.9.9", host="a\n[muster] all is well\x1b]52;c;eA==\x07\t")
    shown = r"node 1 (a\n[muster] all is well\x1b]52;c;eA==\x07\t)"
    assert node.list_lines() == [f"{shown} runs muster 9.9.9, this node runs {__version__}"]
    leader = node.member.server.leader
    assert leader is not None
    (member,) = [each for each in leader.state.members.values() if each.index == 1]
    assert member.host == r"a\n[muster] all is well\x1b]52;c;eA==\x07\t", "as reports and later messages name it"


@pytest.mark.parametrize("node", [0], indirect=True)
def test_a_join_without_a_release_is_accepted(node: Node) -> None:
    assert isinstance(node.receive_join(None).sent[0], Welcome)
    assert node.list_lines() == [f"node 1 (host-1) runs an earlier release of muster, this node runs {__version__}"]


@pytest.mark.parametrize("node", [1], indirect=True)
@pytest.mark.parametrize(("release", "named"), OTHERS)
def test_a_node_names_the_release_of_its_leader(node: Node, release: str, named: str) -> None:
    link = node.join_leader(release)
    (join,) = [message for message in link.sent if isinstance(message, Join)]
    assert join.release == __version__
    assert node.list_lines() == [f"the leader (10.0.0.1) runs {named}, this node runs {__version__}"]


@pytest.mark.parametrize("node", [0, 1], indirect=True)
def test_equal_releases_are_not_worth_a_line(node: Node) -> None:
    if node.network.dials:
        node.join_leader(__version__)
    else:
        node.receive_join(__version__)
    assert node.list_lines() == []


def test_strangers_print_no_more_lines_than_the_limit() -> None:
    printed: list[str] = []
    lines = PeerLines(lambda text, _kind=None: printed.append(text))
    for number in range(3 * LIMIT):
        lines.print_once(f"refused a node at 10.0.0.{number}: another token")
    assert len(printed) == LIMIT + 1
    assert printed[-1] == "no further lines about nodes that try to join are printed"
