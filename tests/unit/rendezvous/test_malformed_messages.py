"""Malformed messages disconnect their sender; bugs in muster raise.

Messages of every type are mutated, field by field and as a whole, and given to what receives them: leader, member,
server, and the search for a leader.
"""

import copy
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from doubles.rendezvous_links import (
    FakeLink,
    FakeNetwork,
    StandingClock,
    encode_and_decode,
    make_config,
    make_leader,
    make_member,
)
from doubles.samples import make_failure
from hypothesis import given
from hypothesis import strategies as st

from muster._shared.codec import MalformedMessageError, MessageUnion
from muster._shared.fields import Shared
from muster._shared.records import replace
from muster._shared.reports import FinalFailure, OomEvidence, Report, Stack
from muster.agent.rendezvous import interface as rdzv
from muster.agent.rendezvous.consensus import actions as do
from muster.agent.rendezvous.consensus.decisions import decide
from muster.agent.rendezvous.consensus.events import MemberLost, RoundAcknowledged
from muster.agent.rendezvous.consensus.quorum import RecoveredRound
from muster.agent.rendezvous.consensus.recovery import RecoveryRecord
from muster.agent.rendezvous.consensus.state import JobState
from muster.agent.rendezvous.member.events import Lead
from muster.agent.rendezvous.member.seeking import MALFORMED_PAUSE_S
from muster.agent.rendezvous.protocol import messages
from muster.agent.rendezvous.protocol import messages as discovery
from muster.agent.rendezvous.protocol.job_rules import build_job_rules
from muster.agent.rendezvous.protocol.messages import Message
from muster.agent.rendezvous.report_messages import Failed, Idle, Stopped
from muster.agent.rendezvous.restarts import CauseCount, NodeFault, Restarts
from muster.agent.round import Checkpoint
from muster.agent.runtime.loop import Loop

# -- a valid message of every type --------------------------------------------------------------------------------

