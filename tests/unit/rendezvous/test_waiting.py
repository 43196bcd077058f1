"""What a node says while it waits for the others."""

import pytest

from muster.agent.config import RendezvousConfig
from muster.agent.rendezvous.member.waiting import FIRST_S, NEXT_S, WaitFacts, WaitReporter, describe_wait
from muster.agent.runtime.clock import SystemClock
from muster.agent.runtime.loop import Loop


def make_config(**changes) -> RendezvousConfig:
    values = {"backend": "muster", "run_id": "job7", "host": "h", "port": 1, "node_index": None}
    return RendezvousConfig(**{**values, "min_nodes": 2, "max_nodes": 2, **changes})


@pytest.mark.parametrize(
    ("changes", "facts", "line"),
    [
        (
            {},
            WaitFacts(present=1),
            (
                "waiting for nodes: 1 of 2 is here; the others need --nnodes 2 --rdzv-backend c10d --rdzv-endpoint h:29400 "
                "--rdzv-id job7 (597 s left)"
            ),
        ),
        (
            {"min_nodes": 3, "max_nodes": 4, "run_id": "none"},
            WaitFacts(present=2),
            (
                "waiting for nodes: 2 of at least 3 are here; the others need --nnodes 3:4 --rdzv-backend c10d "
                "--rdzv-endpoint h:29400 (597 s left)"
            ),
        ),
        (
            {"backend": "static", "master_addr": "m", "master_port": 7},
            WaitFacts(present=1),
            (
                "waiting for nodes: 1 of 2 is here; the others need --nnodes 2 --master-addr m --master-port 7 and a "
                "--node-rank of their own (597 s left)"
            ),
        ),
        ({"token": "t"}, WaitFacts(present=1), "waiting for nodes: 1 of 2 is here (597 s left)"),
        ({"token": "t"}, WaitFacts(present=2), "waiting for nodes of the last round: 2 are here (597 s left)"),
        (
            {},
            WaitFacts(last_error="nosuchhost.invalid:29400: the host name does not resolve"),
            "no leader found yet: nosuchhost.invalid:29400: the host name does not resolve; still trying (597 s left)",
        ),
        ({}, WaitFacts(), "looking for the job's leader at h:29400 (597 s left)"),
        ({}, WaitFacts(is_accepted=True), None),
    ],
)
def test_the_line_says_what_is_missing(changes, facts, line) -> None:
    assert describe_wait(make_config(**changes), ("h", 29400), facts, 3.0) == line


def test_a_member_leaves_the_first_line_to_its_leader() -> None:
    line = describe_wait(make_config(), ("::1", 29400), WaitFacts(is_accepted=True), 63.0)
    assert line == "joined the job at [::1]:29400: waiting for more nodes (537 s left)"


class HandClock(SystemClock):
    at_s = 100.0

    def now_s(self) -> float:
        return self.at_s


def test_the_first_line_comes_soon_and_then_one_a_minute() -> None:
    clock = HandClock()
    loop = Loop(clock)
    lines: list[str] = []
    reporter = WaitReporter(loop, lambda waited_s: f"{waited_s:.0f} s", lines.append)

    def pass_s(seconds: float) -> None:
        clock.at_s += seconds
        loop.turn(0.0)

    reporter.start()
    pass_s(FIRST_S - 1)
    reporter.start()  # waits already: the time is not counted again
    assert lines == []
    pass_s(1.5)
    pass_s(NEXT_S - 1)
    assert lines == ["4 s"]
    pass_s(1)
    assert len(lines) == 2
    reporter.stop()
    pass_s(10 * NEXT_S)
    assert len(lines) == 2
    reporter.start()
    pass_s(FIRST_S)
    assert lines[2] == "3 s"
    loop.close()
