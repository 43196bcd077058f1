"""Agreement among the nodes: which take part, with which ranks, and where MASTER_ADDR:MASTER_PORT is.

A backend implements the `Rendezvous` protocol below. It runs on the agent's loop, never blocks it, and posts the
events of this module through the function it is given. The supervisor alone starts and stops workers.

The order of calls and events, as the supervisor sees it::

    join() ................................... RoundFormed(1)
        workers run
        a worker fails -> report_failures()    RoundBroken(kind=FAILURE)    all nodes
        workers stopped -> report_stopped()    RoundFormed(2)               all nodes, fresh MASTER_PORT
        a node is lost                         RoundBroken(kind=MEMBERSHIP)
        workers stopped -> report_stopped()    RoundFormed(3)
        all done -> report_succeeded()         JobEnded(succeeded=True)     once every node has reported success
    close()

A drain, which ends a round at one step of all ranks::

    ask_drain() ............................ DrainBegun                         all nodes
        write a ceiling, look again
        report_drain()                       DrainCommitted or DrainWithdrawn   all nodes
        workers stop at the step
        report_succeeded(drained_rank=...)   JobEnded(is_drained=True)
                                             or RoundBroken(kind=DRAINED), if enough nodes stay

The ranks do the same when they save, or pause, at one step: a drain has a kind. What a person asks for begins one, too:

    ask(request, kind) ..................... DrainBegun (kind) ...              all nodes
        report_followed()                    RequestAnswered                    the node that was asked
"""

from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Protocol, TypeAlias

from muster._shared.contract import AskKind, StatusPageLayout
from muster._shared.fields import Count, Limit, Line, Range, Seconds, Step
from muster._shared.records import record
from muster.agent.round import Checkpoint, Round

if TYPE_CHECKING:  # only a failure loads the report
    from muster._shared.reports import Failure, Report, Stack
    from muster.agent.rendezvous.consensus.actions import Answer


class BreakKind(Enum):
    """Why a round ends before its workers are done."""

    FAILURE = "failure"
    """A worker of some node failed, and the budget allows another attempt."""
    MEMBERSHIP = "membership"
    """A node was lost or joined: a new round, not a new attempt."""
    FENCED = "fenced"
    """The other members may have given this node up: kill its workers at once, without grace."""
    FINAL = "final"
    """The job has failed for good; workers are stopped and JobEnded follows."""
    DRAINED = "drained"
    """All ranks have stopped at the step of a drain: the nodes that asked for it leave, the others go on without them.
    """


@record
class RoundFormed:
    """This node takes part in the round: start its workers."""

    round: Round
    is_held: bool = False
    """Start them only after GlobalRank0Started, if global rank 0's worker hosts the store: one that connects sooner is
    refused, and torch tries again a quarter to a whole second later. Limit the wait: that node may have more to
    prepare."""


@record
class GlobalRank0Started:
    """The workers of the node that has global rank 0 have been started."""

    round_number: int


@record
class RoundBroken:
    """Stop this node's workers of the round, then call `report_stopped`. At most once per round and kind."""

    round_number: int
    kind: BreakKind
    reason: str
    """One line for the console: "node 1 (host-b) was lost: connection closed"."""
    want_stacks: bool = False
    """Take the Python stacks of the workers before they are stopped, and hand them to `report_stopped`."""
    is_hang: bool = False
    """With the stacks, read the flight recorders."""
    leaves: bool = False
    """This node has no place in the next round: a drain ends the job for it."""
    is_leader: bool = True
    """This node leads: of several nodes that share a console, it is the one that prints the reason."""
    is_interrupt: bool = False
    """A node left because of a Ctrl-C."""


@record
class JobEnded:
    """The job has ended; exit now. Every agent gets the whole report."""

    succeeded: bool
    report: "Report | None" = None
    prints_report: bool = False
    """True on exactly one node of the job: the one that prints it."""
    peak_bytes: int = 0
    """The peak memory of the largest worker of the job; 0: the other nodes have not reported it."""
    is_drained: bool = False
    """A drain has ended the job before its work was done: it may be run again."""