OOM_EVIDENCE = OomEvidence(certain=True, limit_bytes=2**33, peak_bytes=None, source="memory.events")
FAILED = make_failure(
    node=1,
    node_index=1,
    host="h1",
    global_rank=1,
    pid=77,
    time_s=1.7e9,
    age_s=0.25,
    exit_code=None,
    signal="SIGKILL",
    stderr_tail=("one", "zwei ü"),
    oom=OOM_EVIDENCE,
)
STACKS = (Stack(global_rank=1, node=1, local_rank=0, text="Thread 1"),)
QUORUM_ROUND = RecoveredRound(
    round_number=1, leader_id="m0", size=3, leader_group_rank=0, node_indices=(0, 1, None), ended=frozenset({2})
)
RESTARTS = Restarts(
    free=1,
    causes=(CauseCount(signature="usage: ImportError: x", count=2, is_stepless=True, early=True),),
    has_reported=True,
    faults=(NodeFault(machine="b", node_index=1, host="h", cause="device", count=1, is_suspected=True),),
)
RECOVERY = RecoveryRecord(version=3, round_number=1, attempt=2, restarts=RESTARTS, quorum_rounds=(QUORUM_ROUND,))
CONFIG = make_config(host="leader", node_index=1, min_nodes=2, max_restarts=1)
RULES = build_job_rules(CONFIG)
JOIN = messages.Join(
    run_id="run",
    id="m9",
    index=2,
    nproc=4,
    role="trainer",
    host="h9",
    port=4009,
    listen_port=5009,
    local_addr="10.0.0.9",
    recovery=RECOVERY,
    group_ranks=(1,),
    last_leader_id="m2",
    is_prepared=False,
    rules=RULES,
    saved=rdzv.Saved(round_number=1, step=3, path="/c"),
)
SUMMARY = rdzv.Summary(round_number=1, step=7, most_step=None, text="packed")
UP: list[Message] = [
    JOIN,
    messages.Heartbeat(number=3, echo_s=199.0),
    rdzv.Prepared(),
    RoundAcknowledged(round_number=1),
    rdzv.AllSucceeded(round_number=1),
    Failed(round_number=1, failures=(FAILED,)),
    Idle(round_number=1, failures=(FAILED,), is_urgent=True),
    Stopped(round_number=1, port=4002, failures=(FAILED,), stacks=STACKS),
    rdzv.Leaving(reason="SIGTERM"),
    messages.EndAcknowledged(),
    SUMMARY,
]
REPORT = Report(run_id="run", reason="why", attempt=0, max_restarts=1, failures=(FAILED,), stacks=STACKS)
FACTS = do.RoundFacts(
    recovery=RECOVERY,
    successors=(
        do.Successor(group_rank=1, index=1, host="10.0.0.2", port=5001),
        do.Successor(group_rank=2, index=None, host="fe80::1%eth0", port=5002),
    ),
    group_world_size=3,
    world_size=6,
    master_addr="10.0.0.1",
    master_port=4000,
)
ROUND = do.RoundStart(facts=Shared(FACTS), group_ranks=(1,), rank_offset=2, role_rank_offset=2, role_world_size=6)
REPLY = messages.HeartbeatReply(number=1, at_s=7.5, recovery=Shared(RECOVERY))
BREAK = do.RoundBreak(
    broken=rdzv.RoundBroken(round_number=1, kind=rdzv.BreakKind.FAILURE, reason="rank 1 failed", want_stacks=True),
    recovery=Shared(replace(RECOVERY, attempt=3, restarts=Restarts())),
)
LAST_BREAK = replace(
    BREAK,
    broken=replace(BREAK.broken, kind=rdzv.BreakKind.FINAL),
    recovery=Shared(
        replace(
            RECOVERY,
            final=FinalFailure(cause="rank 1 failed", global_rank=1, verdict="no restarts are allowed"),
            checkpoint=Checkpoint(number=2, step=40, path="/40"),
        )
    ),
)
DOWN: list[Message] = [
    messages.Welcome(leader_id="leader", listen_port=5000),
    REPLY,
    ROUND,
    do.RoundSummary(facts=Shared(FACTS), group_ranks=(None,), is_spare=True),
    do.RecoveryChanged(recovery=Shared(RECOVERY)),
    BREAK,
    LAST_BREAK,
    do.JobEnd(succeeded=False, report=Shared(REPORT), printer_id="m1"),
    messages.Exit(),
    rdzv.RendezvousFailed(reason="too few"),
    messages.Rejected(reason="this is another run", usage=True),
    messages.Redirect(host="10.0.0.3", port=5003),
    messages.Goodbye(reason="silent"),
]
QUERY_REPLY = discovery.QueryReply(
    role=discovery.DiscoveryRole.FOLLOWING,
    round_number=1,
    group_rank=2,
    id="m2",
    index=2,
    leader=("10.0.0.3", 5003),
    rules=Shared(RULES),
)
QUERY = discovery.LeaderQuery(run_id="run")
ANNOUNCEMENT = discovery.Announcement(run_id="run", id="m4", round_number=2, port=5004, rules=RULES)
FIRST: list[Message] = [JOIN, QUERY, ANNOUNCEMENT]
REPLIES: list[Message] = [QUERY_REPLY, messages.Rejected(reason="this is another run")]
ANSWERS: list[Message] = [discovery.AnnouncementAcknowledged(), discovery.AnnouncementRefused(port=5005)]


# -- malformed messages -------------------------------------------------------------------------------------------

DEEP: list = []
for _ in range(40):
    DEEP = [DEEP]
JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([-1, 0, 1, 3, 65536, 2**31, 2**53, 10**400, -(10**30), 0.5, -0.0, 1e300]),
    st.sampled_from([float("inf"), float("-inf"), float("nan")]),
    st.sampled_from(["", "\ud800", "a\0b", "x" * 300, "\x1b[2J\n", "Join", "RoundStart", "leader", "ü"]),
    st.sampled_from([[], {}, [[]], [None], [1, 2], {"type": "Join"}, DEEP, [0, [5, "x"]], ["h", 10**6]]),
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
def garbled(draw: Callable[..., Any], messages: list[Message]) -> dict[str, Any]:
    message = encode_and_decode(draw(st.sampled_from(messages)))
    for _ in range(draw(st.integers(1, 3))):
        places = list(list_places(message))
        if not places:
            break
        container, key = draw(st.sampled_from(places))
        if isinstance(container, dict) and draw(st.booleans()) and draw(st.booleans()):
            del container[key]
        else:
            container[key] = copy.deepcopy(draw(JUNK))
    return json.loads(json.dumps(message))


def is_malformed(union: MessageUnion, message: dict[str, Any], **known: Any) -> bool:
    try:
        union.read(message, **known)
    except MalformedMessageError:
        return True
    return False


class LeaderHarness:
    """A leader whose round has its own member and two others."""

    def __init__(self) -> None:
        self.clock = StandingClock()
        self.loop = Loop(self.clock)
        self.notices: list[str] = []
        self.leader = make_leader(self.loop, CONFIG, lambda text, _kind=None: self.notices.append(text))
        self.own = self.leader.attach_local()
        self.own.owner = FakeLink()  # it only receives
        self.own.owner.on_message = lambda link, message: None
        self.own.send(self.build_join(0))
        self.loop.turn(0)
        self.links = [FakeLink("10.0.0.2"), FakeLink("10.0.0.3")]
        for number, link in enumerate(self.links, 1):
            self.leader.admit(link, self.build_join(number))
        assert [link.kinds()[:2] for link in self.links] == [[messages.Welcome, do.RoundStart]] * 2

    @staticmethod
    def build_join(number: int) -> messages.Join:
        return replace(JOIN, id=f"m{number}", index=number, local_addr=None, recovery=RecoveryRecord(), group_ranks=())

    def close(self) -> None:
        self.leader.close()
        self.loop.close()


@given(message=garbled(UP))
def test_a_malformed_message_disconnects_the_member_and_leaves_the_leader_as_it_was(message) -> None:
    harness = LeaderHarness()
    before: JobState = harness.leader.state
    harness.links[1].deliver(message)
    if is_malformed(messages.MEMBER_MESSAGES, message, id="m2", suspicion_s=0.0):
        assert harness.links[1].closed
        assert "invalid message" in harness.notices[-1]
        assert harness.leader.state == decide(before, MemberLost(id="m2", reason=""), harness.clock.now_s())[0]
    assert not harness.links[0].closed
    harness.links[1].deliver(rdzv.Leaving(reason="SIGTERM"))
    harness.links[0].deliver(messages.Heartbeat(number=1, echo_s=None))
    harness.clock.passed_s += 4.0
    harness.loop.turn(0)
    assert messages.HeartbeatReply in harness.links[0].kinds()
    harness.close()


@given(message=garbled([JOIN]))
def test_a_malformed_join_adds_no_member(message) -> None:
    harness = LeaderHarness()
    new_link = FakeLink()
    new_link.owner = harness.leader
    before = harness.leader.state
    new_link.deliver(message)
    if is_malformed(messages.MEMBER_MESSAGES, message):
        assert harness.leader.state is before
    harness.close()


class MemberHarness:
    """A member in a round; the test acts as its leader."""

    def __init__(self, **changes: Any) -> None:
        self.clock = StandingClock()
        self.loop = Loop(self.clock)
        self.network = FakeNetwork()
        self.events: list[Any] = []
        config = make_config(**{**vars(CONFIG), **changes})
        self.member = make_member(config, self.loop, self.network, "h1", self.events.append, nproc=2)
        self.member.join()

    def answer_dial(self) -> FakeLink:
        link = FakeLink("10.0.0.1")
        self.network.dials.pop(0)[2](link)
        return link

    def join_round(self) -> FakeLink:
        link = self.answer_dial()
        link.deliver(replace(QUERY_REPLY, role=discovery.DiscoveryRole.LEADER, id="leader", leader=None))
        link.deliver(messages.Welcome(leader_id="leader", listen_port=5000))
        link.deliver(ROUND)
        assert isinstance(self.collect_events()[-1], rdzv.RoundFormed)
        return link

    def collect_events(self) -> list[Any]:
        self.loop.turn(0)
        return self.events

    def close(self) -> None:
        self.member.close()
        self.loop.close()


