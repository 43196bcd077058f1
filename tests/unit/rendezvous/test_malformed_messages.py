"""Malformed messages disconnect their sender; bugs in muster raise.

Messages of every type are mutated, field by field and as a whole, and given to their readers: leader, member, server,
and the search for a leader.
"""

import copy
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from doubles.rendezvous_links import FakeHandle, FakeLink, FakeNetwork, StandingClock
from hypothesis import given
from hypothesis import strategies as st

from muster.agent.config import RendezvousConfig
from muster.agent.diagnosis.report import Failure, OomEvidence, Report, Stack
from muster.agent.rendezvous.consensus.decisions import decide
from muster.agent.rendezvous.consensus.events import MemberLost
from muster.agent.rendezvous.consensus.state import JobState
from muster.agent.rendezvous.interface import BreakKind, Notice, RendezvousFailed, RoundBroken, RoundFormed
from muster.agent.rendezvous.leader.connections import LeaderOptions
from muster.agent.rendezvous.leader.leader import Leader
from muster.agent.rendezvous.member import session as session_module
from muster.agent.rendezvous.member.member import Member
from muster.agent.rendezvous.member.server import build_rules
from muster.agent.rendezvous.protocol import leader_messages as down
from muster.agent.rendezvous.protocol import member_messages as up
from muster.agent.rendezvous.protocol.discovery_messages import (
    read_announcement_reply,
    read_first_message,
    read_query_reply,
)
from muster.agent.rendezvous.protocol.fields import MalformedMessageError
from muster.agent.rendezvous.protocol.job_rules import build_job_rules, describe_job_rules
from muster.agent.rendezvous.protocol.payloads import FAILURE, OOM, STACK
from muster.agent.runtime.loop import Loop

# -- a valid message of every type --------------------------------------------------------------------------------

OOM_EVIDENCE = OomEvidence(certain=True, limit_bytes=2**33, peak_bytes=None, source="memory.events")
FAILED = Failure(
    node=1,
    node_index=1,
    host="h1",
    local_rank=0,
    global_rank=1,
    attempt=0,
    round=1,
    pid=77,
    time_s=1.7e9,
    age_s=0.25,
    exit_code=None,
    signal="SIGKILL",
    stderr_tail=("one", "zwei ü"),
    oom=OOM_EVIDENCE,
)
STACKS = (Stack(global_rank=1, node=1, local_rank=0, text="Thread 1"),)
BASE = {
    "number": 1,
    "leader_id": "m0",
    "size": 3,
    "leader_rank": 0,
    "node_indices": [0, 1, None],
    "rank": 1,
    "ended": [2],
}
RECOVERY = {
    "round": 1,
    "attempt": 2,
    "startup_signature": "ImportError: x",
    "final_reason": None,
    "leader_id": "m2",
    "quorum_bases": [BASE],
}
CONFIG = RendezvousConfig(
    backend="muster", run_id="run", host="leader", port=29400, node_index=1, min_nodes=2, max_nodes=3, max_restarts=1
)
RULES = describe_job_rules(build_job_rules(CONFIG))
JOIN = {
    "type": "join",
    "run_id": "run",
    "id": "m9",
    "index": 2,
    "nproc": 4,
    "role": "trainer",
    "host": "h9",
    "port": 4009,
    "listen_port": 5009,
    "local_addr": "10.0.0.9",
    "recovery_state": RECOVERY,
    "is_prepared": False,
    "rules": RULES,
}
UP = [
    JOIN,
    up.build_heartbeat(3, 199.0),
    up.build_prepared(),
    up.build_round_acknowledgement(1),
    up.build_succeeded(1),
    up.build_failed(1, (FAILED,)),
    up.build_idle(1, (FAILED,)),
    up.build_stopped(1, 4002, (FAILED,), STACKS),
    up.build_leaving("SIGTERM"),
    up.build_end_acknowledgement(),
]
REPORT = Report(run_id="run", reason="why", attempt=0, max_restarts=1, failures=(FAILED,), stacks=STACKS)
ROUND = {
    "type": "round_start",
    **RECOVERY,
    "successors": [[1, 1, "10.0.0.2", 5001], [2, None, "fe80::1%eth0", 5002]],
    "restarts_left": 1,
    "size": 3,
    "world_size": 6,
    "master_addr": "10.0.0.1",
    "master_port": 4000,
    "group_rank": 1,
    "rank_offset": 2,
    "role_rank_offset": 2,
    "role_world_size": 6,
}
DOWN = [
    down.build_welcome("leader", 5000),
    down.build_heartbeat_reply(down.HeartbeatReply(number=1, at_s=7.5, ended=(1, frozenset({2})))),
    ROUND,
    {"type": "round_summary", **RECOVERY, "successors": ROUND["successors"], "is_spare": True},
    down.build_round_committed(1),
    {
        "type": "round_break",
        "round": 1,
        "kind": "failure",
        "reason": "rank 1 failed",
        "want_stacks": True,
        "next_attempt": 1,
        "startup_signature": None,
    },
    {**down.build_job_end(succeeded=False, report=REPORT).build_copy(prints_report=True)},
    down.build_exit(),
    down.build_rendezvous_failure("too few"),
    down.build_rejection("this is another run", usage=True),
    down.build_redirect("10.0.0.3", 5003),
    down.build_goodbye("silent"),
]
QUERY_REPLY = {
    "type": "query_reply",
    "role": "following",
    "round": 1,
    "rank": 2,
    "id": "m2",
    "index": 2,
    "leader": ["10.0.0.3", 5003],
    "rules": RULES,
}
ANNOUNCEMENT = {"type": "announcement", "run_id": "run", "id": "m4", "round": 2, "port": 5004, "rules": RULES}
FIRST_MESSAGES = [JOIN, {"type": "leader_query", "run_id": "run"}, ANNOUNCEMENT]
REPLIES = [QUERY_REPLY, down.build_rejection("this is another run")]
ANNOUNCEMENT_REPLIES = [{"type": "announcement_acknowledged"}, {"type": "announcement_refused", "port": 5005}]