@record
class AskingRank:
    """How far a rank has asked `muster.worker.should_stop`."""

    global_rank: Count
    asked: Step
    """The step last asked about."""
    stride: Annotated[int, Range(least=1, most=StatusPageLayout.MAX_STEP)]
    """The rank asks about `asked` plus multiples of this."""


@record
class DrainReport:
    """What a node reports once its workers wait at a ceiling."""

    ceiling: Step
    """No rank of this node goes on with this step, or a later one, before the drain is decided."""
    ranks: Annotated[tuple[AskingRank, ...], Limit(most=1 << 16)] = ()
    """The ranks that ask. Those that have ended, or have done no step, are left out: they hold nothing up."""
    has_silent: bool = False
    """A rank lives, and has neither done a step nor asked."""
    refusal: Line | None = None
    """Why no step can be agreed on with a rank of this node."""


@record
class LateRank:
    """A rank that has not done in time what was agreed on."""

    global_rank: Count
    step: Step | None
    """The last that it has reported; None: none."""
    silent_s: Seconds | None
    """Since then."""


@record
class DrainBegun:
    """Write a ceiling for the workers of the round, and call `report_drain`."""

    round_number: int
    drain: int
    limit_s: float
    """What the drain is for ends the workers so much later; of other kinds than a stop: when `report_followed` names
    the ranks that are late."""
    kind: int = StatusPageLayout.STOP
    is_asked: bool = False
    """A person waits for `report_followed`."""


@record
class DrainCommitted:
    """All ranks that ask stop at this step."""

    round_number: int
    drain: int
    step: int


@record
class DrainWithdrawn:
    """No step was agreed on: the workers go on."""

    round_number: int
    drain: int
    """0: the drain that was asked for has not begun."""
    reason: str


@record
class RequestAnswered:
    """What became of `ask`."""

    request: int
    answer: "Answer"


@record
class StacksWanted:
    """Collect the stacks of this node's workers, and call `report_stacks`."""

    round_number: int
    number: int


@record
class CheckpointCompleted:
    """All ranks of the job have saved this checkpoint: the next rounds have it."""

    checkpoint: Checkpoint


@record
class RendezvousFailed:
    """The nodes did not join in time, or no leader was found again: exit 69 (2 if `usage`)."""

    reason: str
    usage: bool = False


class NoticeKind(Enum):
    """How a line for the console is recorded: the name of its event record."""

    LINE = "notice"
    HANG = "hang_named"
    """It tells of a hang, with which the job goes on: `torchx status` shows it until one of the next kind."""
    HANG_OVER = "hang_ended"
    STILL = "stood_still"
    """The job stands still, which may be a hang: as with the two above, until the next one of a kind."""
    STILL_OVER = "moved_again"
    STACK = ""
    """Not at all: a page may have thousands."""


@record
class Notice:
    """One line for the console; changes nothing."""

    text: str
    kind: NoticeKind = NoticeKind.LINE
    is_leader_lost: bool = False
    """It is about the loss of the leader, which explains nothing if the whole job is being stopped."""


class PostNotice(Protocol):
    """Posts a `Notice`."""

    def __call__(self, text: str, kind: NoticeKind = NoticeKind.LINE) -> None:
        """See `Notice`."""
        ...


RendezvousEvent: TypeAlias = (
    RoundFormed
    | GlobalRank0Started
    | RoundBroken
    | DrainBegun
    | DrainCommitted
    | DrainWithdrawn
    | RequestAnswered
    | StacksWanted
    | CheckpointCompleted
    | JobEnded
    | RendezvousFailed
    | Notice
)
"""What a backend posts."""

PostEvent: TypeAlias = Callable[[RendezvousEvent], None]


class Lease(Protocol):
    """The fencing lease held by the guard; see `muster._shared.guard`."""

    def renew(self, until_boottime_s: float) -> None:
        """Let the workers run until this time of CLOCK_BOOTTIME; at expiry the guard kills them."""
        ...

    def release(self) -> None:
        """Have no lease: workers run until stopped."""
        ...


