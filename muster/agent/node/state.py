"""The state of one node, which is input and output of `decisions.decide`: its phase, and what outlives phases."""

import signal
from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeAlias

from muster._shared.contract import DEFAULT_DRAIN_LIMIT_S
from muster._shared.layouts import StatusPageLayout
from muster._shared.records import assert_never, record
from muster._shared.transitions import expect
from muster.agent.node.actions import Finish, LocalFailure
from muster.agent.node.events import WorkerStack
from muster.agent.rendezvous.interface import Leaving
from muster.agent.round import Round

if TYPE_CHECKING:
    from muster.agent.node.events import SignalReceived
    from muster.agent.rendezvous.drain_ceiling import Ceiling

_MOST_DOUBLINGS = 6
"""For a script that reports no progress and fails now and then for weeks: the longest wait is a minute for a base of 1
s."""


@record
class NodeRules:
    """What the configuration says about this node's decisions."""

    nproc: int
    """Workers on this node; local ranks are 0..nproc-1."""
    shutdown_timeout_s: float = 30.0
    """The grace period."""
    stops_together: bool = False
    """All nodes of the job share a console and are stopped together: what one node prints, the others do not."""
    node_index: int | None = None
    """See `config.RendezvousConfig`."""
    restart_backoff_s: float = 0.0
    """Base of the exponential back-off before the second and later restarts of one cause; 0 means no back-off."""
    drain_limit_s: float = DEFAULT_DRAIN_LIMIT_S
    """How long a preemption may take until the workers get the stop signal; 0 means at once."""
    preempt_signals: frozenset[int] = frozenset({signal.SIGTERM})
    """The signals that announce a preemption."""
    sigterm_senders: str = ""
    """What usually sends SIGTERM here; "": a line about one does not say."""
    is_elastic: bool = False
    """Whether the job continues with fewer nodes, as long as `min` of them are left."""
    stacks_command: str = ""
    """The command that prints the stacks of all ranks."""
    stop_command: str = ""
    """The command that ends the job. "": the agent was started by hand."""
    asks_at_interrupt: bool = False
    """Whether the person at the terminal is asked what the first Ctrl-C is to do."""
    omp_num_threads: int | None = None
    """OMP_NUM_THREADS that workers get because the user has set none, for a line about it; None means no line."""
    loss: str = ""
    """What the job has lost with its earlier pods, for a line about it. "" means no line."""
    backoff_share: float = 1.0
    """Which share of the longest back-off this agent waits. It is drawn at random once, so that jobs that failed
    together do not restart together."""

    @property
    def prints_stop(self) -> bool:
        """Whether this node prints that it is being stopped."""
        return not self.stops_together or self.node_index in (None, 0)

    def describe_senders(self, signum: int) -> str:
        """Say what usually sends this signal, as the end of a line; "" if that is not known."""
        return f" (usually sent by {self.sigterm_senders})" if signum == signal.SIGTERM and self.sigterm_senders else ""

    @property
    def prints_leader_loss(self) -> bool:
        """Whether this node prints that the leader, which is usually node 0, was lost."""
        return not self.stops_together or self.node_index in (None, 0, 1)

    def find_longest_backoff_s(self, repeats: int) -> float:
        """Find the longest wait before the workers start: 0 for the first restart of a cause, then doubled.

        Args:
            repeats: restarts because of one cause without progress in between, including this one.
        """
        if repeats < 2 or self.restart_backoff_s <= 0.0:
            return 0.0
        return self.restart_backoff_s * float(2 ** min(repeats - 2, _MOST_DOUBLINGS))


@record
class NodeDrain:
    """A drain of the round that this node takes part in."""

    number: int
    kind: int = StatusPageLayout.STOP
    is_asked: bool = False
    """Whether a person waits for `DrainDone`."""
    is_join: bool = False
    """Whether nodes join."""
    is_over: bool = False
    """Whether the limit has passed: the next look reports which ranks are late."""
    is_done: bool = False
    """Whether `DrainDone` has reported that all ranks have done it."""
    ceiling: "Ceiling | None" = None
    """What the workers wait at; None if they have not been looked at yet, or if the drain is decided."""
    is_reported: bool = False
    step: int | None = None
    """The committed step."""
    last_rank: int | None = None
    """Of the local ranks that have stopped at the step, the one that ended last."""

    @property
    def is_stop(self) -> bool:
        """Whether the ranks were told to stop at a step."""
        return self.kind == StatusPageLayout.STOP and self.step is not None

    @property
    def is_wait(self) -> bool:
        """Whether the ranks were told to wait at a step."""
        return self.kind in (StatusPageLayout.PAUSE, StatusPageLayout.JOIN) and self.step is not None

    def has_reached(self, asked: int | None) -> bool:
        """Return whether a rank that has last asked about this step was told to stop."""
        return self.is_stop and asked is not None and self.step is not None and asked >= self.step


@record
class Preemption:
    """This node must leave soon."""

    signum: int
    """The signal that announced it."""
    at_s: float


class InterruptStep(Enum):
    """How far the question at the terminal is. An answer of the leader is awaited, or the choice of the person."""

    PAUSE = "pause"
    PERSON = "person"
    """The ranks wait, and the person is being asked."""
    CONTINUE = "continue"
    """The ranks must continue, and the question is over."""
    RESUME = "resume"
    """The ranks must continue, and will be asked to stop."""
    STOP = "stop"
    CHECKPOINT = "checkpoint"
    """The ranks save, but do not stop by themselves."""
    END = "end"
    """The ranks have agreed to save and end; only another Ctrl-C is awaited."""


