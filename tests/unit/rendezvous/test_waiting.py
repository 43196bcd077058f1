"""What a node says while it waits for the others."""

import pytest

from muster.agent.config import RendezvousConfig
from muster.agent.rendezvous.member.waiting_lines import WaitFacts, describe_wait

CHECK = "check that the others run, and that no firewall keeps them from h:29400 (597 s left of join_timeout)"
CHECK_LEADER = "check that its node runs, the address and the firewall (597 s left of join_timeout)"


def make_config(**changes) -> RendezvousConfig:
    values = {"backend": "muster", "run_id": "job7", "host": "h", "port": 1, "node_index": None}
    return RendezvousConfig(**{**values, "min_nodes": 2, "max_nodes": 2, **changes})


TOKEN = {"token": "t"}
ONE = "waiting for nodes: 1 of 2 is here"
NEEDS = "the others need --nnodes 2 --rdzv-backend c10d --rdzv-endpoint h:29400"
LEFT = "(597 s left of join_timeout)"
STATIC = {"backend": "static", "master_addr": "m", "master_port": 7, "node_index": 0}
UNKNOWN = "nosuchhost.invalid:29400: the host name does not resolve"
LOOPBACK = "h:29400 is on loopback: nodes on other machines cannot join"
STORM = "the next round waits 20 s more: rounds were formed and broken again and again without a step"
STATIC_NEEDS = "the others need --nnodes 2 --master-addr m --master-port 7 and a --node-rank of their own"
TWELVE = WaitFacts(present=10, hosts=tuple(f"h{each}" for each in range(9)))


@pytest.mark.parametrize(
    ("changes", "facts", "line"),
    [
        ({}, WaitFacts(present=1), f"{ONE}; {NEEDS} --rdzv-id job7; {CHECK}"),
        (
            {"min_nodes": 3, "max_nodes": 4, "run_id": "none"},
            WaitFacts(present=2),
            f"waiting for nodes: 2 of at least 3 are here; {NEEDS.replace('nnodes 2', 'nnodes 3:4')}; {CHECK}",
        ),
        (
            {"node_index": 0, "run_id": "none"},
            WaitFacts(present=1),
            f"{ONE}; {NEEDS} and a --node-rank of their own; {CHECK}",
        ),
        (STATIC, WaitFacts(present=1), f"{ONE}; {STATIC_NEEDS}; {CHECK}"),
        (
            TOKEN,
            WaitFacts(present=1, last_error="h:29400: the host name does not resolve"),
            f"{ONE}; this node itself does not reach h:29400: the host name does not resolve {LEFT}",
        ),
        (TOKEN, WaitFacts(present=1), f"{ONE}; {CHECK}"),
        ({**TOKEN, "has_shared_token": True}, WaitFacts(present=1), f"{ONE}; {NEEDS} --rdzv-id job7; {CHECK}"),
        ({**TOKEN, "is_by_hand": True}, WaitFacts(present=1, is_on_loopback=True), f"{ONE}; {LOOPBACK} {LEFT}"),
        (TOKEN, WaitFacts(present=1, is_on_loopback=True), f"{ONE}; {CHECK}"),
        (TOKEN, WaitFacts(present=2, storm_s=20.0), STORM),
        (TOKEN, WaitFacts(present=2), f"waiting for nodes of the last round: 2 are here {LEFT}"),
        ({}, WaitFacts(last_error=UNKNOWN), f"no leader found yet: {UNKNOWN}; still trying; {CHECK_LEADER}"),
        ({}, WaitFacts(), f"looking for the job's leader at h:29400; {CHECK_LEADER}"),
        ({}, WaitFacts(is_accepted=True), None),
        (
            {**TOKEN, "min_nodes": 12, "max_nodes": 12},
            TWELVE,
            f"waiting for nodes: 10 of 12 are here: h0, h1, h2, h3, h4, h5, h6, h7; {CHECK}",
        ),
    ],
)
def test_the_line_says_what_is_missing(changes, facts, line) -> None:
    assert describe_wait(make_config(**changes), ("h", 29400), facts, 3.0) == line


def test_a_member_leaves_the_first_line_to_its_leader() -> None:
    line = describe_wait(make_config(), ("::1", 29400), WaitFacts(is_accepted=True), 63.0)
    shown = "waiting for more nodes; the node there prints which are here (537 s left of join_timeout)"
    assert f"[::1]:29400: {shown}" in line
