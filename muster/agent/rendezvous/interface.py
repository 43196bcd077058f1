"""Agreement among the nodes: which take part, with which ranks, and where MASTER_ADDR:MASTER_PORT is.

A backend implements the `Rendezvous` protocol below. It runs on the agent's loop, never blocks it, and posts the
events of this module through the function it is given. The supervisor alone starts and stops workers.

Each record is declared once: here, or in `report_messages` if it holds failures or stacks. A record that a node sends
is both the message on the wire and the event that the leader decides on. In the same way, the node decides on the
records that the leader sends. The limits of the fields are those of the wire.

The order of messages, as the supervisor sees it::

    join() ................................... RoundFormed(1)
        workers run
        a worker fails -> Failed               RoundBroken(kind=FAILURE)    all nodes
        workers stopped -> Stopped             [RoundBroken(explains=True)] all nodes
                                               RoundFormed(2)               all nodes, fresh MASTER_PORT
        a node is lost                         RoundBroken(kind=MEMBERSHIP)
        workers stopped -> Stopped             RoundFormed(3)
        all done -> AllSucceeded               JobEnded(succeeded=True)     once every node has reported success
    close()

A drain, which ends a round at one step of all ranks::

    DrainAsked ............................. DrainBegun                         all nodes
        write a ceiling, look again
        DrainReported                        DrainCommitted or DrainWithdrawn   all nodes
        workers stop at the step
        AllSucceeded(drained_rank=...)       JobEnded(is_drained=True)
                                             or RoundBroken(kind=DRAINED), if enough nodes stay

The ranks do the same when they save or pause at one step: a drain has a kind. A person's request also begins one:

    Asked .................................. DrainBegun (kind) ...              all nodes
        DrainDone                            RequestAnswered                    the node that was asked
"""

from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Protocol, TypeAlias

from muster._shared.contract import AskKind
from muster._shared.fields import (
    JSON,
    SPARSE,
    Count,
    LateRanks,
    Limit,
    Line,
    Name,
    Range,
    RoundNumber,
    Seconds,
    Step,
)
from muster._shared.layouts import StatusPageLayout
from muster._shared.records import record
from muster.agent.round import Checkpoint, CheckpointPath, PartMemory, PartOffer, Round

if TYPE_CHECKING:
    from muster._shared.reports import Answer, Report
    from muster.agent.rendezvous.report_messages import EvidenceMessage

DrainNumber = Annotated[int, Range(least=0, most=StatusPageLayout.MAX_DRAIN)]
"""The number of a drain; 0 if the requested drain has not begun."""

DrainKind = Annotated[int, Range(least=0, most=len(StatusPageLayout.KINDS) - 1)]


# -- from the leader ---------------------------------------------------------------------------------------------------


class BreakKind(Enum):
    """Why a round ends before its workers are done."""

    FAILURE = "failure"
    """A worker failed on some node, and the budget allows another attempt."""
    MEMBERSHIP = "membership"
    """A node was lost or joined: a new round, not a new attempt."""
    FENCED = "fenced"
    """The other members may have given this node up. Kill its workers at once, without grace."""
    FINAL = "final"
    """The job has failed for good. Workers are stopped, and JobEnded follows."""
    DRAINED = "drained"
    """All ranks have stopped at the step of a drain. The nodes that asked for it leave, and the others continue without
    them."""


@record
class RoundFormed:
    """This node takes part in the round: start its workers."""

    round: Round
    is_held: bool = False
    """Whether to start them only after GlobalRank0Started, if global rank 0's worker hosts the store.

    A worker that connects sooner is refused, and torch tries again a quarter to a whole second later. Limit the wait,
    because that node may have more to prepare.
    """


@record
class GlobalRank0Started:
    """The workers of the node that has global rank 0 have been started."""

    round_number: RoundNumber