@pytest.mark.parametrize(
    ("near", "hosts"),
    [("127.0.0.1", ["127.0.0.1", "10.0.0.2"]), ("10.0.0.7", ["10.0.0.7"])],
    ids=["on loopback", "through NAT"],
)
def test_a_successor_that_joined_on_loopback_listens_where_the_leader_sends_others(near: str, hosts: list[str]) -> None:
    """It listened on loopback alone: a node of another machine was refused, and took that for its end."""
    node = MemberHarness(host="localhost")
    link = node.answer_dial()
    link.local_host = near
    link.deliver(replace(QUERY_REPLY, role=discovery.DiscoveryRole.LEADER, id="leader", leader=None))
    link.deliver(messages.Welcome(leader_id="leader", listen_port=5000))
    link.deliver(ROUND)
    assert node.network.hosts == hosts
    node.close()


@given(message=garbled(DOWN))
def test_a_malformed_message_of_the_leader_ends_the_connection_and_changes_no_recovery_record(message) -> None:
    node = MemberHarness()
    link = node.join_round()
    carry = node.member.state.recovery.record
    link.deliver(message)
    if is_malformed(messages.LEADER_MESSAGES, message):
        assert link.closed
        assert node.member.state.recovery.record == carry
        events = node.collect_events()
        assert [event.kind for event in events if isinstance(event, rdzv.RoundBroken)] == [rdzv.BreakKind.FENCED]
        assert any(isinstance(event, rdzv.Notice) and "malformed message" in event.text for event in events)
        assert not any(isinstance(event, rdzv.RendezvousFailed) for event in events)
    node.collect_events()
    node.close()


def test_a_leader_that_sent_a_malformed_message_is_not_asked_again_at_once() -> None:
    node = MemberHarness()
    node.join_round().deliver({"type": "RoundStart"})
    node.collect_events()
    node.network.dials.clear()
    node.clock.passed_s += MALFORMED_PAUSE_S / 2
    node.collect_events()
    assert not node.network.dials
    node.clock.passed_s += MALFORMED_PAUSE_S
    node.collect_events()
    assert ("10.0.0.1", 5000) in [dial[:2] for dial in node.network.dials]
    node.close()


@given(message=garbled(REPLIES))
def test_a_node_with_a_malformed_reply_is_not_joined(message) -> None:
    node = MemberHarness()
    link = node.answer_dial()
    link.deliver(message)
    if is_malformed(discovery.QUERY_ANSWERS, message):
        assert link.closed
        assert link.kinds() == [discovery.LeaderQuery]
    node.collect_events()
    node.close()


@pytest.mark.parametrize("index", [0, 1])
@given(message=garbled(FIRST))
def test_a_malformed_first_message_closes_the_link(index: int, message) -> None:
    node = MemberHarness(node_index=index)
    node.collect_events()
    link = FakeLink()
    node.member.server.listen_for(link)
    node.network.listeners[-1](link, message)
    if is_malformed(discovery.FIRST_MESSAGES, message):
        assert link.closed
        assert set(link.kinds()) <= {messages.Rejected}
        said = "closed the connection from 10.0.0.9: malformed message ("
        assert any(isinstance(event, rdzv.Notice) and said in event.text for event in node.collect_events())
    node.collect_events()
    node.close()


@given(message=garbled(ANSWERS))
def test_a_malformed_reply_to_an_announcement_changes_nothing(message) -> None:
    node = MemberHarness()
    node.member._act(Lead(takeover=True))
    node.collect_events()
    node.network.dials.clear()
    node.member.server.claim_endpoint()
    node.collect_events()
    link = node.answer_dial()
    link.deliver(message)
    if is_malformed(discovery.ANNOUNCEMENT_ANSWERS, message):
        assert link.closed
        assert node.member.server.leader is not None
    node.collect_events()
    node.close()


