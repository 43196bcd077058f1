"""Agreement among the nodes: who takes part, who has which rank, where MASTER_ADDR:MASTER_PORT is.

A backend is anything that keeps the `Rendezvous` protocol below. It lives on the agent's loop, never blocks it, and
tells what it learns by posting the events of this module. The supervisor alone starts and stops workers.

The order of things, as the supervisor sees it::

    join() ............................ RoundFormed(1)
        workers run
        a worker fails -> failed()      RoundBroken(kind=FAILURE)    all nodes
        workers stopped -> stopped()    RoundFormed(2)               all nodes, fresh MASTER_PORT
        a node is lost                  RoundBroken(kind=MEMBERSHIP)
        workers stopped -> stopped()    RoundFormed(3)
        all done -> succeeded()         JobEnded(succeeded=True)     once every node has said so
    close()
"""

from enum import Enum
from typing import TYPE_CHECKING, Protocol

from muster.agent.round import Round
from muster.agent.runtime.records import record

if TYPE_CHECKING:  # only a failure loads the report
    from muster.agent.diagnosis.report import Failure, Report, Stack


class BreakKind(Enum):
    """Why a round ends before its workers are done."""

    FAILURE = "failure"
    """A worker failed somewhere and the budget allows another attempt."""
    MEMBERSHIP = "membership"
    """A node was lost or joined: a new round, not a new attempt."""
    FENCED = "fenced"
    """This node may have been given up by the others: kill at once, without grace."""
    FINAL = "final"
    """The job has failed for good; workers are stopped and JobEnded follows."""


@record
class RoundFormed:
    """A round this node takes part in; start its workers."""

    round: Round
    is_held: bool = False
    """Start them only when RoundOpened comes, which is when global rank 0 has been started: a worker that looks for its
    store sooner is refused, and torch tries again a quarter of a second to a second later. Do not wait for ever: the
    node of global rank 0 may have more to prepare."""


@record
class GlobalRank0Started:
    """The workers of the node that has global rank 0 have been started."""

    number: int


@record
class RoundBroken:
    """Stop this node's workers of round `number`, then call `stopped`. Comes at most once per round and kind."""

    number: int
    kind: BreakKind
    reason: str
    """One line for the console: "node 1 (host-b) was lost: connection closed"."""
    want_stacks: bool = False
    """Take the Python stacks of the workers before they are stopped, and hand them to `stopped`."""


@record
class JobEnded:
    """The whole job is over; exit now. Every agent gets the whole report."""

    succeeded: bool
    report: "Report | None" = None
    prints_report: bool = False
    """True on exactly one node of the job: the one that prints it."""


@record
class RendezvousFailed:
    """The nodes did not come together in time, or the leader did not come back: exit 69 (2 if `usage`)."""

    reason: str
    usage: bool = False


@record
class Notice:
    """Something worth one line on the console and one event record; changes nothing."""

    text: str


class Lease(Protocol):
    """The fencing lease held by the guard; see `muster._guard`."""

    def renew(self, until_boottime_s: float) -> None:
        """Keep the workers alive until this time of CLOCK_BOOTTIME; at expiry the guard kills them."""
        ...

    def release(self) -> None:
        """No lease: workers live until stopped."""
        ...


class Rendezvous(Protocol):
    """What the supervisor asks of a backend. No call blocks; none raises for what the network does."""

    def join(self, *, is_prepared: bool = True) -> None:
        """Begin: find the leader (or be it) and ask to take part.

        Args:
            is_prepared: False while workers could not start at once if a round were formed now: a job that has as
                many nodes as it needs goes on without this one until `prepared` is called.
        """
        ...

    def report_prepared(self) -> None:
        """After `join(is_prepared=False)`: from now on workers start at once. Idempotent."""
        ...

    def report_started(self, round_number: int) -> None:
        """All of this node's workers of the round have been started: from global rank 0's node, RoundOpened to all."""
        ...

    def report_failures(self, round_number: int, failures: "tuple[Failure, ...]") -> None:
        """Workers of the round failed here. The backend answers with RoundBroken (FAILURE or FINAL)."""
        ...

    def report_idle(self, round_number: int, failures: "tuple[Failure, ...]") -> None:
        """No worker of the round shows life here (one failure per worker), or one does again (no failures).

        A node may well wait for another: only when every node that still works says so has the job come to a stop.
        The backend then takes it for `failed` of all of them.
        """
        ...

    def report_succeeded(self, round_number: int) -> None:
        """All of this node's workers of the round ended well."""
        ...

    def report_stopped(
        self, round_number: int, failures: "tuple[Failure, ...]" = (), stacks: "tuple[Stack, ...]" = ()
    ) -> None:
        """After RoundBroken: no worker of the round is left here. `failures` are those that came to light late."""
        ...

    def report_leaving(self, reason: str) -> None:
        """This node goes away on purpose (a signal): the others need not wait for silence. Call `close` afterwards."""
        ...

    def close(self) -> None:
        """Flush what must be said (bounded, at most 1 s) and release every socket. Idempotent."""
        ...
