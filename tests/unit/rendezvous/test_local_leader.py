"""A job of one node answers what persons ask, by the rules of all other jobs."""

import pytest

from muster._shared.contract import AskKind, AskOutcome
from muster._shared.contract import StatusPageLayout as Layout
from muster.agent.cli.arguments import parse_args
from muster.agent.rendezvous.interface import (
    AllSucceeded,
    Asked,
    AskingRank,
    CheckpointCompleted,
    DrainAsked,
    DrainBegun,
    DrainCommitted,
    DrainFollowed,
    DrainReport,
    DrainReported,
    DrainWithdrawn,
    JobEnded,
    Notice,
    RequestAnswered,
    RoundFormed,
    Saved,
)
from muster.agent.rendezvous.report_messages import StacksTaken
from muster.agent.rendezvous.static import StandaloneRendezvous


class Node:
    """One node's rendezvous and what it has posted."""

    def __init__(self, nproc=2):
        self.posted, self.nproc = [], nproc
        config = parse_args(["--standalone", "--nproc-per-node", f"{nproc}", "x.py"], {}).rendezvous
        self.rendezvous = StandaloneRendezvous(
            config, nproc=nproc, loop=self, post=self.posted.append, node_name="host"
        )
        self.now = 0.0
        self.rendezvous.join()
        (formed,) = self.take()
        assert isinstance(formed, RoundFormed)

    @property
    def clock(self):
        return self

    def now_s(self):
        self.now += 0.5
        return self.now

    def take(self):
        posted, self.posted[:] = list(self.posted), []
        return posted

    def agree(self, step):
        begun = self.take()[0]
        assert isinstance(begun, DrainBegun)
        ranks = tuple(AskingRank(global_rank=rank, asked=step, stride=1) for rank in range(self.nproc))
        report = DrainReport(ceiling=step, ranks=ranks)
        self.rendezvous.send(DrainReported(round_number=1, drain=begun.drain, report=report))
        committed, notice = self.take()
        assert isinstance(notice, Notice)
        assert committed == DrainCommitted(round_number=1, drain=begun.drain, step=step)
        return begun


@pytest.fixture
def node():
    made = Node()
    yield made
    made.rendezvous.close()


def find_answer(posted):
    (answer,) = (each.answer for each in posted if isinstance(each, RequestAnswered))
    return answer


def test_a_checkpoint_is_answered_when_all_ranks_have_saved(node):
    node.rendezvous.send(Saved(round_number=1, step=3, path="/first"))
    assert [type(each) for each in node.take()] == [CheckpointCompleted]
    node.rendezvous.send(Asked(round_number=1, request=7, kind=AskKind.CHECKPOINT, limit_s=60.0))
    begun = node.agree(12)
    assert (begun.kind, begun.is_asked) == (Layout.CHECKPOINT, True)
    node.rendezvous.send(Saved(round_number=1, step=12, path="/second"))
    posted = node.take()
    answer = find_answer(posted)
    assert (answer.outcome, answer.step, answer.ranks) == (AskOutcome.DONE, 12, 2)
    completed = next(each.checkpoint for each in posted if isinstance(each, CheckpointCompleted))
    assert (completed.number, completed.step, completed.path) == (2, 12, "/second")
    assert any(isinstance(each, DrainWithdrawn) for each in posted), "ranks that wait go on"


def test_one_rank_is_not_all_ranks():
    node = Node(nproc=1)
    lines = []
    for kind, done in (
        (AskKind.CHECKPOINT, lambda _: Saved(round_number=1, step=7, path="")),
        (AskKind.PAUSE, lambda drain: DrainFollowed(round_number=1, drain=drain)),
        (AskKind.RESUME, None),
        (AskKind.STOP, lambda _: AllSucceeded(round_number=1, drained_rank=0)),
    ):
        node.rendezvous.send(Asked(round_number=1, request=1, kind=kind, limit_s=60.0))
        if done is not None:
            node.rendezvous.send(done(node.agree(7).drain))
        lines.append(find_answer(node.take()).line)
    node.rendezvous.close()
    assert [line.partition(" at step 7")[0] for line in lines if "step 7" in line] == [
        "the rank saved",
        "the rank waits",
        "the rank has stopped",
    ]
    assert not any("all 1 " in line for line in lines)


def test_a_stop_ends_the_job_as_drained(node):
    node.rendezvous.send(Asked(round_number=1, request=1, kind=AskKind.STOP, limit_s=60.0))
    node.agree(9)
    node.rendezvous.send(AllSucceeded(round_number=1, drained_rank=1))
    posted = node.take()
    assert find_answer(posted).line.startswith("all 2 ranks have stopped at step 9")
    assert posted[-1] == JobEnded(succeeded=False, is_drained=True)


def test_stacks_are_collected(node):
    node.rendezvous.send(Asked(round_number=1, request=1, kind=AskKind.STACKS, limit_s=60.0))
    (wanted,) = node.take()
    node.rendezvous.send(StacksTaken(round_number=1, number=wanted.number, stacks=(), missing=2))
    assert find_answer(node.take()).outcome is AskOutcome.LATE


def test_a_preemption_names_the_node(node):
    node.rendezvous.send(DrainAsked(round_number=1, reason="received SIGTERM", limit_s=10.0))
    begun = node.take()[0]
    node.rendezvous.send(
        DrainReported(
            round_number=1, drain=begun.drain, report=DrainReport(ceiling=0, refusal="rank 1 has a falling step")
        )
    )
    posted = node.take()
    assert [type(each) for each in posted] == [DrainWithdrawn, Notice]
    assert posted[1].text.startswith("node 0 (host) received SIGTERM, but rank 1 has a falling step")
    assert node.take() == []
