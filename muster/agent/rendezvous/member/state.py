"""What a member knows: one frozen record. `build_initial_state` makes the first one."""

from enum import Enum

from muster._shared.records import record, replace
from muster.agent.config import RendezvousConfig
from muster.agent.rendezvous.consensus.actions import JobEnd, RoundFacts, Successor
from muster.agent.rendezvous.consensus.quorum import build_quorum_round
from muster.agent.rendezvous.consensus.recovery import RecoveryRecord, find_later, merge_recovery
from muster.agent.rendezvous.interface import BreakKind, Saved
from muster.agent.rendezvous.member.events import Target
from muster.agent.rendezvous.protocol.job_rules import JobRules, build_job_rules
from muster.agent.rendezvous.transport.links import LinkEnd


@record
class MemberRecovery:
    """The recovery record, and what only this node knows beside it."""

    record: RecoveryRecord = RecoveryRecord()
    group_ranks: tuple[int | None, ...] = ()
    """This node's own ranks in the quorum rounds of the record."""
    version: int = 0
    """The version of the record that the leader has sent last; 0 if none yet."""
    highest_round: int = 0
    """The highest round that this node has heard of, because a leader that lost its memory begins with 1 again."""
    successors: tuple[Successor, ...] = ()
    leader_id: str | None = None
    leader_address: tuple[str, int] | None = None
    """Host of the last leader elsewhere, and the port of its process; 0 if none."""
    led_rounds: frozenset[int] = frozenset()
    """Rounds that the last leader formed while it was this node's leader. Its end counts for these."""

    @property
    def round_number(self) -> int:
        """The last round this node knows; 0 before the first."""
        return self.record.round_number

    @property
    def group_rank(self) -> int | None:
        """This node's own rank in that round; None if it has no assignment."""
        return self.group_ranks[-1] if self.group_ranks else None

    def with_leader(self, leader_id: str) -> "MemberRecovery":
        """Return the record after a leader has accepted this node."""
        led_rounds = self.led_rounds if self.leader_id == leader_id else frozenset()
        return replace(self, version=0, leader_id=leader_id, led_rounds=led_rounds)

    def with_round(self, facts: RoundFacts, group_ranks: tuple[int | None, ...]) -> "MemberRecovery":
        """Return the record after a round was formed.

        The last of `group_ranks` is None if this node does not take part in it.
        """
        told = facts.recovery
        return replace(
            self,
            record=replace(told, checkpoint=find_later(self.record.checkpoint, told.checkpoint)),
            group_ranks=group_ranks,
            version=told.version,
            highest_round=max(self.highest_round, told.round_number),
            successors=facts.successors,
            led_rounds=self.led_rounds | {told.round_number},
        )

    def with_record(self, told: RecoveryRecord) -> "MemberRecovery":
        """Return the record with a change by the leader. In a change of another round only the checkpoint counts."""
        if not self.record.is_same_round(told):
            checkpoint = find_later(self.record.checkpoint, told.checkpoint)
            return replace(self, version=told.version, record=replace(self.record, checkpoint=checkpoint))
        merged = merge_recovery(self.record, told)
        ranks = zip(self.record.quorum_rounds, self.group_ranks, strict=True)
        kept = tuple(rank for each, rank in ranks if any(each.is_same(one) for one in merged.quorum_rounds))
        return replace(self, version=told.version, record=merged, group_ranks=kept)

    def with_ended(self, round_number: int, group_ranks: frozenset[int]) -> "MemberRecovery":
        """Return the record after processes of these ranks of a round were seen to end."""
        quorum_rounds = tuple(
            replace(each, ended=each.ended | group_ranks) if each.round_number == round_number else each
            for each in self.record.quorum_rounds
        )
        return replace(self, record=replace(self.record, quorum_rounds=quorum_rounds))

    def with_leader_end(self, led_rounds: frozenset[int]) -> "MemberRecovery":
        """Return the record after the process that led these rounds was seen to end, even one without a round yet."""
        made = self
        for successor in self.successors:
            if (successor.host, successor.port) == self.leader_address:
                made = made.with_ended(self.round_number, frozenset({successor.group_rank}))
        for each in self.record.quorum_rounds:
            if each.round_number in led_rounds:
                made = made.with_ended(each.round_number, frozenset({each.leader_group_rank}))
        return made

    def is_leaders_index(self, index: int | None) -> bool:
        """Return whether the last leader had this node index."""
        if index is None:
            return False
        led = [each for each in self.record.quorum_rounds if each.round_number in self.led_rounds]
        return any(build_quorum_round(each).find_group_rank(index) == each.leader_group_rank for each in led)


