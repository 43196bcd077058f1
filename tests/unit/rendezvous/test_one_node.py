"""A job of one node: the rules of all other jobs decide, and only its first round is formed without them."""

from collections.abc import Iterator

import pytest
from doubles.clocks import HandClock
from doubles.leader_history import failure

from muster._shared.contract import AskKind, AskOutcome
from muster._shared.layouts import StatusPageLayout as Layout
from muster._shared.records import replace
from muster._shared.reports import Failure
from muster.agent.cli.arguments import parse_args
from muster.agent.rendezvous import interface as rdzv
from muster.agent.rendezvous.one_node import LOAD_AFTER_S, OneNodeRendezvous
from muster.agent.rendezvous.report_messages import Failed, StacksTaken, Stopped
from muster.agent.round import Checkpoint, PartOffer, Round
from muster.agent.runtime.loop import Loop

VICTIM = failure(0, round=1, global_rank=0, cause="network", exception="RuntimeError: Connection closed by peer")
CAUSE = failure(0, round=1, local_rank=1, global_rank=1, cause="unknown", exit_code=33)


class Node:
    """One node's rendezvous and what it has posted."""

    def __init__(
        self, *flags: str, nproc: int = 2, can_host_store: bool = False, offers: tuple[PartOffer, ...] = (), **changes
    ) -> None:
        self.posted: list = []
        self.nproc = nproc
        words = ["--standalone", "--nproc-per-node", f"{nproc}", "--max-restarts", "1", *flags, "x.py"]
        config = replace(parse_args(words, {}).rendezvous, run_id="r", **changes)
        self.clock = HandClock()
        self.loop = Loop(self.clock)
        self.rendezvous = OneNodeRendezvous(
            config, nproc=nproc, loop=self.loop, post=self.posted.append, node_name="host"
        )
        self.rendezvous.join(can_host_store=lambda: can_host_store, list_offers=lambda: offers)
        (formed,) = self.take()
        assert isinstance(formed, rdzv.RoundFormed)
        self.round: Round = formed.round

    def send(self, message: rdzv.NodeMessage) -> None:
        self.clock.at_s += 0.5
        self.rendezvous.send(message)

    def wait(self, for_s: float) -> None:
        self.clock.at_s += for_s
        self.loop.turn(0.0)

    def take(self) -> list:
        posted, self.posted[:] = list(self.posted), []
        return posted

    def fail(self, first: Failure, *late: Failure, number: int = 1) -> list:
        """A worker fails, then all are stopped; what was posted."""
        self.send(Failed(round_number=number, failures=(first,)))
        self.send(Stopped(round_number=number, failures=late))
        return self.take()

    def agree(self, step: int) -> rdzv.DrainBegun:
        begun = self.take()[0]
        assert isinstance(begun, rdzv.DrainBegun)
        ranks = tuple(rdzv.AskingRank(global_rank=rank, asked=step, stride=1) for rank in range(self.nproc))
        report = rdzv.DrainReport(ceiling=step, ranks=ranks)
        self.send(rdzv.DrainReported(round_number=1, drain=begun.drain, report=report))
        committed, notice = self.take()
        assert isinstance(notice, rdzv.Notice)
        assert committed == rdzv.DrainCommitted(round_number=1, drain=begun.drain, step=step)
        return begun

    def close(self) -> None:
        self.rendezvous.close()
        self.loop.close()


@pytest.fixture
def node() -> Iterator[Node]:
    made = Node()
    yield made
    made.close()


# -- rounds ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nproc", [1, 2])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"local_addr": "h"},
        {"standalone": False, "backend": "static", "master_addr": "h", "master_port": 7, "node_index": 0},
        {"checkpoint": Checkpoint(number=4, step=3, path="/c")},
    ],
)
def test_the_first_round_is_the_one_that_the_leader_forms(nproc: int, changes: dict) -> None:
    """The leader forms it where a feature has something for it."""
    offers = (PartOffer(feature="none", content="{}"),)
    nodes = [Node(nproc=nproc, can_host_store=True, offers=each, **changes) for each in ((), offers)]
    for node in nodes:
        node.close()
    light, decided = (replace(node.round, master_port=1) for node in nodes)
    assert light == decided
    assert light.use_agent_store == (nproc > 1)


def test_it_is_not_formed_again_when_the_leader_is_loaded(node: Node) -> None:
    node.send(rdzv.AllStarted(round_number=1))
    node.wait(LOAD_AFTER_S)
    assert node.take() == []
    node.send(rdzv.AllSucceeded(round_number=1))
    assert node.take() == [rdzv.JobEnded(succeeded=True)]


def test_a_success_alone_needs_no_leader(node: Node) -> None:
    node.send(rdzv.AllSucceeded(round_number=1))
    assert node.take() == [rdzv.JobEnded(succeeded=True)]


@pytest.mark.parametrize(("backend", "is_fresh"), [("muster", True), ("static", False)])
def test_the_next_round_has_a_fresh_port_unless_one_is_named(backend: str, is_fresh: bool) -> None:
    node = Node(backend=backend, standalone=is_fresh, can_host_store=True)
    _, formed = node.fail(CAUSE)
    node.close()
    assert (formed.round.number, formed.round.attempt, formed.round.restarts_left) == (2, 1, 0)
    assert (formed.round.master_port != node.round.master_port) == is_fresh
    assert formed.round.hosts_store