@record
class Interrupt:
    """A Ctrl-C at the terminal, until the person's choice is carried out."""

    signal: "SignalReceived"
    """The signal, which has its ordinary effect if what is asked of the job is refused, late or lost."""
    step: InterruptStep = InterruptStep.PAUSE
    notice: str = ""
    """The last line of the leader that this node has printed since."""


@record
class FailureBook:
    """Which failures of a round have been reported to rendezvous, and which have not. Each worker has at most one."""

    unreported: tuple[LocalFailure, ...] = ()
    reported: frozenset[int] = frozenset()
    """Local ranks. Idleness is no failure and is reported separately."""


NO_FAILURES = FailureBook()
NO_STACKS: Mapping[int, WorkerStack] = MappingProxyType({})


# -- phases ----------------------------------------------------------------------------------------------------------


@record
class Starting:
    """The agent builds its parts; rendezvous has not been asked yet."""


@record
class Joining:
    """The node has no workers and waits for a round."""

    last: Round | None = None
    """The last round this node took part in."""


@record
class Delaying:
    """A round has formed, and its workers are not started yet."""

    round: Round
    is_held: bool
    """Whether the start waits until global rank 0 has started on another node, instead of for the back-off."""
    store_problem: LocalFailure | None = None
    """Why the round's store is lost, or cannot be reached; None otherwise."""


@record
class Running:
    """Workers of the round are being started or run."""

    round: Round
    awaited: frozenset[int]
    """Workers that `StartWorkers` asked for and that have neither started nor failed to start."""
    alive: frozenset[int] = frozenset()
    """Workers that exist."""
    succeeded: frozenset[int] = frozenset()
    failures: FailureBook = NO_FAILURES
    drain: NodeDrain | None = None
    """The drain that is in progress."""
    can_leave: frozenset[int] = frozenset()
    """Workers that can leave the round and take part in the next one."""

    @property
    def has_drain_step(self) -> bool:
        """Whether the step of a drain that ends the round is committed."""
        return self.drain is not None and self.drain.is_stop


@record
class Succeeded:
    """All workers of the round exited with 0, or stopped at a drain's step; the node waits for the others."""

    round: Round
    has_drain_step: bool = False
    """Whether a drain's step was committed before the last of them ended."""


class StopStep(Enum):
    """How far a stop has proceeded."""

    STACKS = "stacks"
    """Stacks are being collected; the signal follows."""
    GRACE = "grace"
    """The workers have the signal and may end by themselves."""
    KILLING = "killing"
    """`KillWorkers` is in progress."""


@record
class Rejoin:
    """After a stop: report that no worker of the round is left, and wait for the next round."""

    round: Round


@record
class StartNext:
    """After a stop: start the workers of a round that formed during it (after a change of leader)."""

    round: Round
    is_held: bool


@record
class Stopping:
    """The round's workers are being stopped."""

    round: Round
    step: StopStep
    signum: int
    """The signal with which the workers are asked to end."""
    alive: frozenset[int]
    failures: FailureBook
    then: Rejoin | StartNext | Finish
    """What follows once the workers are gone."""
    stacks: Mapping[int, WorkerStack] = NO_STACKS
    """Stacks by local rank, as far as they were collected."""
    can_leave: frozenset[int] = frozenset()
    """See `Running`."""
    leave: Leaving | None = None
    """Sent after the stacks: the other nodes then stop their workers, which these workers may wait for."""


@record
class Ended:
    """`Finish` has been returned; later events change nothing."""

    last: Round | None


Phase: TypeAlias = Starting | Joining | Delaying | Running | Succeeded | Stopping | Ended


@record
class NodeState:
    """The whole state of the node."""

    rules: NodeRules
    phase: Phase = Starting()
    rank0_started: int = 0
    """The number of the last round whose global rank 0 is known to have been started."""
    is_prepared: bool = False
    """Whether workers would start at once."""
    held_lines: tuple[str, ...] = ()
    """Lines about other nodes that ended. They are not printed if this node is stopped too, because then the whole job
    is."""
    break_line: str = ""
    """Why the round was broken, as far as it is known yet. The line is one of the held ones unless it is printed."""
    preemption: Preemption | None = None
    """Set if a drain was asked for because this node must leave soon."""
    hanging_round: int | None = None
    """The number of the round of a hang about which lines were printed. None: the last one is over."""
    requests: frozenset[int] = frozenset()
    """Numbers of people's requests that the leader has not answered."""
    interrupt: Interrupt | None = None
    """The question at the terminal, while it is open."""

    @property
    def round(self) -> Round | None:
        """The round this node takes part in, or last took part in; None before the first. It is kept nowhere else."""
        phase = self.phase
        match phase:
            case Starting():
                return None
            case Joining() | Ended():
                return phase.last
            case Delaying() | Running() | Succeeded() | Stopping():
                return phase.round
            case _:
                assert_never(phase)

    def find_round(self, number: int) -> Round | None:
        """Return the round of this number, if this node takes part in it. Its workers may not be started yet."""
        phase = self.phase
        if isinstance(phase, Stopping) and isinstance(phase.then, StartNext):
            found = phase.then.round
        elif isinstance(phase, Delaying | Running | Succeeded):
            found = phase.round
        else:
            return None
        return found if found.number == number else None

    @property
    def running_or_stopping(self) -> Running | Stopping:
        """The phase of workers that may exist."""
        return self.phase if isinstance(self.phase, Stopping) else expect(self.phase, Running)