@record
class RoundBroken:
    """Stop this node's workers of the round, then send `Stopped`. This comes at most once per round and kind.

    What is reported first may be a consequence. The workers are stopped at once in any case. The cause is reported
    again (`explains`) when all failures of the round are known.
    """

    round_number: RoundNumber
    kind: BreakKind
    reason: Line
    """One line for the console: "node 1 (host-b) was lost: connection closed"."""
    want_stacks: bool = False
    """Whether to take the Python stacks of the workers before they are stopped, and send them with `Stopped`."""
    is_hang: bool = False
    """Whether to read the flight recorders as well."""
    leaves: bool = False
    """Whether this node has no place in the next round: a drain ends the job for it, or, with `FAILURE`, it is at
    fault."""
    is_leader: bool = True
    """Whether this node leads: of several nodes that share a console, the leading one prints the reason."""
    is_interrupt: bool = False
    """Whether a node left because of a Ctrl-C."""
    is_join: bool = False
    """Whether nodes have joined, and nothing has failed."""
    is_leave: bool = False
    """Whether nodes leave as they were told to, and nothing has failed."""
    is_free: bool = False
    """Whether the restart uses none of those that are allowed."""
    cause: Name = ""
    """The class of the failure, one of `causes.CLASSES`; "" if there is no failure, or if it is unknown."""
    is_provisional: bool = False
    """Whether the reason may be a consequence of something still unknown. The same break with `explains` follows."""
    explains: bool = False
    """Whether this explains an earlier break of the round with `is_provisional`."""


@record
class JobEnded:
    """The job has ended; exit now. Every agent gets the whole report."""

    succeeded: bool
    report: "Report | None" = None
    prints_report: bool = False
    """Whether this node prints the report; True on exactly one node of the job."""
    peak_bytes: int = 0
    """The peak memory of the largest worker of the job; 0 if the other nodes have not reported it."""
    is_leader: bool | None = None
    """Whether this node leads and knows the whole job, even if node 0 was lost and came back; None if no node leads."""
    is_drained: bool = False
    """Whether a drain has ended the job before its work was done, so that it may be run again."""


@record
class DrainBegun:
    """Write a ceiling for the workers of the round, and send `DrainReported`."""

    round_number: RoundNumber
    drain: DrainNumber
    limit_s: Seconds
    """How much later the workers are ended by what the drain is for. For kinds other than a stop, when `DrainDone`
    names the late ranks."""
    kind: DrainKind = StatusPageLayout.STOP
    is_asked: bool = False
    """Whether a person waits for `DrainDone`."""
    is_join: Annotated[bool, SPARSE] = False
    """Whether nodes join: ranks that can leave the round may refuse a stop, and are then asked to wait."""


@record
class DrainCommitted:
    """All ranks that ask stop at this step."""

    round_number: RoundNumber
    drain: DrainNumber
    step: Step


@record
class DrainWithdrawn:
    """No step was agreed on; the workers continue."""

    round_number: RoundNumber
    drain: DrainNumber
    reason: Line


@record
class RequestAnswered:
    """The outcome of `Asked`.

    On the wire it is `report_messages.RequestAnswer`, which knows how to encode the answer.
    """

    request: Count
    answer: "Answer"


@record
class StacksWanted:
    """Collect the stacks of this node's workers, and send `StacksTaken`."""

    round_number: RoundNumber
    number: Count


@record
class CheckpointCompleted:
    """All ranks of the job have saved this checkpoint, and the next rounds have it.

    It travels in the recovery record.
    """

    checkpoint: Checkpoint


@record
class PartOrder:
    """What a feature's half at the leader says to the feature's part on this node, about a round."""

    round_number: RoundNumber
    feature: Name
    content: Annotated[str, Limit(most=2048), JSON]
    """A record of the feature."""


@record
class PartRemembered:
    """A feature remembers more of the running round than before. It travels in the recovery record."""

    round_number: RoundNumber
    memory: PartMemory


@record
class RendezvousFailed:
    """The nodes did not join in time, or no leader was found again. The exit code is 69 (2 if `usage`)."""

    reason: Line
    usage: bool = False


