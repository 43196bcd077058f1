"""All agents of a job must have the same rules; one with other rules is refused without effect on the job."""

import json
import runpy
from collections.abc import Iterator
from typing import Any

import pytest
from doubles.rendezvous_links import (
    FakeLink,
    FakeNetwork,
    StandingClock,
    make_config,
    make_join,
    make_member,
)
from doubles.rendezvous_world import Process, World

from muster._shared.codec import encode_message
from muster._shared.records import replace
from muster.agent.rendezvous.interface import JobEnded, RendezvousFailed
from muster.agent.rendezvous.protocol.framing import FRAME_LIMIT_BYTES, Frame
from muster.agent.rendezvous.protocol.job_rules import build_job_rules, describe_difference
from muster.agent.rendezvous.protocol.messages import Announcement, AnnouncementAcknowledged, Message, Welcome
from muster.agent.runtime import limits
from muster.agent.runtime.loop import Loop

OTHERS = [
    ({"min_nodes": 2}, "--nnodes 2:3 (the job: 1:3)"),
    ({"max_nodes": 4}, "--nnodes 1:4 (the job: 1:3)"),
    ({"min_nodes": 3}, "--nnodes 3 (the job: 1:3)"),
    ({"max_restarts": 5}, "--max-restarts 5 (the job: 2)"),
    ({"join_timeout_s": 61.5}, "--rdzv-conf join_timeout=61.5 (the job: 120)"),
    ({"last_call_timeout_s": 7.0}, "--last-call-timeout 7 (the job: 3)"),
    ({"keep_alive_interval_s": 2.0}, "--rdzv-conf keep_alive_interval=2 (the job: 1)"),
    ({"keep_alive_max_attempt": 9}, "--rdzv-conf keep_alive_max_attempt=9 (the job: 5)"),
    ({"min_nodes": 3, "max_restarts": 0}, "--nnodes 3 (the job: 1:3), --max-restarts 0 (the job: 2)"),
]
SAME: dict[str, Any] = {"host": "h2", "port": 1, "node_index": 7, "local_addr": "10.0.0.9", "is_host": False}
"""What may differ from node to node."""


def make_world(*, min_nodes: int = 1, seed: int = 7) -> World:
    return World(seed, nodes=3, min_nodes=min_nodes, max_restarts=2, work_s=40.0)


def expect_refused(process: Process, difference: str) -> None:
    assert isinstance(process.outcome, RendezvousFailed)
    assert process.outcome.usage
    assert f"with {difference}" in process.outcome.reason


def expect_success(*processes: Process) -> None:
    assert all(isinstance(process.outcome, JobEnded) and process.outcome.succeeded for process in processes)


@pytest.mark.parametrize(("changes", "difference"), OTHERS)
def test_a_different_setting_is_named_with_both_values(changes, difference) -> None:
    job = build_job_rules(make_config(run_id="sim", join_timeout_s=120.0))
    own = build_job_rules(make_config(**{"run_id": "sim", "join_timeout_s": 120.0, **changes}))
    line = describe_difference(own, job)
    assert f"{difference}; " in line


@pytest.mark.parametrize("name", SAME)
def test_what_may_differ_makes_no_difference(name: str) -> None:
    other = make_config(**{"run_id": "sim", name: SAME[name]})
    assert describe_difference(build_job_rules(other), build_job_rules(make_config(run_id="sim"))) is None


def test_agents_with_different_scales_of_time_are_refused() -> None:
    job = build_job_rules(make_config(run_id="sim"))
    line = describe_difference(replace(job, time_scale=0.4), job)
    assert "MUSTER_TIME_SCALE=0.4 (the job: 1)" in line


def test_a_scale_leaves_the_ratios_between_all_limits_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    scaled = {}
    for scale in ("1", "0.25"):
        monkeypatch.setenv("MUSTER_TIME_SCALE", scale)
        found = runpy.run_path(limits.__file__)
        scaled[scale] = {name: value for name, value in found.items() if name.endswith("_S")}
    assert len(scaled["1"]) > 20
    assert {name: value / 4 for name, value in scaled["1"].items()} == scaled["0.25"]