def test_a_round_that_the_rules_hold_back_is_formed_later() -> None:
    node = Node("--max-restarts", "9")
    for number in range(1, 6):
        assert isinstance(node.fail(replace(CAUSE, round=number), number=number)[-1], rdzv.RoundFormed)
    held_back, _broken = node.fail(replace(CAUSE, round=6), number=6)
    assert "next one waits" in held_back.text
    node.wait(60.0)
    assert [each.round.number for each in node.take()] == [7]
    node.close()


# -- failures ----------------------------------------------------------------------------------------------------------


def test_the_cause_takes_the_place_of_its_consequence(node: Node) -> None:
    first, told, formed = node.fail(VICTIM, CAUSE)
    assert isinstance(first, rdzv.RoundBroken)
    assert (first.kind, first.is_provisional, first.explains) == (rdzv.BreakKind.FAILURE, True, False)
    assert (told.kind, told.is_provisional, told.explains) == (rdzv.BreakKind.FAILURE, False, True)
    assert ("(h0) exited with code 33" in told.reason, told.cause) == (True, "unknown")
    assert isinstance(formed, rdzv.RoundFormed)
    assert formed.round.attempt == 1


def test_a_failure_without_restarts_ends_the_job() -> None:
    node = Node("--max-restarts", "0")
    broken, ended = node.fail(CAUSE)
    node.close()
    assert broken.kind is rdzv.BreakKind.FINAL
    assert (ended.succeeded, ended.prints_report, ended.report.reason) == (False, True, broken.reason)


@pytest.mark.parametrize("is_by_hand", [True, False])
def test_a_node_leaves_where_its_scheduler_starts_another(is_by_hand: bool) -> None:
    node = Node("--on", "exit 33: elsewhere", is_by_hand=is_by_hand)
    broken = node.fail(CAUSE)[0]
    node.close()
    assert broken.leaves != is_by_hand


# -- what people ask ---------------------------------------------------------------------------------------------------


def find_answer(posted):
    (answer,) = (each.answer for each in posted if isinstance(each, rdzv.RequestAnswered))
    return answer


def test_a_checkpoint_is_answered_when_all_ranks_have_saved(node):
    node.send(rdzv.Saved(round_number=1, step=3, path="/first"))
    assert [type(each) for each in node.take()] == [rdzv.CheckpointCompleted]
    node.send(rdzv.Asked(round_number=1, request=7, kind=AskKind.CHECKPOINT, limit_s=60.0))
    begun = node.agree(12)
    assert (begun.kind, begun.is_asked) == (Layout.CHECKPOINT, True)
    node.send(rdzv.Saved(round_number=1, step=12, path="/second"))
    posted = node.take()
    answer = find_answer(posted)
    assert (answer.outcome, answer.step, answer.ranks) == (AskOutcome.DONE, 12, 2)
    completed = next(each.checkpoint for each in posted if isinstance(each, rdzv.CheckpointCompleted))
    assert (completed.number, completed.step, completed.path) == (2, 12, "/second")
    assert any(isinstance(each, rdzv.DrainWithdrawn) for each in posted), "ranks that wait go on"


def test_one_rank_is_not_all_ranks():
    node = Node(nproc=1)
    lines = []
    for kind, done in (
        (AskKind.CHECKPOINT, lambda _: rdzv.Saved(round_number=1, step=7, path="")),
        (AskKind.PAUSE, lambda drain: rdzv.DrainDone(round_number=1, drain=drain)),
        (AskKind.RESUME, None),
        (AskKind.STOP, lambda _: rdzv.AllSucceeded(round_number=1, drained_rank=0)),
    ):
        node.send(rdzv.Asked(round_number=1, request=1, kind=kind, limit_s=60.0))
        if done is not None:
            node.send(done(node.agree(7).drain))
        lines.append(find_answer(node.take()).line)
    node.close()
    assert [line.startswith("the rank ") for line in lines if "step 7" in line] == [True] * 3
    assert not any("all 1 " in line for line in lines)


def test_a_stop_ends_the_job_as_drained(node):
    node.send(rdzv.Asked(round_number=1, request=1, kind=AskKind.STOP, limit_s=60.0))
    node.agree(9)
    node.send(rdzv.AllSucceeded(round_number=1, drained_rank=1))
    posted = node.take()
    assert find_answer(posted).line.startswith("all 2 ranks ")
    assert posted[-1] == rdzv.JobEnded(succeeded=False, is_drained=True)


def test_stacks_are_collected(node):
    node.send(rdzv.Asked(round_number=1, request=1, kind=AskKind.STACKS, limit_s=60.0))
    (wanted,) = node.take()
    node.send(StacksTaken(round_number=1, number=wanted.number, stacks=(), missing=2))
    assert find_answer(node.take()).outcome is AskOutcome.LATE


def test_a_preemption_names_the_node(node):
    node.send(rdzv.DrainAsked(round_number=1, reason="received SIGTERM", limit_s=10.0))
    begun = node.take()[0]
    report = rdzv.DrainReport(ceiling=0, refusal="rank 1 falls")
    node.send(rdzv.DrainReported(round_number=1, drain=begun.drain, report=report))
    posted = node.take()
    assert [type(each) for each in posted] == [rdzv.DrainWithdrawn, rdzv.Notice]
    assert "rank 1 falls" in posted[1].text
    assert node.take() == []