class NoticeKind(Enum):
    """How a line for the console is recorded, which is the name of its event record."""

    LINE = "notice"
    HANG = "hang_named"
    """A hang with which the job continues. `torchx status` shows it until a line of the next kind."""
    HANG_OVER = "hang_ended"
    HANG_CAUSE = "hang_explained"
    """Which ranks blocked the others in a hang that has ended the round."""
    STILL = "stood_still"
    """The job stands still, which may be a hang. It is shown like the two above, until the next line of such a kind."""
    STILL_OVER = "moved_again"
    STACK = ""
    """Not recorded, because a page may have thousands."""
    FINDING = "finding"
    """What the half of a feature at the leader has found, which names the feature."""


@record
class Notice:
    """One line for the console, which changes nothing."""

    text: Line
    kind: NoticeKind = NoticeKind.LINE
    ranks: Annotated[tuple[Count, ...], Limit(most=64), SPARSE] = ()
    """The first of the ranks that blocked the others, if it is the cause of a hang."""
    feature: Annotated[Name, SPARSE] = ""
    """Whose finding it is."""
    is_leader_lost: bool = False
    """Whether it is about the loss of the leader, which explains nothing if the whole job is being stopped."""


class PostNotice(Protocol):
    """Posts a `Notice`."""

    def __call__(
        self, text: str, kind: NoticeKind = NoticeKind.LINE, ranks: tuple[int, ...] = (), feature: str = ""
    ) -> None:
        """See `Notice`."""
        ...


PlainLeaderMessage: TypeAlias = (
    GlobalRank0Started | DrainBegun | DrainCommitted | DrainWithdrawn | StacksWanted | PartOrder
)
"""What a node decides on exactly as the leader sends it. Each is about a round."""

RendezvousEvent: TypeAlias = (
    PlainLeaderMessage
    | RoundFormed
    | RoundBroken
    | CheckpointCompleted
    | PartRemembered
    | RequestAnswered
    | JobEnded
    | RendezvousFailed
    | Notice
)
"""What a backend posts."""

PostEvent: TypeAlias = Callable[[RendezvousEvent], None]


# -- from a node -------------------------------------------------------------------------------------------------------


@record
class Prepared:
    """Workers would now start at once. This follows `join(is_prepared=False)`."""


@record
class AllStarted:
    """All workers of the node have been started.

    After global rank 0's node sends it, all others get GlobalRank0Started.
    """

    round_number: RoundNumber


@record
class StoodStill:
    """All workers of the node have stood still for this long, which may be a hang; 0 means that they continue.

    Once all nodes report it, the leader prints which rank the others wait for. It has no other consequence.
    """

    round_number: RoundNumber
    for_s: Seconds


@record
class AllSucceeded:
    """All workers of the node have succeeded, or have stopped at the step of a drain."""

    round_number: RoundNumber
    drained_rank: Count | None = None
    """The global rank that ended last, if any of them has stopped at the step of a drain."""


@record
class DrainAsked:
    """Let all ranks stop at one step. DrainBegun or DrainWithdrawn follows, unless the round is broken."""

    round_number: RoundNumber
    reason: Line
    """Why, for a line on the console: "received SIGTERM"."""
    limit_s: Seconds
    """How long it may take before the workers have ended."""


@record
class AskingRank:
    """The progress of a rank in asking `muster.worker.should_stop`."""

    global_rank: Count
    asked: Step
    """The step last asked about."""
    stride: Annotated[int, Range(least=1, most=StatusPageLayout.MAX_STEP)]
    """The rank asks about `asked` plus multiples of this."""


@record
class DrainReport:
    """What a node reports once its workers wait at a ceiling."""

    ceiling: Step
    """No rank of this node continues with this step, or a later one, before the drain is decided."""
    ranks: Annotated[tuple[AskingRank, ...], Limit(most=1 << 16)] = ()
    """The ranks that ask. Ranks that have ended, or have done no step, are omitted, because they delay nothing."""
    has_silent: bool = False
    """Whether a live rank has neither done a step nor asked."""
    refusal: Line | None = None
    """Why no step can be agreed on with a rank of this node."""