class Rendezvous(Protocol):
    """What the supervisor calls. No call blocks; none raises for faults of the network."""

    def join(self, *, is_prepared: bool = True, can_host_store: Callable[[], bool] = bool) -> None:
        """Find the leader, or lead, and ask to take part.

        Args:
            can_host_store: whether this node's agent would host the store of a round in which it has global rank 0;
                called for every round. The default is False.
            is_prepared: False while workers could not start at once if a round were formed now: a job that has as
                many nodes as it needs continues without this one until `report_prepared` is called.
        """
        ...

    def report_prepared(self) -> None:
        """Report after `join(is_prepared=False)` that workers would now start at once. Idempotent."""
        ...

    def report_started(self, round_number: int) -> None:
        """Report all of this node's workers as started; from global rank 0's node, all get GlobalRank0Started."""
        ...

    def report_failures(self, round_number: int, failures: "tuple[Failure, ...]") -> None:
        """Report failed workers of this node. The backend posts RoundBroken (FAILURE or FINAL)."""
        ...

    def report_idle(self, round_number: int, failures: "tuple[Failure, ...]", *, is_urgent: bool = False) -> None:
        """Report that no worker of this node makes progress (one failure per worker), or one does again (no failures).

        A node may be waiting for another: the job hangs only when every node that has not succeeded reports this, or
        one of them with `is_urgent`: torch is about to end a worker that has waited for too long. The backend then
        treats it as `report_failures` of all that have reported it.
        """
        ...

    def report_still(self, round_number: int, for_s: float) -> None:
        """Report that all workers of this node have stood still for so long; with 0 that they go on.

        Once all nodes do, the backend says so, and which rank the others wait for. Nothing follows from it.
        """
        ...

    def report_succeeded(self, round_number: int, drained_rank: int | None = None) -> None:
        """Report that all of this node's workers of the round have succeeded.

        Args:
            round_number: of the round.
            drained_rank: the global rank that ended last, if any of them has stopped at a drain's step.
        """
        ...

    def ask_drain(self, round_number: int, reason: str, limit_s: float) -> None:
        """Ask for a drain of the round; DrainBegun or DrainWithdrawn follows, unless the round is broken.

        Args:
            round_number: of the round.
            reason: why, for a line on the console: "received SIGTERM".
            limit_s: how long it may take until the workers have ended.
        """
        ...

    def report_drain(self, round_number: int, drain: int, report: DrainReport) -> None:
        """Report after DrainBegun that this node's workers wait at a ceiling, or why no step can be agreed on."""
        ...

    def report_followed(self, round_number: int, drain: int, late: tuple[LateRank, ...]) -> None:
        """Report that this node's workers have done what the drain wants, or that its limit is over: who is late."""
        ...

    def ask(self, round_number: int, request: int, kind: AskKind, limit_s: float) -> None:
        """Ask the leader for what a person wants of the job. RequestAnswered follows, unless the round is broken.

        Args:
            round_number: of the round.
            request: a number of this node's; the answer has it.
            kind: what is wanted.
            limit_s: how long it may take.
        """
        ...

    def report_stacks(self, round_number: int, number: int, stacks: "tuple[Stack, ...]", missing: int) -> None:
        """Report after StacksWanted the stacks of this node's workers; `missing` of them gave none."""
        ...

    def report_saved(self, round_number: int, step: int, path: str) -> None:
        """Report that all of this node's workers have saved a checkpoint of the step.

        CheckpointCompleted follows once all nodes of the round have reported the step, if one of them named a path.

        Args:
            round_number: of the round.
            step: of all of them.
            path: as the lowest rank of the node that named one has named it; "": none has.
        """
        ...

    def report_stopped(
        self, round_number: int, failures: "tuple[Failure, ...]" = (), stacks: "tuple[Stack, ...]" = ()
    ) -> None:
        """Report after RoundBroken that no worker is left here, with `failures` that were not reported before."""
        ...

    def report_leaving(self, reason: str, *, ends_job: bool = False, is_interrupt: bool = False) -> None:
        """Report that this node leaves (a signal): the others need not wait for silence. Call `close` afterwards.

        Args:
            reason: why, in a clause.
            ends_job: its user has ended the whole job here: the others stop, too.
            is_interrupt: by a Ctrl-C.
        """
        ...

    def close(self) -> None:
        """Flush what is queued (at most 1 s) and release every socket. Idempotent."""
        ...
