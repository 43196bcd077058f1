"""A job of one node: what follows once all of its failures are known, where a consequence was reported first."""

import pytest
from doubles.leader_history import failure

from muster.agent.cli.arguments import parse_args
from muster.agent.rendezvous.interface import BreakKind, JobEnded, RoundBroken, RoundFormed
from muster.agent.rendezvous.report_messages import Failed, Stopped
from muster.agent.rendezvous.static import StandaloneRendezvous

VICTIM = failure(0, round=1, global_rank=0, cause="network", exception="RuntimeError: Connection closed by peer")
CAUSE = failure(0, round=1, local_rank=1, global_rank=1, cause="unknown", exit_code=33)


class Node:
    """One node's rendezvous and what it has posted; it is the loop and the clock, too."""

    def __init__(self, *flags: str) -> None:
        self.posted: list = []
        words = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "1", *flags, "x.py"]
        config = parse_args(words, {}).rendezvous
        self.clock = self
        self.rendezvous = StandaloneRendezvous(config, nproc=2, loop=self, post=self.posted.append)  # type: ignore[arg-type]
        self.rendezvous.join()

    def now_s(self) -> float:
        return 100.0

    def fail(self, first, *late) -> list:
        """A worker fails, then all are stopped; what was posted."""
        self.posted.clear()
        self.rendezvous.send(Failed(round_number=1, failures=(first,)))
        self.rendezvous.send(Stopped(round_number=1, failures=late))
        self.rendezvous.close()
        return self.posted


def test_the_cause_takes_the_place_of_its_consequence() -> None:
    first, told, formed = Node().fail(VICTIM, CAUSE)
    assert isinstance(first, RoundBroken)
    assert (first.kind, first.is_provisional, first.explains) == (BreakKind.FAILURE, True, False)
    assert (told.kind, told.is_provisional, told.explains) == (BreakKind.FAILURE, False, True)
    assert (told.reason, told.cause) == ("rank 1 on node 0 (h0) exited with code 33", "unknown")
    assert isinstance(formed, RoundFormed)
    assert formed.round.attempt == 1


def test_a_cause_that_comes_first_is_told_once() -> None:
    first, formed = Node().fail(CAUSE, VICTIM)
    assert (first.reason, first.is_provisional) == ("rank 1 on node 0 (h0) exited with code 33", False)
    assert isinstance(formed, RoundFormed)


@pytest.mark.parametrize(
    ("policy", "attempt", "reason"),
    [
        ("exit 33: restart free", 1, "rank 1 on node 0 (h0) exited with code 33"),
        ("network: stop", 1, "rank 1 on node 0 (h0) exited with code 33"),
        ("exit 33: stop", None, "rank 1 on node 0 (h0) exited with code 33; --on 'exit 33: stop'"),
        ("network: restart free", 1, "rank 1 on node 0 (h0) exited with code 33"),
    ],
)
def test_the_rule_is_about_the_cause(policy: str, attempt: int | None, reason: str) -> None:
    flags = ("--max-restarts", "0") if "free" in policy and "33" in policy else ()
    _, told, last = Node("--on", policy, *flags).fail(VICTIM, CAUSE)
    assert told.reason == reason
    if attempt is not None:
        assert last.round.attempt == attempt
        return
    assert told.kind is BreakKind.FINAL
    assert isinstance(last, JobEnded)
    assert last.report.reason == reason