@record
class DrainReported:
    """The answer to DrainBegun: the workers wait at a ceiling, or no step can be agreed on with them."""

    round_number: RoundNumber
    drain: Count
    report: DrainReport


@record
class DrainDone:
    """The workers have done what the drain requires, or its limit is over. It names the late ranks."""

    round_number: RoundNumber
    drain: Count
    late: LateRanks = ()


@record
class Asked:
    """A person requests something of the job. RequestAnswered follows, unless the round is broken."""

    round_number: RoundNumber
    request: Count
    """The node's number of the request, which the answer repeats."""
    kind: AskKind
    limit_s: Seconds
    """How long it may take."""


@record
class Saved:
    """All workers of the node have saved a checkpoint of the step.

    CheckpointCompleted follows once all nodes of the round have reported it, if one of them named a path.
    """

    round_number: RoundNumber
    step: Step
    path: CheckpointPath = ""
    """The path, as named by the node's lowest rank that named one; "" if none has."""


@record
class PartReport:
    """What a feature's part on this node says to the feature's half at the leader, about a round."""

    round_number: RoundNumber
    feature: Name
    content: Annotated[str, Limit(most=2048), JSON]
    """A record of the feature."""


@record
class Leaving:
    """This node leaves because of a signal, so the others need not wait for silence. `close` follows.

    Its workers may still be stopping. The leader counts them as gone when the connection closes.
    """

    reason: Line
    """Why, in a clause."""
    ends_job: bool = False
    """Whether its user has ended the whole job there, so that the others stop as well."""
    is_interrupt: bool = False
    """Whether a Ctrl-C caused it."""
    is_planned: bool = False
    """Whether it was told to leave, so that nothing has failed."""


PlainNodeMessage: TypeAlias = (
    Prepared
    | AllStarted
    | StoodStill
    | AllSucceeded
    | DrainAsked
    | DrainReported
    | DrainDone
    | Asked
    | Saved
    | PartReport
    | Leaving
)
"""What a node sends without failures or stacks; its decisions build it."""

NodeMessage: TypeAlias = "PlainNodeMessage | EvidenceMessage"
"""What a node sends. All except `Prepared` and `Leaving` are about a round."""


# -- for people --------------------------------------------------------------------------------------------------------


@record
class Summary:
    """The status of a node, separate from everything that is decided. It may be lost, and nothing waits for it."""

    round_number: RoundNumber
    step: Step | None
    """The step of its rank that has done the fewest; None if one has done none."""
    most_step: Step | None
    """The step of its rank that has done the most."""
    text: Annotated[str, Limit(most=32768)]
    """A packed `telemetry.sampling.NodeSummary`. The leader of thousands of nodes unpacks only those that it shows."""


@record
class MemberStatus:
    """What the leader knows of a member."""

    index: Count | None
    host: str
    nproc: int
    group_rank: int | None
    """Its group rank in the current or last round; None if it takes no part."""
    is_leader: bool
    """Whether it is the leader's own node, which sends no summary."""
    is_stopping: bool = False
    """Whether its workers may still run after the end of a round."""
    suspicion: str = ""
    """Why it is the last choice; "" if it is not."""
    summary: Summary | None = None
    """The last summary."""
    age_s: float = 0.0
    """Time since the last summary arrived."""


STORM_REASON = "rounds were formed and broken again and again without a step"
"""Why the next round is held back."""


@record
class JobMembers:
    """The members that are connected to the leader."""

    members: tuple[MemberStatus, ...]
    max_nodes: int
    storm_s: float = 0.0
    """How much longer the next round is held back after a storm of rounds."""