def encode_and_decode(message: Any) -> Any:
    return json.loads(json.dumps(message))


@pytest.mark.parametrize("message", UP, ids=lambda m: m["type"])
def test_members_messages_are_read(message) -> None:
    assert up.read_member_message("m9", encode_and_decode(message)) is not None


@pytest.mark.parametrize("message", DOWN, ids=lambda m: m["type"])
def test_leaders_messages_are_read(message) -> None:
    assert down.read_leader_message(encode_and_decode(message)) is not None


def test_payloads_arrive_as_they_were_sent() -> None:
    stopped = up.read_member_message("m1", encode_and_decode(up.build_stopped(1, 4002, (FAILED,), STACKS)))
    assert (stopped.failures, stopped.stacks) == ((FAILED,), STACKS)
    job_end = down.read_leader_message(
        encode_and_decode(down.build_job_end(succeeded=False, report=REPORT).build_copy(prints_report=True))
    )
    assert job_end == down.JobEnd(succeeded=False, report=REPORT, prints_report=True)
    join = up.read_member_message("", encode_and_decode(JOIN))
    assert encode_and_decode(up.build_join(join)) == JOIN


@pytest.mark.parametrize(("kind", "readers"), [(Failure, FAILURE), (OomEvidence, OOM), (Stack, STACK)])
def test_no_field_is_forgotten(kind, readers) -> None:
    assert set(kind.__dataclass_fields__) == set(readers)


def test_messages_of_newer_versions_are_not_malformed() -> None:
    assert up.read_member_message("m1", {"type": "news", "x": 1}) is None
    assert down.read_leader_message({"type": "news"}) is None
    assert up.read_member_message("m1", {**up.build_succeeded(1), "new": [1]}) is not None


# -- malformed messages -------------------------------------------------------------------------------------------

DEEP: list = []
for _ in range(40):
    DEEP = [DEEP]
JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([-1, 0, 1, 3, 65536, 2**31, 2**53, 10**400, -(10**30), 0.5, -0.0, 1e300]),
    st.sampled_from([float("inf"), float("-inf"), float("nan")]),
    st.sampled_from(["", "\ud800", "a\0b", "x" * 300, "\x1b[2J\n", "join", "round_start", "leader", "ü"]),
    st.sampled_from([[], {}, [[]], [None], [1, 2], {"type": "join"}, DEEP, [0, [5, "x"]], ["h", 10**6]]),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
)


def list_places(value: Any, depth: int = 8) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) inside, not too deep."""
    if not depth:
        return
    keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from list_places(value[key], depth - 1)


@st.composite
def garbled(draw: Callable[..., Any], messages: list[dict[str, Any]]) -> dict[str, Any]:
    message = copy.deepcopy(encode_and_decode(draw(st.sampled_from(messages))))
    for _ in range(draw(st.integers(1, 3))):
        places = list(list_places(message))
        if not places:
            break
        container, key = draw(st.sampled_from(places))
        if isinstance(container, dict) and draw(st.booleans()) and draw(st.booleans()):
            del container[key]
        else:
            container[key] = copy.deepcopy(draw(JUNK))
    return encode_and_decode(message)


def is_malformed(read: Callable[[Any], Any], message: dict[str, Any]) -> bool:
    try:
        read(message)
    except MalformedMessageError:
        return True
    return False


@given(message=garbled(ANNOUNCEMENT_REPLIES + REPLIES + FIRST_MESSAGES))
def test_first_messages_and_replies_are_read_or_rejected(message) -> None:
    for read in (read_announcement_reply, read_query_reply, read_first_message):
        is_malformed(read, message)


class LeaderHarness:
    """A leader whose round has its own member and two others."""

    def __init__(self) -> None:
        self.clock = StandingClock()
        self.loop = Loop(self.clock)
        self.notices: list[str] = []
        options = LeaderOptions(
            rules=build_rules(CONFIG),
            job_rules=build_job_rules(CONFIG),
            silence_s=5.0,
            takeover=False,
            local_addr=None,
            notify=self.notices.append,
            own_id="m0",
            listen_port=5000,
        )
        self.leader = Leader(self.loop, FakeNetwork(), options)
        self.own = self.leader.attach_local()
        self.own.owner = FakeLink()  # it only receives
        self.own.owner.on_message = lambda link, message: None
        self.own.send(self.build_join(0))
        self.loop.turn(0)
        self.links = [FakeLink("10.0.0.2"), FakeLink("10.0.0.3")]
        for number, link in enumerate(self.links, 1):
            self.leader.admit(link, up.read_join(self.build_join(number)))
        assert [link.kinds()[:2] for link in self.links] == [["welcome", "round_start"]] * 2

    @staticmethod
    def build_join(number: int) -> dict[str, Any]:
        empty = {"round": 0, "attempt": 0, "startup_signature": None, "quorum_bases": []}
        return {**JOIN, "id": f"m{number}", "index": number, "local_addr": None, "recovery_state": empty}

    def close(self) -> None:
        self.leader.close()
        self.loop.close()


@given(message=garbled(UP))
def test_a_malformed_message_disconnects_the_member_and_leaves_the_leader_as_it_was(message) -> None:
    harness = LeaderHarness()
    before: JobState = harness.leader.state
    harness.links[1].deliver(message)
    if is_malformed(lambda m: up.read_member_message("m2", m), message):
        assert harness.links[1].closed
        assert "invalid message" in harness.notices[-1]
        assert harness.leader.state == decide(before, MemberLost(id="m2", reason=""), harness.clock.now_s())[0]
    assert not harness.links[0].closed
    harness.links[1].deliver(up.build_leaving("SIGTERM"))
    harness.links[0].deliver(up.build_heartbeat(1, None))
    harness.clock.passed_s += 4.0
    harness.loop.turn(0)
    assert "heartbeat_reply" in harness.links[0].kinds()
    harness.close()


@given(message=garbled([JOIN]))
def test_a_malformed_join_adds_no_member(message) -> None:
    harness = LeaderHarness()
    new_link = FakeLink()
    new_link.owner = harness.leader
    before = harness.leader.state
    new_link.deliver(message)
    if is_malformed(up.read_join, message):
        assert harness.leader.state is before
    harness.close()


class MemberHarness:
    """A member in a round; the test acts as its leader."""

    def __init__(self, **changes: Any) -> None:
        self.clock = StandingClock()
        self.loop = Loop(self.clock)
        self.network = FakeNetwork()
        self.events: list[Any] = []
        self.member = Member(
            RendezvousConfig(**{**vars(CONFIG), **changes}),
            nproc=2,
            role="default",
            loop=self.loop,
            post=self.events.append,
            lease=None,
            node_name="h1",
            network=self.network,  # type: ignore[arg-type]
            reserve=FakeHandle,
            member_id="m1",
        )
        self.member.join()

    def answer_dial(self) -> FakeLink:
        link = FakeLink("10.0.0.1")
        self.network.dials.pop(0)[2](link)
        return link

    def join_round(self) -> FakeLink:
        link = self.answer_dial()
        link.deliver({**QUERY_REPLY, "role": "leader", "id": "leader", "leader": None})
        link.deliver(down.build_welcome("leader", 5000))
        link.deliver(ROUND)
        assert isinstance(self.collect_events()[-1], RoundFormed)
        return link

    def collect_events(self) -> list[Any]:
        self.loop.turn(0)
        return self.events

    def close(self) -> None:
        self.member.close()
        self.loop.close()


@given(message=garbled(DOWN))
def test_a_malformed_message_of_the_leader_ends_the_connection_and_changes_no_recovery_state(message) -> None:
    node = MemberHarness()
    link = node.join_round()
    carry = node.member._recovery.state
    link.deliver(message)
    if is_malformed(down.read_leader_message, message):
        assert link.closed
        assert node.member._recovery.state == carry
        events = node.collect_events()
        assert [event.kind for event in events if isinstance(event, RoundBroken)] == [BreakKind.FENCED]
        assert any(isinstance(event, Notice) and "malformed message" in event.text for event in events)
        assert not any(isinstance(event, RendezvousFailed) for event in events)
    node.collect_events()
    node.close()


def test_a_leader_that_sent_a_malformed_message_is_not_asked_again_at_once() -> None:
    node = MemberHarness()
    node.join_round().deliver({"type": "round_start"})
    node.collect_events()
    node.network.dials.clear()
    node.clock.passed_s += session_module.MALFORMED_PAUSE_S / 2
    node.collect_events()
    assert not node.network.dials
    node.clock.passed_s += session_module.MALFORMED_PAUSE_S
    node.collect_events()
    assert ("10.0.0.1", 5000) in [dial[:2] for dial in node.network.dials]
    node.close()


@given(message=garbled(REPLIES))
def test_a_node_with_a_malformed_reply_is_not_joined(message) -> None:
    node = MemberHarness()
    link = node.answer_dial()
    link.deliver(message)
    if is_malformed(read_query_reply, message):
        assert link.closed
        assert link.kinds() == ["leader_query"]
    node.collect_events()
    node.close()


@pytest.mark.parametrize("index", [0, 1])
@given(message=garbled(FIRST_MESSAGES))
def test_a_malformed_first_message_closes_the_link(index: int, message) -> None:
    node = MemberHarness(node_index=index)
    node.collect_events()
    link = FakeLink()
    node.network.listeners[0](link, message)
    if is_malformed(read_first_message, message):
        assert link.closed
        assert set(link.kinds()) <= {"rejected"}
    node.collect_events()
    node.close()


@given(message=garbled(ANNOUNCEMENT_REPLIES))
def test_a_malformed_reply_to_an_announcement_changes_nothing(message) -> None:
    node = MemberHarness()
    node.member._session.start_leading(takeover=True)
    node.collect_events()
    node.network.dials.clear()
    node.member._session.server.claim_endpoint(None)
    node.collect_events()
    link = node.answer_dial()
    link.deliver(message)
    if is_malformed(read_announcement_reply, message):
        assert link.closed
        assert node.member._session.server.leader is not None
    node.collect_events()
    node.close()


def test_an_echo_from_the_future_does_not_extend_the_leaders_lease() -> None:
    harness = LeaderHarness()
    harness.links[0].deliver(up.build_heartbeat(1, 1e9))
    assert harness.leader.lease_until_s() < 1000.0
    harness.close()


# -- bugs in muster -----------------------------------------------------------------------------------------------

LEADER = "muster.agent.rendezvous.leader.leader"


def fail(*_args: Any, **_keywords: Any) -> None:
    raise TypeError("a bug")


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (f"{LEADER}.decide", up.build_succeeded(1)),
        (f"{LEADER}.build_heartbeat_reply", up.build_heartbeat(1, None)),
        (f"{LEADER}.OutgoingMessages.record_acknowledgement", up.build_end_acknowledgement()),
    ],
)
def test_a_bug_in_the_leader_surfaces(monkeypatch, place, message) -> None:
    harness = LeaderHarness()
    monkeypatch.setattr(place, fail)
    with pytest.raises(TypeError, match="a bug"):
        harness.links[0].deliver(message)
    monkeypatch.undo()
    harness.close()


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("muster.agent.rendezvous.member.recovery.RecoveryTracker.record_round", ROUND),
        ("muster.agent.rendezvous.member.member.Member._post_break", DOWN[5]),
        ("muster.agent.rendezvous.member.heartbeat.Heartbeats.record_reply", DOWN[1]),
    ],
)
def test_a_bug_in_the_member_surfaces(monkeypatch, place, message) -> None:
    node = MemberHarness()
    link = node.join_round()
    monkeypatch.setattr(place, fail)
    with pytest.raises(TypeError, match="a bug"):
        link.deliver(message)
    monkeypatch.undo()
    node.close()


def test_a_bug_in_the_server_surfaces(monkeypatch) -> None:
    node = MemberHarness()
    monkeypatch.setattr("muster.agent.rendezvous.member.server.Server._build_reply", fail)
    with pytest.raises(TypeError, match="a bug"):
        node.network.listeners[0](FakeLink(), {"type": "leader_query", "run_id": "run"})
    node.close()


@pytest.mark.parametrize("sender", ["member", "leader"])
def test_a_malformed_message_between_a_leader_and_its_own_node_is_a_bug(sender) -> None:
    node = MemberHarness(node_index=0, min_nodes=1, max_nodes=2)
    node.collect_events()
    node.clock.passed_s += 10.0
    node.collect_events()
    node.collect_events()
    assert isinstance(node.collect_events()[-1], RoundFormed)
    link = node.member._session._link
    assert link is not None
    if sender == "member":
        link.send({"type": "succeeded", "round": "one"})
    else:
        link._other.send({"type": "round_committed"})  # type: ignore[union-attr]
    with pytest.raises(MalformedMessageError):
        node.collect_events()
    node.close()


def test_a_round_number_far_too_high_is_rejected() -> None:
    """The round number only grows: once accepted, it could never be undone."""
    harness = LeaderHarness()
    before, new_link = harness.leader.state, FakeLink()
    harness.leader.admit(
        new_link, up.read_join({**JOIN, "index": None, "recovery_state": {**RECOVERY, "round": 2**53 - 1}})
    )
    assert new_link.closed
    assert harness.leader.state is before
    harness.close()


def test_an_invalid_local_addr_is_a_usage_error() -> None:
    node = MemberHarness(local_addr="two words")
    lost = node.collect_events()[-1]
    assert isinstance(lost, RendezvousFailed)
    assert lost.usage
    assert "--local-addr 'two words'" in lost.reason
    node.close()