def test_an_agent_with_other_rules_is_refused_and_the_job_continues() -> None:
    changes, difference = OTHERS[-1]
    world = make_world()
    job = [world.boot(0), world.boot(1)]
    world.run_until(20.0)
    assert [process.numbers for process in job] == [[1], [1]]
    refused_node = world.boot(2, **changes)
    world.run_until(30.0)
    expect_refused(refused_node, f"{difference}; all agents of a job must be started with the same values")
    world.run_until(200.0)
    expect_success(*job)
    assert [process.numbers for process in job] == [[1], [1]]


def test_two_agents_with_different_sizes_form_no_round() -> None:
    world = make_world(min_nodes=2)
    job = [world.boot(0), world.boot(1, min_nodes=1)]
    world.run_until(30.0)
    assert isinstance(job[1].outcome, RendezvousFailed)
    assert job[1].outcome.usage
    assert [process.numbers for process in job] == [[], []]
    job.append(world.boot(2))
    world.run_until(200.0)
    expect_success(job[0], job[2])


def test_a_successor_refuses_other_rules_like_the_first_leader() -> None:
    """Node 0 returns with another budget and finds the endpoint free; the acting leader announces itself there."""
    world = make_world()
    job = [world.boot(index) for index in range(3)]
    world.run_until(10.0)
    assert [process.numbers for process in job] == [[1]] * 3
    job[0].crash()
    world.run_until(20.0)
    rounds = [process.numbers for process in job[1:]]
    assert rounds == [[1, 2]] * 2
    refused_node = world.boot(0, max_restarts=9)
    world.run_until(40.0)
    expect_refused(
        refused_node, "--max-restarts 9 (the job: 2); all agents of a job must be started with the same values"
    )
    world.run_until(200.0)
    expect_success(*job[1:])
    assert [process.numbers for process in job[1:]] == rounds


def test_a_node_of_the_job_is_not_refused_by_a_leader_with_other_rules_at_the_endpoint() -> None:
    """Below `min` there is no acting leader: node 1 waits for a node with its rules, whatever node 0 has."""
    world = make_world(min_nodes=2)
    job = [world.boot(0), world.boot(1)]
    world.run_until(10.0)
    job[0].crash()
    refused_node = world.boot(0, max_restarts=9)
    world.run_until(30.0)
    assert job[1].outcome is None
    assert (job[1].numbers, refused_node.numbers) == ([1], [])
    refused_node.crash()
    job.append(world.boot(0))
    world.run_until(200.0)
    expect_success(job[1], job[2])
    assert job[1].numbers == [1, 2]


class LeaderHarness:
    """A leader that is alone in its round; the test connects to it."""

    def __init__(self) -> None:
        self.loop = Loop(StandingClock())
        self.network = FakeNetwork()
        config = make_config(run_id="sim", last_call_timeout_s=0.0, is_host=True)
        self.member = make_member(config, self.loop, self.network, "h0", lambda event: None)
        self.member.join()
        self.rules = build_job_rules(config)

    def form_round(self) -> None:
        self.loop.clock.passed_s += 3.0
        for _ in range(3):
            self.loop.turn(0)

    def receive(self, frame: Frame | Message) -> FakeLink:
        link = FakeLink()
        self.network.listeners[-1](link, frame)
        return link

    def close(self) -> None:
        self.member.close()
        self.loop.close()


@pytest.fixture
def node() -> Iterator[LeaderHarness]:
    made = LeaderHarness()
    yield made
    made.close()


@pytest.mark.parametrize("max_restarts", [2, 9])
def test_a_leader_does_not_resign_in_favour_of_one_with_other_rules(node: LeaderHarness, max_restarts: int) -> None:
    """Two jobs of one name share an endpoint by mistake: the acting leader of one announces itself to the other."""
    node.form_round()
    rules = replace(node.rules, max_restarts=max_restarts)
    link = node.receive(Announcement(run_id="sim", id="m4", round_number=7, port=5004, rules=rules))
    assert (link.kinds() == [AnnouncementAcknowledged]) == (max_restarts == 9)
    assert (node.member.server.leader is not None) == (max_restarts == 9)


def test_a_join_without_rules_is_malformed(node: LeaderHarness) -> None:
    """Agents of protocol version 1 sent none; the handshake already refuses them."""
    join = make_join(node.rules, run_id="sim")
    frame = json.loads(encode_message(join, FRAME_LIMIT_BYTES))
    assert node.receive(frame).kinds() == [Welcome]
    del frame["rules"]
    refused = node.receive(frame)
    assert (refused.kinds(), refused.closed) == ([], True)