@record
class LeaderClock:
    """The leader's clock as this node sees it, by the times of heartbeats and their answers.

    Both clocks are CLOCK_BOOTTIME.
    """

    own_id: str
    """This member's id."""
    leader_id: str
    """The leader's id; the same if this node leads."""
    ahead_s: float = 0.0
    """How much to add to this node's clock to get the leader's."""
    uncertainty_s: float = 0.0
    """By how much the difference may be wrong, in either direction."""


# -- what the supervisor uses ------------------------------------------------------------------------------------------


class Lease(Protocol):
    """The fencing lease held by the guard; see `muster._shared.guard`."""

    def renew(self, until_boottime_s: float) -> None:
        """Let the workers run until this time of CLOCK_BOOTTIME; at expiry the guard kills them."""
        ...

    def release(self) -> None:
        """Give up the lease. Workers then run until stopped."""
        ...


class Stream(Protocol):
    """A connection to the same feature on another node: blocking, for a thread. Close it.

    Both sides have proved the job's token. All methods except `close` and `abort` raise OSError if the connection
    breaks or stalls. `receive` raises ProtocolError for data that the other side has not sent.
    """

    def send(self, message: dict[str, object]) -> None:
        """Send a dictionary of JSON values, with a MAC. It must not have the key "refused"."""
        ...

    def receive(self) -> dict[str, object]:
        """Receive one dictionary."""
        ...

    def send_raw(self, data: memoryview) -> None:
        """Send bytes without a MAC, because a dictionary before them has their digest."""
        ...

    def receive_raw(self, into: memoryview) -> None:
        """Receive as many bytes as there is room for."""
        ...

    def abort(self) -> None:
        """Make the thread that uses the stream fail. Idempotent."""
        ...

    def close(self) -> None:
        """Close the stream. May be called again."""
        ...


class Rendezvous(Protocol):
    """What the supervisor calls. No call blocks; none raises for faults of the network.

    A backend without a leader inherits what only a leader can do.
    """

    def join(
        self,
        *,
        is_prepared: bool = True,
        can_host_store: Callable[[], bool] = bool,
        list_offers: Callable[[], tuple[PartOffer, ...]] = tuple,
        on_stream: "Callable[[str, Stream], None] | None" = None,
    ) -> None:
        """Find the leader, or lead, and ask to take part.

        Args:
            can_host_store: whether this node's agent would host the store of a round in which it has global rank 0;
                called for every round. The default is False.
            on_stream: gets connections that other nodes have opened, and for which feature; None accepts none.
            list_offers: returns what features have for the next round; called at each join and after each stop.
            is_prepared: False while workers could not start at once if a round formed now. A job that has enough nodes
                continues without this one until it sends `Prepared`.
        """
        ...

    def send(self, message: NodeMessage) -> None:
        """Send a message to the leader. A message about a round that is not this node's current one has no effect.

        `Idle` of one node is not yet a hang. The job hangs only when every node that has not succeeded reports it, or
        one of them with `is_urgent`. The backend then treats it as `Failed` of all nodes that have reported it.
        """
        ...

    def open_stream(
        self,
        feature: str,
        address: tuple[str, int],
        on_open: "Callable[[Stream], None]",
        on_failed: Callable[[str], None],
    ) -> None:
        """Connect to a feature on another node, at the host and port that the leader's half knows.

        Call one of the two callbacks, the second with the reason.
        """
        del feature, address, on_open
        on_failed("the other nodes, if there are any, are not known")

    def send_summary(self, summary: Summary) -> None:
        """Send the summary to the leader, unless the link is busy or there is none."""
        del summary

    def read_members(self) -> JobMembers | None:
        """Return what the leader knows of all nodes; None if it is not on this node, or the backend has no leader."""
        return None

    def read_clock(self) -> LeaderClock | None:
        """Return how the leader's clock and this node's compare; None if unknown, or if the backend has no leader."""
        return None

    def close(self) -> None:
        """Flush what is queued (at most 1 s) and release every socket. Idempotent."""
        ...
