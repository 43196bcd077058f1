"""Letters that nobody of ours writes, and bugs of ours: the first cost the sender its connection, the second surface.

Every kind of letter is mutated, field by field and as a whole, and given to whoever reads it: leader, member, office,
and those who look for a leader.
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

# -- every kind of letter, well written ---------------------------------------------------------------------------

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
BASE = {"number": 1, "by": "m0", "size": 3, "leader": 0, "indices": [0, 1, None], "rank": 1, "ended": [2]}
CARRY = {"round": 1, "attempt": 2, "early": "ImportError: x", "final": None, "leader": "m2", "bases": [BASE]}
CONFIG = RendezvousConfig(
    backend="muster", run_id="run", host="leader", port=29400, node_index=1, min_nodes=2, max_nodes=3, max_restarts=1
)
RULES = describe_job_rules(build_job_rules(CONFIG))
JOIN = {
    "t": "join",
    "run_id": "run",
    "id": "m9",
    "index": 2,
    "nproc": 4,
    "role": "trainer",
    "host": "h9",
    "port": 4009,
    "listen": 5009,
    "local_addr": "10.0.0.9",
    "carry": CARRY,
    "prepared": False,
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
    up.build_leave("SIGTERM"),
    up.build_end_acknowledgement(),
]
REPORT = Report(run_id="run", reason="why", attempt=0, max_restarts=1, failures=(FAILED,), stacks=STACKS)
ROUND = {
    "t": "round",
    **CARRY,
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
    {"t": "roster", **CARRY, "successors": ROUND["successors"], "spare": True},
    down.build_round_committed(1),
    {
        "t": "break",
        "round": 1,
        "kind": "failure",
        "reason": "rank 1 failed",
        "want_stacks": True,
        "next_attempt": 1,
        "early": None,
    },
    {**down.build_job_end(succeeded=False, report=REPORT).address(prints=True)},
    down.build_exit(),
    down.build_rendezvous_failure("too few"),
    down.build_rejection("this is another run", usage=True),
    down.build_redirect("10.0.0.3", 5003),
    down.build_goodbye("silent"),
]
STATUS = {
    "t": "status",
    "role": "following",
    "round": 1,
    "rank": 2,
    "id": "m2",
    "index": 2,
    "leader": ["10.0.0.3", 5003],
    "rules": RULES,
}
CALL = {"t": "acting", "run_id": "run", "id": "m4", "round": 2, "port": 5004, "rules": RULES}
VISITS = [JOIN, {"t": "ask", "run_id": "run"}, CALL]
REPLIES = [STATUS, down.build_rejection("this is another run")]
CALL_REPLIES = [{"t": "heard"}, {"t": "yield", "port": 5005}]


def travel(message: Any) -> Any:
    return json.loads(json.dumps(message))


@pytest.mark.parametrize("message", UP, ids=lambda m: m["t"])
def test_members_letters_are_read(message) -> None:
    assert up.read_member_message("m9", travel(message)) is not None


@pytest.mark.parametrize("message", DOWN, ids=lambda m: m["t"])
def test_the_leaders_letters_are_read(message) -> None:
    assert down.read_leader_message(travel(message)) is not None


def test_what_letters_enclose_arrives_as_it_was_sent() -> None:
    stopped = up.read_member_message("m1", travel(up.build_stopped(1, 4002, (FAILED,), STACKS)))
    assert (stopped.failures, stopped.stacks) == ((FAILED,), STACKS)
    verdict = down.read_leader_message(travel(down.build_job_end(succeeded=False, report=REPORT).address(prints=True)))
    assert verdict == down.JobEnd(succeeded=False, report=REPORT, prints=True)
    join = up.read_member_message("", travel(JOIN))
    assert travel(up.build_join(join)) == JOIN


@pytest.mark.parametrize(("kind", "readers"), [(Failure, FAILURE), (OomEvidence, OOM), (Stack, STACK)])
def test_no_field_is_forgotten(kind, readers) -> None:
    assert set(kind.__dataclass_fields__) == set(readers)


def test_letters_of_newer_versions_are_no_nonsense() -> None:
    assert up.read_member_message("m1", {"t": "news", "x": 1}) is None
    assert down.read_leader_message({"t": "news"}) is None
    assert up.read_member_message("m1", {**up.build_succeeded(1), "new": [1]}) is not None


# -- the same, garbled --------------------------------------------------------------------------------------------

DEEP: list = []
for _ in range(40):
    DEEP = [DEEP]
JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([-1, 0, 1, 3, 65536, 2**31, 2**53, 10**400, -(10**30), 0.5, -0.0, 1e300]),
    st.sampled_from([float("inf"), float("-inf"), float("nan")]),
    st.sampled_from(["", "\ud800", "a\0b", "x" * 300, "\x1b[2J\n", "join", "round", "leader", "ü"]),
    st.sampled_from([[], {}, [[]], [None], [1, 2], {"t": "join"}, DEEP, [0, [5, "x"]], ["h", 10**6]]),
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
def garbled(draw: Callable[..., Any], letters: list[dict[str, Any]]) -> dict[str, Any]:
    message = copy.deepcopy(travel(draw(st.sampled_from(letters))))
    for _ in range(draw(st.integers(1, 3))):
        places = list(list_places(message))
        if not places:
            break
        container, key = draw(st.sampled_from(places))
        if isinstance(container, dict) and draw(st.booleans()) and draw(st.booleans()):
            del container[key]
        else:
            container[key] = copy.deepcopy(draw(JUNK))
    return travel(message)


def is_nonsense(read: Callable[[Any], Any], message: dict[str, Any]) -> bool:
    try:
        read(message)
    except MalformedMessageError:
        return True
    return False


@given(message=garbled(CALL_REPLIES + REPLIES + VISITS))
def test_what_is_said_at_the_door_is_read_or_refused(message) -> None:
    for read in (read_announcement_reply, read_query_reply, read_first_message):
        is_nonsense(read, message)


class Court:
    """A leader with its own member and two others, in a round."""

    def __init__(self) -> None:
        self.clock = StandingClock()
        self.loop = Loop(self.clock)
        self.told: list[str] = []
        options = LeaderOptions(
            rules=build_rules(CONFIG),
            job_rules=build_job_rules(CONFIG),
            silence_s=5.0,
            takeover=False,
            local_addr=None,
            tell=self.told.append,
            own_id="m0",
            listen_port=5000,
        )
        self.leader = Leader(self.loop, FakeNetwork(), options)
        self.own = self.leader.attach_local()
        self.own.owner = FakeLink()  # whoever it is, it only listens
        self.own.owner.on_message = lambda link, message: None
        self.own.send(self.build_join(0))
        self.loop.turn(0)
        self.links = [FakeLink("10.0.0.2"), FakeLink("10.0.0.3")]
        for number, link in enumerate(self.links, 1):
            self.leader.admit(link, up.read_join(self.build_join(number)))
        assert [link.kinds()[:2] for link in self.links] == [["welcome", "round"]] * 2

    @staticmethod
    def build_join(number: int) -> dict[str, Any]:
        empty = {"round": 0, "attempt": 0, "early": None, "bases": []}
        return {**JOIN, "id": f"m{number}", "index": number, "local_addr": None, "carry": empty}

    def close(self) -> None:
        self.leader.close()
        self.loop.close()


@given(message=garbled(UP))
def test_nonsense_costs_a_member_its_connection_and_the_leader_nothing(message) -> None:
    court = Court()
    before: JobState = court.leader.state
    court.links[1].deliver(message)
    if is_nonsense(lambda m: up.read_member_message("m2", m), message):
        assert court.links[1].closed
        assert "made no sense" in court.told[-1]
        assert court.leader.state == decide(before, MemberLost(id="m2", reason=""), court.clock.now_s())[0]
    assert not court.links[0].closed
    court.links[1].deliver(up.build_leave("done with it"))
    court.links[0].deliver(up.build_heartbeat(1, None))
    court.clock.passed_s += 4.0
    court.loop.turn(0)
    assert "beat" in court.links[0].kinds()
    court.close()


@given(message=garbled([JOIN]))
def test_a_garbled_join_does_not_get_in(message) -> None:
    court = Court()
    stranger = FakeLink()
    stranger.owner = court.leader
    before = court.leader.state
    stranger.deliver(message)
    if is_nonsense(up.read_join, message):
        assert court.leader.state is before
    court.close()


class Node:
    """A member in a round, whose leader is the test."""

    def __init__(self, **changes: Any) -> None:
        self.clock = StandingClock()
        self.loop = Loop(self.clock)
        self.network = FakeNetwork()
        self.member = Member(
            RendezvousConfig(**{**vars(CONFIG), **changes}),
            nproc=2,
            role="default",
            loop=self.loop,
            lease=None,
            node_name="h1",
            network=self.network,  # type: ignore[arg-type]
            reserve=FakeHandle,
            member_id="m1",
        )
        self.events: list[Any] = []
        self.member.join()

    def answer_dial(self) -> FakeLink:
        link = FakeLink("10.0.0.1")
        self.network.dials.pop(0)[2](link)
        return link

    def join_round(self) -> FakeLink:
        link = self.answer_dial()
        link.deliver({**STATUS, "role": "leader", "id": "leader", "leader": None})
        link.deliver(down.build_welcome("leader", 5000))
        link.deliver(ROUND)
        assert isinstance(self.take_events()[-1], RoundFormed)
        return link

    def take_events(self) -> list[Any]:
        self.loop.turn(0)
        while (event := self.loop.pop_event()) is not None:
            self.events.append(event)
        return self.events

    def close(self) -> None:
        self.member.close()
        self.loop.close()


@given(message=garbled(DOWN))
def test_nonsense_costs_the_leader_its_member_and_the_member_nothing(message) -> None:
    node = Node()
    link = node.join_round()
    carry = node.member._recovery.state
    link.deliver(message)
    if is_nonsense(down.read_leader_message, message):
        assert link.closed
        assert node.member._recovery.state == carry
        events = node.take_events()
        assert [event.kind for event in events if isinstance(event, RoundBroken)] == [BreakKind.FENCED]
        assert any(isinstance(event, Notice) and "malformed message" in event.text for event in events)
        assert not any(isinstance(event, RendezvousFailed) for event in events)
    node.take_events()
    node.close()


def test_a_leader_that_writes_nonsense_is_not_asked_again_at_once() -> None:
    node = Node()
    node.join_round().deliver({"t": "round"})
    node.take_events()
    node.network.dials.clear()
    node.clock.passed_s += session_module.MALFORMED_PAUSE_S / 2
    node.take_events()
    assert not node.network.dials
    node.clock.passed_s += session_module.MALFORMED_PAUSE_S
    node.take_events()
    assert ("10.0.0.1", 5000) in [dial[:2] for dial in node.network.dials]
    node.close()


@given(message=garbled(REPLIES))
def test_who_answers_nonsense_is_not_joined(message) -> None:
    node = Node()
    link = node.answer_dial()
    link.deliver(message)
    if is_nonsense(read_query_reply, message):
        assert link.closed
        assert link.kinds() == ["ask"]
    node.take_events()
    node.close()


@pytest.mark.parametrize("index", [0, 1])
@given(message=garbled(VISITS))
def test_visitors_with_nonsense_are_shown_the_door(index: int, message) -> None:
    node = Node(node_index=index)
    node.take_events()
    guest = FakeLink()
    node.network.listeners[0](guest, message)
    if is_nonsense(read_first_message, message):
        assert guest.closed
        assert set(guest.kinds()) <= {"reject"}
    node.take_events()
    node.close()


@given(message=garbled(CALL_REPLIES))
def test_a_nonsensical_answer_to_an_acting_leaders_call_changes_nothing(message) -> None:
    node = Node()
    node.member._session.start_leading(takeover=True)
    node.take_events()
    node.network.dials.clear()
    node.member._session.server.claim_endpoint(None)
    node.take_events()
    link = node.answer_dial()
    link.deliver(message)
    if is_nonsense(read_announcement_reply, message):
        assert link.closed
        assert node.member._session.server.leader is not None
    node.take_events()
    node.close()


def test_an_echo_of_a_time_to_come_does_not_prolong_the_leaders_lease() -> None:
    court = Court()
    court.links[0].deliver(up.build_heartbeat(1, 1e9))
    assert court.leader.lease_until_s() < 1000.0
    court.close()


# -- bugs of ours -------------------------------------------------------------------------------------------------


def fail(*_args: Any, **_keywords: Any) -> None:
    raise TypeError("our own bug")


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("muster.agent.rendezvous.leader.leader.decide", up.build_succeeded(1)),
        ("muster.agent.rendezvous.leader.leader.build_heartbeat_reply", up.build_heartbeat(1, None)),
        ("muster.agent.rendezvous.leader.leader.OutgoingMessages.acknowledge", up.build_end_acknowledgement()),
    ],
)
def test_the_leaders_own_bug_surfaces(monkeypatch, place, message) -> None:
    court = Court()
    monkeypatch.setattr(place, fail)
    with pytest.raises(TypeError, match="our own bug"):
        court.links[0].deliver(message)
    monkeypatch.undo()
    court.close()


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("muster.agent.rendezvous.member.recovery.RecoveryTracker.record_round", ROUND),
        ("muster.agent.rendezvous.member.member.Member._post_break", DOWN[5]),
        ("muster.agent.rendezvous.member.heartbeat.Heartbeats.record_reply", DOWN[1]),
    ],
)
def test_the_members_own_bug_surfaces(monkeypatch, place, message) -> None:
    node = Node()
    link = node.join_round()
    monkeypatch.setattr(place, fail)
    with pytest.raises(TypeError, match="our own bug"):
        link.deliver(message)
    monkeypatch.undo()
    node.close()


def test_the_offices_own_bug_surfaces(monkeypatch) -> None:
    node = Node()
    monkeypatch.setattr("muster.agent.rendezvous.member.server.Server._build_reply", fail)
    with pytest.raises(TypeError, match="our own bug"):
        node.network.listeners[0](FakeLink(), {"t": "ask", "run_id": "run"})
    node.close()


@pytest.mark.parametrize("builder", ["letters_up.build_succeeded", "letters_down.build_round_committed"])
def test_nonsense_between_a_leader_and_its_own_node_is_a_bug_of_ours(monkeypatch, builder) -> None:
    node = Node(node_index=0, min_nodes=1, max_nodes=2)
    node.take_events()
    node.clock.passed_s += 10.0
    node.take_events()
    node.take_events()
    assert isinstance(node.take_events()[-1], RoundFormed)
    link = node.member._session._link
    assert link is not None
    if builder == "letters_up.build_succeeded":
        link.send({"t": "done", "round": "one"})
    else:
        link._other.send({"t": "settled"})  # type: ignore[union-attr]
    with pytest.raises(MalformedMessageError):
        node.take_events()
    node.close()


def test_a_round_far_too_high_is_not_believed() -> None:
    """Numbers only go up: believed once, it would have to be believed for ever."""
    court = Court()
    before, stranger = court.leader.state, FakeLink()
    court.leader.admit(stranger, up.read_join({**JOIN, "index": None, "carry": {**CARRY, "round": 2**53 - 1}}))
    assert stranger.closed
    assert court.leader.state is before
    court.close()


def test_an_address_that_nobody_could_dial_is_the_callers_mistake() -> None:
    node = Node(local_addr="two words")
    lost = node.take_events()[-1]
    assert isinstance(lost, RendezvousFailed)
    assert lost.usage
    assert "--local-addr 'two words'" in lost.reason
    node.close()
