"""Messages from the leader to its members."""

from typing import Annotated

from muster._shared.codec import MessageUnion
from muster._shared.contract import StatusPageLayout
from muster._shared.fields import (
    Count,
    GroupRank,
    Host,
    Limit,
    Line,
    Name,
    Paragraph,
    Port,
    Range,
    RoundNumber,
    Seconds,
    Shared,
    Size,
    Step,
)
from muster._shared.records import record
from muster._shared.reports import FinalFailure, Report
from muster.agent.rendezvous.consensus.actions import Answer
from muster.agent.rendezvous.consensus.quorum import EndedRanks, RecoveredRound
from muster.agent.rendezvous.interface import BreakKind
from muster.agent.round import Checkpoint

DrainNumber = Annotated[int, Range(least=0, most=StatusPageLayout.MAX_DRAIN)]
"""0: the drain that was asked for has not begun."""

DrainKind = Annotated[int, Range(least=0, most=len(StatusPageLayout.KINDS) - 1)]


@record
class Successor:
    """The address of a member of the round that may take over when the leader is lost."""

    group_rank: GroupRank
    index: Count | None
    host: Host
    port: Port


@record
class Welcome:
    """The leader has accepted the member."""

    leader_id: Name
    listen_port: Port
    """A port that only the leader's process listens on; 0: none."""
    release: Name = ""
    """See `Join`."""


@record
class HeartbeatReply:
    """The leader has received a heartbeat."""

    number: Count
    at_s: Seconds
    """The leader's CLOCK_BOOTTIME, to be sent back."""
    ended: tuple[RoundNumber, EndedRanks] | None = None
    """A round, and the group ranks of it whose process end was seen."""


@record
class RoundFacts:
    """What every member must know of a round. Its size does not grow with the number of members."""

    round_number: RoundNumber
    attempt: Count
    startup_signature: Paragraph | None
    successors: Annotated[tuple[Successor, ...], Limit(most=64)]
    """The first members that may take over."""
    restarts_left: Count
    group_world_size: Size
    world_size: Size
    master_addr: Host
    master_port: Port
    use_agent_store: bool = False
    """The agent with group rank 0 hosts the store: all workers are its clients."""
    checkpoint: Checkpoint | None = None
    """The last one that all ranks of the job have saved."""


@record
class RoundStart:
    """A round in which the member has an assignment."""

    facts: Shared[RoundFacts]
    quorum_rounds: tuple[RecoveredRound, ...]
    """As the member is to know them: with its own rank."""
    group_rank: GroupRank
    rank_offset: Count
    role_rank_offset: Count
    role_world_size: Size

    def find_contradiction(self) -> str | None:
        """A rank that is not in the round."""
        facts = self.facts.value
        if self.group_rank >= facts.group_world_size or self.rank_offset >= facts.world_size:
            return f"group rank {self.group_rank} of {facts.group_world_size}"
        return None


@record
class RoundSummary:
    """A round in which the member has no assignment: it must find the next leader like the others."""

    facts: Shared[RoundFacts]
    quorum_rounds: tuple[RecoveredRound, ...]
    is_spare: bool = False
    """The job is full: the member waits as a spare."""


@record
class Rank0Started:
    """The workers of the node with global rank 0 have been started: see `interface.GlobalRank0Started`."""

    round_number: RoundNumber


@record
class RoundCommitted:
    """Every member of the round has acknowledged it: a quorum of older rounds is not needed any more."""

    round_number: RoundNumber


@record
class RoundBreak:
    """The round has ended: stop its workers."""

    round_number: RoundNumber
    kind: BreakKind
    reason: Line
    want_stacks: bool
    next_attempt: Count
    startup_signature: Paragraph | None
    is_hang: bool = False
    """The flight recorders are wanted, too."""
    final: FinalFailure | None = None
    """With `BreakKind.FINAL`, and only with it."""
    leaves: bool = False
    """A drain ends the job for this member."""
    ended: EndedRanks = frozenset()
    """With `BreakKind.DRAINED`: group ranks that have asked to leave and whose workers have ended."""
    is_interrupt: bool = False
    """A member left because of a Ctrl-C."""

    def find_contradiction(self) -> str | None:
        """See `codec`."""
        is_final = self.kind is BreakKind.FINAL
        return None if is_final == (self.final is not None) else "'final' contradicts 'kind'"


@record
class DrainBegin:
    """Write a ceiling for the workers, and report it."""

    round_number: RoundNumber
    drain: DrainNumber
    limit_s: Seconds
    kind: DrainKind = StatusPageLayout.STOP
    is_asked: bool = False


@record
class DrainCommit:
    """All ranks that ask stop at this step."""

    round_number: RoundNumber
    drain: DrainNumber
    step: Step


@record
class DrainWithdrawal:
    """No step was agreed on."""

    round_number: RoundNumber
    drain: DrainNumber
    reason: Line


@record
class StacksWanted:
    """Send the stacks of the workers of the round."""

    round_number: RoundNumber
    number: Count


@record
class RequestAnswer:
    """The answer to a person who has asked through this member."""

    request: Count
    answer: Answer


@record
class CheckpointComplete:
    """All ranks of the job have saved this checkpoint."""

    checkpoint: Checkpoint


@record
class JobEnd:
    """The job has ended."""

    succeeded: bool
    report: Shared[Report] | None
    prints_report: bool
    is_drained: bool = False


@record
class Exit:
    """All members have acknowledged the job's end: exit."""

    peak_bytes: Count = 0
    """The peak memory of the job's largest worker, as far as members have reported it."""


@record
class RendezvousFailure:
    """No round was formed within the join timeout."""

    reason: Line


@record
class Rejected:
    """This node is not accepted."""

    reason: Line
    usage: bool = False
    """It is a mistake of the caller."""


@record
class Redirect:
    """Another leader knows a later round."""

    host: Host
    port: Port


@record
class Goodbye:
    """The leader closes this connection; its process has not ended."""

    reason: Line


JobMessage = (
    RoundStart
    | RoundSummary
    | Rank0Started
    | RoundCommitted
    | RoundBreak
    | DrainBegin
    | DrainCommit
    | DrainWithdrawal
    | StacksWanted
    | RequestAnswer
    | CheckpointComplete
    | JobEnd
    | Exit
    | RendezvousFailure
    | Rejected
)
"""About rounds and the job's end."""

LeaderMessage = Welcome | HeartbeatReply | Redirect | Goodbye | JobMessage

LEADER_MESSAGES: MessageUnion[LeaderMessage] = MessageUnion(LeaderMessage)
