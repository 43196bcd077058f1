"""What the half that a feature has at the leader gets and returns: the module `leader` of the feature's folder.

It is pure. Its functions are those of `LeaderHalf`, which `parts` calls.
"""

from collections.abc import Mapping
from typing import Protocol

from muster._shared.records import NO_ITEMS, record
from muster._shared.reports import FinalFailure
from muster.agent.rendezvous.consensus.members import MemberRecord, RankAssignment, describe_node, find_leader_host
from muster.agent.round import PartMemory


@record
class PartJob:
    """The job as a half sees it, in a round that is about to form or runs."""

    round_number: int
    leader_id: str
    now_s: float
    """The leader's clock."""
    is_running: bool
    """Whether the round runs. Otherwise it is about to form, or has ended."""
    members: Mapping[str, MemberRecord]
    assignments: Mapping[str, RankAssignment]
    """The round's, by member."""

    def describe(self, member_id: str) -> str:
        """Return a member's name in messages."""
        member, rank = self.members.get(member_id), self.assignments[member_id].group_rank
        return f"node {rank}" if member is None else describe_node(member, rank)

    def find_address(self, member_id: str) -> tuple[str, int]:
        """Return host and port at which other nodes reach a member (`Rendezvous.open_stream`)."""
        member = self.members[member_id]
        return member.address or find_leader_host(self.members.values()), member.listen_port


@record
class Plan:
    """What a feature's half has planned for a round that is about to form."""

    memory: PartMemory | None = None
    """What the job remembers from then on."""
    shares: Mapping[str, str] = NO_ITEMS
    """What only one member's part must know, by member: content of a `PartShare`."""
    state: object = None
    """What the half knows of the round."""


@record
class PartDecision:
    """What follows from a report."""

    state: object
    """What the half knows of the round from now on."""
    memory: PartMemory | None = None
    """What the job remembers from now on; None changes nothing."""
    orders: tuple[tuple[tuple[str, ...], str], ...] = ()
    """Members, and the content of the order that they get."""
    lines: tuple[str, ...] = ()
    """For the leader's console."""
    final: FinalFailure | None = None
    """Why the job fails for good; None: it does not."""


class LeaderHalf(Protocol):
    """The functions of the module `leader`. Contents are JSON of the feature's own records."""

    def plan(self, job: PartJob, before: object, remembered: PartMemory | None, offers: Mapping[str, str]) -> Plan:
        """Plan the round that is about to form, from what the half knew of the last one and the offers by member."""
        ...

    def decide(self, job: PartJob, state: object, sender: str, content: str) -> PartDecision:
        """Decide on a member's report; `state` is None before there is any."""
        ...

    def choose_newer(self, known: PartMemory, other: PartMemory) -> PartMemory:
        """Choose between two memories of one round, in any order with the same result. Needed if the half has any."""
        ...
