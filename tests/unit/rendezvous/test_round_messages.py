"""Which addresses the members of a round are told: they come from the joins alone."""

from doubles.leader_history import Leader, member, rules

from muster._shared.records import replace
from muster.agent.rendezvous.consensus.actions import RoundStart, RoundSummary
from muster.agent.rendezvous.consensus.events import Joined, MemberLost, Reported
from muster.agent.rendezvous.consensus.halves import PartJob
from muster.agent.rendezvous.report_messages import Stopped


def join(leader: Leader, number: int, **addresses) -> None:
    joined = replace(member(number), listen_port=5000 + number, **addresses)
    leader.feed(Joined(member=joined))


def list_starts(leader: Leader) -> list:
    return [action for action in leader.actions if isinstance(action, RoundStart)]


def test_the_leaders_host_is_what_the_others_see() -> None:
    leader = Leader(rules(3, 3))
    join(leader, 0)
    join(leader, 1)  # on the leader's machine, through loopback
    join(leader, 2, address="10.0.0.3", leader_address="10.0.0.1")
    starts = list_starts(leader)
    facts = starts[0].facts.value
    assert all(start.facts is starts[0].facts for start in starts), "it is encoded once"
    assert (facts.master_addr, facts.master_port) == ("10.0.0.1", 1000)
    assert [(each.group_rank, each.host, each.port) for each in facts.successors] == [
        (1, "10.0.0.1", 5001),
        (2, "10.0.0.3", 5002),
    ]
    state = leader.state
    job = PartJob(
        round_number=1, leader_id="", now_s=0.0, is_running=True, members=state.members, assignments=state.assignments
    )
    assert sorted(map(job.find_address, job.members)) == [("10.0.0.1", 5000), ("10.0.0.1", 5001), ("10.0.0.3", 5002)]


def test_an_address_that_the_leader_was_given_goes_before_what_others_see() -> None:
    leader = Leader(rules(2, 2))
    join(leader, 0, address="fd00::1")
    join(leader, 1, address="10.0.0.2", leader_address="10.0.0.1")
    assert list_starts(leader)[0].facts.value.master_addr == "fd00::1"


def test_nodes_of_one_machine_use_loopback() -> None:
    leader = Leader(rules(2, 2))
    join(leader, 0)
    join(leader, 1)
    assert list_starts(leader)[0].facts.value.master_addr == "127.0.0.1"


def test_a_spare_is_told_of_the_round_whether_it_came_before_or_during_it() -> None:
    leader = Leader(rules(2, 2))
    for number in (0, 1):
        join(leader, number)
    facts = list_starts(leader)[0].facts
    for number in (4, 5):
        join(leader, number)
        told = leader.only(RoundSummary)
        assert (told.ids, told.is_spare, told.group_ranks) == ((f"m{number}",), True, (None,))
        assert told.facts is facts
    leader.feed(MemberLost(id="m1", reason="connection closed"))
    leader.feed(Reported(id="m0", message=Stopped(round_number=1, port=2000)), after_s=1.0)
    starts = list_starts(leader)
    assert [start.ids for start in starts] == [("m0",), ("m4",)]
    told = leader.only(RoundSummary)
    assert (told.ids, told.facts) == (("m5",), starts[0].facts)
    assert told.facts.value.recovery.round_number == 2