def test_an_echo_from_the_future_does_not_extend_the_leaders_lease() -> None:
    harness = LeaderHarness()
    harness.links[0].deliver(messages.Heartbeat(number=1, echo_s=1e9))
    assert harness.leader.lease_until_s() < 1000.0
    harness.close()


# -- bugs in muster -----------------------------------------------------------------------------------------------

LEADER = "muster.agent.rendezvous.leader.leader"


def fail(*_args: Any, **_keywords: Any) -> None:
    raise TypeError("a bug")


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (f"{LEADER}.decide", rdzv.AllSucceeded(round_number=1)),
        (f"{LEADER}.HeartbeatReply", messages.Heartbeat(number=1, echo_s=None)),
        (f"{LEADER}.OutgoingMessages.record_acknowledgement", messages.EndAcknowledged()),
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
        ("muster.agent.rendezvous.member.state.MemberRecovery.with_round", ROUND),
        ("muster.agent.rendezvous.member.rounds.post_break", BREAK),
        ("muster.agent.rendezvous.member.lease_renewal.LeaseRenewal.record_reply", REPLY),
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
    node.member.server.listen_for(FakeLink())
    monkeypatch.setattr("muster.agent.rendezvous.member.server.Server._build_reply", fail)
    with pytest.raises(TypeError, match="a bug"):
        node.network.listeners[-1](FakeLink(), QUERY)
    node.close()


def test_a_round_number_far_too_high_is_rejected() -> None:
    """The round number only grows: once accepted, it could never be undone."""
    harness = LeaderHarness()
    before, new_link = harness.leader.state, FakeLink()
    new_link.owner = harness.leader
    join = encode_and_decode(replace(JOIN, index=None))
    join["recovery"]["round_number"] = 2**53 - 1
    new_link.deliver(join)
    assert new_link.closed
    assert harness.leader.state is before
    harness.close()


def test_an_invalid_local_addr_is_a_usage_error() -> None:
    node = MemberHarness(local_addr="two words")
    lost = node.collect_events()[-1]
    assert isinstance(lost, rdzv.RendezvousFailed)
    assert lost.usage
    assert "--local-addr 'two words'" in lost.reason
    node.close()


# -- summaries: nothing is decided on them ----------------------------------------------------------------------------


def test_the_leader_keeps_the_last_summary_of_each_member_and_decides_nothing() -> None:
    harness = LeaderHarness()
    before = harness.leader.state
    for step in (1, 2):
        harness.links[0].deliver(replace(SUMMARY, step=step))
    harness.clock.passed_s += 2.0
    assert harness.leader.state is before
    found = harness.leader.read_members()
    assert [(each.group_rank, each.is_leader, each.summary and each.summary.step) for each in found.members] == [
        (0, True, None),
        (1, False, 2),
        (2, False, None),
    ]
    assert (found.members[1].age_s, found.members[1].host, found.max_nodes) == (2.0, "h9", 3)
    harness.leader.record_loss(harness.leader._connections.find("m1"), "gone")  # type: ignore[arg-type]
    assert [each.index for each in harness.leader.read_members().members] == [0, 2]
    harness.close()


def test_a_member_sends_a_summary_only_where_nothing_waits() -> None:
    harness = MemberHarness()
    harness.member.send_summary(SUMMARY)
    link = harness.join_round()
    link.is_busy = True
    harness.member.send_summary(SUMMARY)
    assert rdzv.Summary not in link.kinds()
    link.is_busy = False
    harness.member.send_summary(SUMMARY)
    assert link.kinds()[-1] is rdzv.Summary
    assert harness.member.read_members() is None, "it does not lead"
    harness.member.close()
    harness.member.send_summary(SUMMARY)
    assert link.kinds().count(rdzv.Summary) == 1
