"""Until when workers may run: the leader's own, and those of a member whose join was answered late."""

from collections.abc import Iterator

import pytest
from doubles.rendezvous_links import FakeLink, StandingClock, make_config, make_leader

from muster.agent.rendezvous.member.lease_renewal import LeaseRenewal
from muster.agent.rendezvous.protocol.messages import HeartbeatReply
from muster.agent.runtime.loop import Loop


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop(StandingClock())
    yield made
    made.close()


@pytest.mark.parametrize(("silence_s", "lease_s"), [(0.3, 0.2), (1.0, 2 / 3), (3.0, 2.0), (5.0, 4.0)])
def test_it_ends_before_the_silence_limit_and_not_at_once(loop: Loop, silence_s: float, lease_s: float) -> None:
    leader = make_leader(loop, make_config(keep_alive_interval_s=silence_s, keep_alive_max_attempt=1))
    assert leader.lease_until_s() == pytest.approx(200.0 + lease_s)
    leader.close()


class Member:
    """A member's renewal; as in the session, the silence of its leader ends it."""

    def __init__(self, loop: Loop) -> None:
        self.promises_s: list[float] = []
        self.renewal = LeaseRenewal(
            loop,
            None,
            interval_s=1.0,
            silence_s=5.0,
            get_version=int,
            on_silent=self.drop_leader,
            on_quorum_lost=self.drop_leader,
        )

    def drop_leader(self) -> None:
        self.promises_s.append(self.renewal.promise_until_s)
        self.renewal.stop()


def test_an_answer_to_the_join_that_comes_after_the_lease_drops_the_leader_once_and_for_good(loop: Loop) -> None:
    """A join with the index of a member that is lost only then, or an agent that was stopped meanwhile."""
    member, link = Member(loop), FakeLink()
    member.renewal.follow(link, since_s=loop.clock.boottime_s() - 4.5)
    now_s = loop.clock.boottime_s()
    assert member.promises_s == [now_s + 5.0]  # the leader may count on it from when it sent the answer
    assert (link.sent, member.renewal.is_leased_elsewhere) == ([], False)
    assert member.renewal.record_receipt()  # of the next leader
    assert len(member.promises_s) == 1


def test_an_answer_in_time_is_followed_by_heartbeats_and_the_lease_counts_from_the_join(loop: Loop) -> None:
    member, link = Member(loop), FakeLink()
    member.renewal.follow(link, since_s=loop.clock.boottime_s() - 3.5)
    assert (len(link.sent), member.promises_s) == (1, [])
    assert member.renewal.is_leased_elsewhere
    loop.clock.passed_s = 0.6
    assert not member.renewal.is_leased_elsewhere
    member.renewal.stop()


def test_an_answer_renews_the_lease_from_when_its_heartbeat_was_sent(loop: Loop) -> None:
    """The leader counts from when it received the heartbeat, which may be long before the answer arrives."""
    member, link = Member(loop), FakeLink()
    member.renewal.follow(link, since_s=loop.clock.boottime_s() - 3.5)
    loop.clock.passed_s = 0.4
    member.renewal.record_reply(HeartbeatReply(number=1, at_s=0.0))
    loop.clock.passed_s = 3.9
    assert member.renewal.is_leased_elsewhere
    loop.clock.passed_s = 4.1
    assert not member.renewal.is_leased_elsewhere
    member.renewal.stop()