NEVER = float("inf")


class Phase(Enum):
    """The member's relation to its leader."""

    APART = "apart"
    """It has no link to a leader, and searches for one or will."""
    JOINING = "joining"
    """It has a link, but no leader has accepted it yet."""
    JOINED = "joined"
    ENDED = "ended"
    """The supervisor knows the end, or needs none."""


class Once(Enum):
    """A line that is printed once; some are printed once in each round."""

    RULES = "rules"
    NO_ANSWER = "no answer"
    TAKEN_PORT = "taken port"
    SPARE = "spare"
    WAIT = "wait"
    LOSS = "loss"
    """Corrected by a line once as many nodes are here as before."""


@record
class Connection:
    """The one link to a leader, or to a node that may accept this one."""

    is_local: bool
    """Whether the leader is on this node."""
    peer_host: str = ""
    silent_host: str = ""
    """See `Link`."""
    is_accepted: bool = False
    listen_port: int = 0
    """A port on which only the leader's process listens; 0 if none, or unknown."""


@record
class MemberState:
    """Everything from which the member's decisions follow."""

    config: RendezvousConfig
    own_id: str
    job_rules: JobRules
    recovery: MemberRecovery
    connection: Connection | None = None
    is_searching: bool = False
    """Whether a search runs. It also runs while this node leads, for as long as the node would give way."""
    is_takeover: bool = False
    """Whether this node leads, or is a candidate, because it found no better leader."""
    is_endpoint_elsewhere: bool = False
    """Whether this node leads although the job's endpoint is another machine's address."""
    first_target: Target | None = None
    """The address to ask first."""
    promise_until_s: float = -NEVER
    """Until when this member joins no leader except its last one, by CLOCK_BOOTTIME."""
    search_failure: LinkEnd | None = None
    """Why the search has found nothing yet."""
    refusal: LinkEnd | None = None
    """The first failure that waiting cannot repair. It says more than a refused connection after it."""
    is_running: bool = False
    """Whether workers of a round may be alive here: from RoundFormed to `Stopped`. The round is that of `recovery`."""
    saved: Saved | None = None
    """The last checkpoint that its workers have saved, for the next leader if the link is down."""
    kinds_posted: frozenset[BreakKind] = frozenset()
    """How that round has been broken."""
    is_prepared: bool = True
    has_reported_prepared: bool = True
    """Whether the leader knows it, or will with the next join."""
    printed: frozenset[Once] = frozenset()
    job_end: JobEnd | None = None
    peak_bytes: int = 0
    """The peak memory of the job's largest worker, according to the leader."""
    has_ended: bool = False

    @property
    def phase(self) -> Phase:
        """See `Phase`."""
        if self.has_ended:
            return Phase.ENDED
        if self.connection is None:
            return Phase.APART
        return Phase.JOINED if self.connection.is_accepted else Phase.JOINING

    @property
    def is_leading(self) -> bool:
        """Whether the leader is on this node."""
        return self.connection is not None and self.connection.is_local

    @property
    def leader_address(self) -> tuple[str, int] | None:
        """Where this node's leader listens, if that is another node. Nodes that search for it here are told."""
        found = self.connection
        return (found.peer_host, found.listen_port) if found is not None and found.listen_port else None


def build_initial_state(config: RendezvousConfig, own_id: str) -> MemberState:
    """Return the state before `Started`, with the last checkpoint of the job's earlier incarnations."""
    known = MemberRecovery(record=RecoveryRecord(checkpoint=config.checkpoint))
    return MemberState(config=config, own_id=own_id, job_rules=build_job_rules(config), recovery=known)


def find_endpoint(config: RendezvousConfig) -> tuple[str, int]:
    """Return where the job's nodes search for their leader."""
    return config.host or "localhost", config.port
