"""What a leader prints of nodes that join: no name forges a line, and strangers cannot fill the console."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from doubles.rendezvous_links import FakeLink, FakeNetwork, StandingClock, make_config, make_join, make_member

from muster._shared.codec import encode_message
from muster.agent.rendezvous.leader.newcomers import LIMIT, PeerLines
from muster.agent.rendezvous.protocol.framing import FRAME_LIMIT_BYTES
from muster.agent.rendezvous.protocol.job_rules import build_job_rules
from muster.agent.runtime.loop import Loop


class Node:
    """A member without a network: the test is the other side."""

    def __init__(self) -> None:
        self.loop = Loop(StandingClock())
        self.network = FakeNetwork()
        self.events: list[Any] = []
        config = make_config(min_nodes=2, max_nodes=2, token="t")
        self.rules = build_job_rules(config)
        self.member = make_member(config, self.loop, self.network, "host-0", self.events.append)
        self.member.join()

    def receive_join(self, host: str) -> None:
        """Receive the join of node 1."""
        join = make_join(self.rules, host=host)
        frame = json.loads(encode_message(join, FRAME_LIMIT_BYTES))
        self.network.listeners[-1](FakeLink(), frame)


@pytest.fixture
def node() -> Iterator[Node]:
    made = Node()
    yield made
    made.member.close()
    made.loop.close()


def test_the_host_name_of_a_node_forges_no_line(node: Node) -> None:
    node.receive_join("a\n[muster] all is well\x1b]52;c;eA==\x07\t")
    leader = node.member.server.leader
    assert leader is not None
    (member,) = [each for each in leader.state.members.values() if each.index == 1]
    assert member.host == r"a\n[muster] all is well\x1b]52;c;eA==\x07\t", "as lines, reports and later messages name it"


def test_strangers_print_no_more_lines_than_the_limit() -> None:
    printed: list[str] = []
    lines = PeerLines(lambda text, _kind=None: printed.append(text))
    for number in range(3 * LIMIT):
        lines.print_once(f"refused a node at 10.0.0.{number}: another token")
    assert len(printed) == LIMIT + 1
    assert "no further lines" in printed[-1]
