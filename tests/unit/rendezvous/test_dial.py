"""The addresses of one host race: one that does not answer keeps no other waiting, and what is said when none does."""

import socket
from collections.abc import Iterator
from typing import Any

import pytest
from doubles.rendezvous_links import FakeLink, StandingClock

from muster.agent.rendezvous.transport.addresses import Address, Resolved
from muster.agent.rendezvous.transport.dial import RESOLVE_LIMIT_S, STAGGER_S, Dial
from muster.agent.rendezvous.transport.links import Cause, LinkEnd
from muster.agent.runtime.loop import Loop

TIMEOUT_S = 2.0
REFUSED = LinkEnd(reason="Connection refused")


def build_addresses(count: int) -> tuple[Address, ...]:
    return tuple((int(socket.AF_INET), f"10.0.0.{place + 1}") for place in range(count))


class FakeAttempt:
    def __init__(self, on_open: Any, on_failed: Any) -> None:
        self.on_open, self.on_failed = on_open, on_failed
        self.closed = False

    def close(self) -> None:
        self.closed = True


class Race:
    """A dial whose attempts end when the test says so."""

    def __init__(self) -> None:
        self.clock = StandingClock()
        self.loop = Loop(self.clock)
        self.attempts: dict[str, FakeAttempt] = {}
        self.opened: list[Any] = []
        self.failed: list[LinkEnd] = []
        self.dial = Dial(self.loop, self.try_address, self.opened.append, self.failed.append, TIMEOUT_S)

    def try_address(self, address: Address, on_open: Any, on_failed: Any) -> FakeAttempt:
        self.attempts[address[1]] = FakeAttempt(on_open, on_failed)
        return self.attempts[address[1]]

    def resolve(self, count: int) -> None:
        self.dial.try_addresses(Resolved(addresses=build_addresses(count)))

    def wait(self, seconds: float) -> None:
        """Let time pass, each timer at its own time."""
        end_s = self.clock.passed_s + seconds
        while self.clock.passed_s < end_s - 1e-9:
            self.clock.passed_s = min(end_s, self.clock.passed_s + 0.01)
            self.loop.turn(0)


@pytest.fixture
def race() -> Iterator[Race]:
    made = Race()
    yield made
    made.loop.close()


def test_a_silent_address_gives_way_to_the_next_one_which_wins(race: Race) -> None:
    race.resolve(2)
    race.wait(STAGGER_S - 0.02)
    assert list(race.attempts) == ["10.0.0.1"]
    race.wait(0.03)
    link = FakeLink("10.0.0.2")
    race.attempts["10.0.0.2"].on_open(link)
    assert (race.opened, link.silent_host) == ([link], "10.0.0.1")
    assert race.attempts["10.0.0.1"].closed
    race.wait(2 * TIMEOUT_S)
    assert (len(race.opened), race.failed) == (1, [])


def test_a_slow_first_address_wins_if_it_opens_first(race: Race) -> None:
    race.resolve(2)
    race.wait(STAGGER_S + 0.02)
    link = FakeLink("10.0.0.1")
    race.attempts["10.0.0.1"].on_open(link)
    assert (race.opened, link.silent_host) == ([link], "")
    assert race.attempts["10.0.0.2"].closed


def test_an_address_that_refuses_gives_way_at_once_and_is_not_silent(race: Race) -> None:
    race.resolve(2)
    race.attempts["10.0.0.1"].on_failed(REFUSED)
    link = FakeLink("10.0.0.2")
    race.attempts["10.0.0.2"].on_open(link)
    assert (race.opened, link.silent_host) == ([link], "")


def test_the_last_of_many_addresses_has_half_of_the_time(race: Race) -> None:
    race.resolve(8)
    race.wait(TIMEOUT_S / 2)
    assert len(race.attempts) == 8
    race.wait(TIMEOUT_S / 2 - 0.02)
    race.attempts["10.0.0.8"].on_open(FakeLink())
    assert (len(race.opened), race.failed) == (1, [])


def test_the_addresses_have_their_time_however_long_the_name_took(race: Race) -> None:
    """A name server that does not answer costs 5 s each time: no dial would ever succeed."""
    race.wait(5.0)
    assert not race.failed
    race.resolve(1)
    race.wait(TIMEOUT_S - 0.05)
    race.attempts["10.0.0.1"].on_open(FakeLink())
    assert (len(race.opened), race.failed) == (1, [])


def test_a_name_that_is_never_resolved(race: Race) -> None:
    race.wait(RESOLVE_LIMIT_S + 0.1)
    assert ["within 30 s" in each for each in [end.reason for end in race.failed]] == [True]
    race.resolve(1)  # later: nobody waits for it
    assert not race.attempts


@pytest.mark.parametrize(
    ("ends", "reason"),
    [
        ((None,), "no answer"),
        ((None, None), "no answer"),
        ((REFUSED, REFUSED), "Connection refused"),
        ((None, REFUSED), "10.0.0.2: Connection refused; 10.0.0.1: no answer"),
    ],
)
def test_what_is_said_when_no_address_can_be_reached(race: Race, ends: tuple[LinkEnd | None, ...], reason: str) -> None:
    race.resolve(len(ends))
    race.wait(TIMEOUT_S / 2)
    for attempt, end in zip(list(race.attempts.values()), ends, strict=True):
        if end is not None:
            attempt.on_failed(end)
    race.wait(TIMEOUT_S / 2 + 0.02)
    assert ([end.reason for end in race.failed], race.opened) == ([reason], [])


def test_a_refused_handshake_ends_it_at_once(race: Race) -> None:
    """Only a person can repair that; the other addresses are most likely the same node's."""
    refused = LinkEnd(reason="another token", cause=Cause.REFUSED)
    race.resolve(3)
    race.wait(STAGGER_S + 0.02)
    race.attempts["10.0.0.1"].on_failed(refused)
    assert race.failed == [refused]
    assert race.attempts["10.0.0.2"].closed
    race.wait(2 * TIMEOUT_S)
    assert (len(race.failed), len(race.attempts)) == (1, 2)


def test_closing_cancels_every_attempt_and_calls_nothing_back(race: Race) -> None:
    race.resolve(2)
    race.wait(STAGGER_S + 0.02)
    race.dial.close()
    assert all(attempt.closed for attempt in race.attempts.values())
    race.wait(RESOLVE_LIMIT_S)
    assert (race.opened, race.failed) == ([], [])
