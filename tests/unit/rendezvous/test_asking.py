"""What persons ask of a job, as its leader decides it: one answer for each, and one winner."""

import pytest
from doubles.samples import make_failure
from doubles.two_members import TwoMembers

from muster._shared.codec import encode
from muster._shared.contract import AskKind, AskOutcome
from muster._shared.control import describe_answer, parse_answer
from muster._shared.fields import LateRank
from muster._shared.layouts import StatusPageLayout as Layout
from muster._shared.reports import ENDED, Answer, RankProgress, RankView, Stack
from muster.agent.diagnosis.hangs import HangJudge
from muster.agent.rendezvous import interface as rdzv
from muster.agent.rendezvous.consensus.actions import Notify, RoundBreak
from muster.agent.rendezvous.consensus.events import MemberLost, Reported
from muster.agent.rendezvous.report_messages import Idle, RequestAnswer, StacksTaken


class Job(TwoMembers):
    """What the leader does with requests; a second passes before each event."""

    def __init__(self, hang_action: str = "restart") -> None:
        super().__init__(hang_action)

    def send(self, *events, after_s: float = 1.0):
        actions = ()
        for event in events:
            self.now_s += after_s
            actions = self.decide(event)
        return list(actions)

    def ask(self, kind: AskKind, request: int = 1, member: str = "1"):
        asked = Reported(
            id=member, message=rdzv.Asked(round_number=self.number, request=request, kind=kind, limit_s=30.0)
        )
        return self.send(asked)

    def begin(self, kind: AskKind) -> None:
        self.ask(kind)
        self.agree()

    def agree(self, drain: int = 1):
        asking = [rdzv.AskingRank(global_rank=node, asked=10 + node, stride=1) for node in range(2)]
        reports = [rdzv.DrainReport(ceiling=12, ranks=(each,)) for each in asking]
        return [self.tell(node, rdzv.DrainReported, drain=drain, report=each) for node, each in enumerate(reports)][-1]

    def tell(self, node: int, kind: type, /, *, after_s: float = 1.0, **fields):
        """Node says this of the newest round."""
        return self.send(Reported(id=str(node), message=kind(round_number=self.number, **fields)), after_s=after_s)

    def idle(self, node: int, *failures, after_s: float = 1.0, is_urgent: bool = False):
        return self.tell(node, Idle, failures=failures, is_urgent=is_urgent, after_s=after_s)

    def follow(self, node: int, *late: LateRank, drain: int = 1):
        return self.tell(node, rdzv.DrainDone, drain=drain, late=late)

    def save(self, step: int, path: str = ""):
        return [self.tell(node, rdzv.Saved, step=step, path=path) for node in range(2)][-1]

    def drain(self, node: int):
        """The workers of a node have ended at the step."""
        return self.tell(node, rdzv.AllSucceeded, drained_rank=node)


def answers(actions) -> list[tuple[int, AskOutcome, str]]:
    return [
        (each.request, each.answer.outcome, describe_answer(each.answer))
        for each in actions
        if isinstance(each, RequestAnswer)
    ]


def kinds(actions) -> list[type]:
    return [each.__class__ for each in actions]


LATE = LateRank(global_rank=1, step=7, silent_s=31.0)


@pytest.fixture
def job():
    return Job()


def test_a_checkpoint_is_answered_when_all_have_saved_its_step(job):
    [begin] = [each for each in job.ask(AskKind.CHECKPOINT) if isinstance(each, rdzv.DrainBegun)]
    assert (begin.kind, begin.is_asked, begin.limit_s) == (Layout.CHECKPOINT, True, 30.0)
    assert [each.step for each in job.agree() if isinstance(each, rdzv.DrainCommitted)] == [12]
    assert answers(job.save(11)) == []
    actions = job.save(12, "/here")
    assert answers(actions) == [(1, AskOutcome.DONE, "all 2 ranks saved at step 12 in 6.0 s: /here")]
    assert rdzv.DrainWithdrawn in kinds(actions)
    assert rdzv.DrainBegun in kinds(job.ask(AskKind.PAUSE, 2))


@pytest.mark.parametrize("kind", [AskKind.PAUSE, AskKind.CHECKPOINT])
def test_a_loss_while_ranks_pause_or_save_ends_no_job(kind, job):
    """A job of a fixed size waits for another node."""
    job.begin(kind)
    [broken] = [each for each in job.send(MemberLost(id="1", reason="x")) if isinstance(each, RoundBreak)]
    assert broken.leaving == ()


def test_a_checkpoint_that_is_late_stays(job):
    job.begin(AskKind.CHECKPOINT)
    job.follow(0)
    actions = job.follow(1, LATE)
    [(_, outcome, line)] = answers(actions)
    assert outcome is AskOutcome.LATE
    assert line == (
        "after 4.0 s some ranks have not saved at step 12: rank 1 is at step 7 since 31 s; they may still save"
    )
    assert rdzv.DrainWithdrawn not in kinds(actions)
    assert answers(job.ask(AskKind.STOP, 2)) == [
        (2, AskOutcome.REFUSED, "not all ranks have saved at step 12: rank 1 is at step 7 since 31 s")
    ]
    assert answers(job.ask(AskKind.CHECKPOINT, 3)) == [
        (3, AskOutcome.REFUSED, "not all ranks have saved at step 12: rank 1 is at step 7 since 31 s")
    ], "it would have no answer: the nodes report once who is late"
    job.save(12)
    assert rdzv.DrainBegun in kinds(job.ask(AskKind.STOP, 4))


def test_a_pause_lasts_until_it_is_resumed(job):
    job.begin(AskKind.PAUSE)
    assert answers(job.follow(0)) == []
    [(_, outcome, line)] = answers(job.follow(1))
    assert outcome is AskOutcome.DONE
    assert line == "all 2 ranks wait at step 12, after 4.0 s; torch's own timeout of collectives keeps running"
    assert answers(job.ask(AskKind.PAUSE, 2)) == [(2, AskOutcome.DONE, "the job is paused at step 12 already")]
    assert answers(job.ask(AskKind.CHECKPOINT, 3)) == [
        (3, AskOutcome.REFUSED, "the job is paused at step 12: resume it first")
    ]
    actions = job.ask(AskKind.RESUME, 4)
    assert rdzv.DrainWithdrawn in kinds(actions)
    assert answers(actions) == [(4, AskOutcome.DONE, "the pause has ended after 7.0 s: all 2 ranks go on")]
    assert answers(job.ask(AskKind.RESUME, 5)) == [
        (5, AskOutcome.REFUSED, "the job is not paused; nothing was changed")
    ]


def test_a_pause_that_is_late_is_withdrawn(job):
    job.begin(AskKind.PAUSE)
    job.follow(0)
    actions = job.follow(1, LATE)
    assert rdzv.DrainWithdrawn in kinds(actions)
    assert [outcome for _, outcome, _ in answers(actions)] == [AskOutcome.LATE]
    assert rdzv.DrainBegun in kinds(job.ask(AskKind.CHECKPOINT, 2))


def test_no_step_was_agreed_on_in_time(job):
    job.ask(AskKind.PAUSE)
    actions = job.follow(1, LATE)
    assert answers(actions) == [(1, AskOutcome.LATE, "no step was agreed on in 1.0 s: rank 1 is at step 7 since 31 s")]
    assert rdzv.DrainWithdrawn in kinds(actions)


def test_ranks_that_never_ask(job):
    job.ask(AskKind.CHECKPOINT)
    refusal = "rank 1 has done step 7 and never called should_checkpoint"
    report = rdzv.DrainReport(ceiling=0, refusal=refusal)
    actions = job.tell(1, rdzv.DrainReported, drain=1, report=report)
    assert answers(actions) == [(1, AskOutcome.REFUSED, refusal)]


def test_two_who_ask_for_a_stop_are_both_answered_before_the_job_ends(job):
    job.ask(AskKind.STOP, 1)
    assert job.ask(AskKind.STOP, 2, member="0") == []
    job.agree()
    job.drain(0)
    actions = job.drain(1)
    assert [each[:2] for each in answers(actions)] == [(1, AskOutcome.DONE), (2, AskOutcome.DONE)]
    assert answers(actions)[0][2] == "all 2 ranks have stopped at step 12 and ended, after 5.0 s"
    assert kinds(actions)[:2] == [RequestAnswer, RequestAnswer]


def test_a_stop_names_the_checkpoint_from_which_another_job_can_go_on(job):
    job.begin(AskKind.STOP)
    job.save(12, "/runs/12")
    job.drain(0)
    actions = job.drain(1)
    assert [line.partition(" s; ")[2] for _, _, line in answers(actions)] == ["checkpoint: /runs/12"]


class TestContradictions:
    def test_the_first_of_pause_and_checkpoint_wins(self, job):
        job.ask(AskKind.PAUSE)
        assert answers(job.ask(AskKind.CHECKPOINT, 2)) == [
            (2, AskOutcome.REFUSED, "muster pause of 1.0 s ago is not done yet; nothing was changed")
        ]

    def test_the_same_twice_is_one(self, job):
        job.ask(AskKind.CHECKPOINT)
        assert job.ask(AskKind.CHECKPOINT, 2, member="0") == []
        job.agree()
        assert [request for request, *_ in answers(job.save(12))] == [1, 2]

    def test_a_stop_takes_the_place_of_a_pause(self, job):
        job.begin(AskKind.PAUSE)
        actions = job.ask(AskKind.STOP, 2)
        assert kinds(actions)[:3] == [RequestAnswer, rdzv.DrainWithdrawn, rdzv.DrainBegun]
        assert answers(actions) == [(1, AskOutcome.REFUSED, "the job is stopped instead (muster stop)")]
        assert answers(job.ask(AskKind.PAUSE, 3)) == [
            (3, AskOutcome.REFUSED, "the job is being stopped (muster stop); nothing was changed")
        ]

    def test_a_stop_waits_for_a_checkpoint_that_is_committed(self, job):
        job.begin(AskKind.CHECKPOINT)
        assert job.ask(AskKind.STOP, 2) == []
        actions = job.save(12)
        assert [request for request, *_ in answers(actions)] == [1]
        assert [each.kind for each in actions if isinstance(each, rdzv.DrainBegun)] == [Layout.STOP]

    def test_a_preemption_waits_on_when_a_person_is_told_of_a_late_checkpoint(self, job):
        job.begin(AskKind.CHECKPOINT)
        job.ask(AskKind.STOP, 2)
        job.tell(0, rdzv.DrainAsked, reason="received SIGTERM", limit_s=5.0)
        job.follow(0)
        assert [request for request, *_ in answers(job.follow(1, LATE))] == [1, 2]
        [begin] = [each for each in job.save(12) if isinstance(each, rdzv.DrainBegun)]
        assert (begin.kind, begin.limit_s, begin.is_asked) == (Layout.STOP, 5.0, False)
        assert list(job.state.phase.drain.leaving) == ["0"]

    def test_a_preemption_ends_a_pause(self, job):
        job.begin(AskKind.PAUSE)
        job.follow(0)
        job.follow(1)
        actions = job.tell(0, rdzv.DrainAsked, reason="received SIGTERM", limit_s=5.0)
        assert kinds(actions)[:2] == [rdzv.DrainWithdrawn, rdzv.DrainBegun]


def test_stacks_of_all_members(job):
    assert kinds(job.ask(AskKind.STACKS)) == [rdzv.StacksWanted]
    stack = Stack(global_rank=1, node=1, local_rank=0, text="File x")
    assert answers(job.tell(1, StacksTaken, number=1, stacks=(stack,))) == []
    [told] = job.tell(0, StacksTaken, number=1, stacks=(), missing=1)
    assert told.answer.outcome is AskOutcome.LATE
    assert told.answer.stacks == (stack,)


JUDGED = "what the judge says of all stacks"


class Judge(HangJudge):
    """Has something to say once it has the stacks of both ranks."""

    def describe_ranks(self, stacks):
        return [JUDGED] if len(stacks) == 2 else []

    describe_hang = describe_ranks


@pytest.fixture(autouse=True)
def _judge(monkeypatch):
    monkeypatch.setattr("muster.agent.diagnosis.hangs.load_judge", Judge)


def test_how_far_ranks_are_is_answered_with_their_stacks(job):
    job.tell(1, rdzv.Asked, request=7, kind=AskKind.STACKS, limit_s=60.0)
    for rank, step in ((1, 814), (0, 812)):
        progress = RankProgress(
            global_rank=rank, step=step, total=1000, rate=7.9, moved="", values=(("loss", "0.25"), ("lr", "nan"))
        )
        stack = Stack(global_rank=rank, node=rank, local_rank=0, text="File x", progress=progress)
        actions = job.send(
            Reported(id=str(rank), message=StacksTaken(round_number=job.number, number=1, stacks=(stack,)))
        )
    [told] = actions
    assert told.answer.line.startswith(f"{JUDGED}; the stacks of 2 of 2 ranks, in ")
    read = parse_answer(encode(told.answer, 1 << 20))
    assert (read.step, [each.step for each in read.progress]) == (812, [812, 814])
    assert (read.progress[0].values, read.progress[0].moved) == ((("loss", "0.25"), ("lr", "nan")), "")


def take(job, member, *stacks):
    return job.send(Reported(id=member, message=StacksTaken(round_number=job.number, number=1, stacks=stacks)))


STUCK = Stack(global_rank=0, node=0, local_rank=0, text="File x")
GONE = Stack(global_rank=1, node=1, local_rank=0, text="", view=RankView(global_rank=1, node=1, host="h1", state=ENDED))
IDLE = make_failure(
    host="h0", hung=True, reason="no collective and no step for 60 s (--hang-timeout auto: no step is known yet)"
)
PAGE = [
    ("hang_named", "the job hangs: no collective and no step for 60 s (--hang-timeout auto: no step is known yet)"),
    ("hang_named", JUDGED),
    ("", "stacks of rank 0:"),
    ("", "  File x"),
]


def read_page(actions):
    return [(each.kind.value, each.text) for each in actions if isinstance(each, Notify)]


def start_hung_job():
    """The workers of node 1 have ended; rank 0 waits for one of them."""
    job = Job(hang_action="report")
    job.tell(1, rdzv.AllSucceeded)
    actions = job.idle(0, IDLE, after_s=60.0)
    [wanted] = [each for each in actions if isinstance(each, rdzv.StacksWanted)]
    assert wanted.ids == ("0", "1"), "also the node whose workers have ended"
    return job


def test_a_rank_of_another_node_that_has_ended_is_named_in_the_page_of_a_hang():
    job = start_hung_job()
    assert read_page(take(job, "1", GONE)) == []
    assert read_page(take(job, "0", STUCK)) == PAGE


def test_a_hang_that_is_over_before_all_nodes_have_answered_prints_no_page():
    """Else the status of the app would tell of it until the next one."""
    job = start_hung_job()
    take(job, "1", GONE)
    over = job.idle(0)
    assert read_page(over) == [("hang_ended", "the job goes on: it has not hung")]
    assert read_page(take(job, "0", STUCK)) == []


def test_a_hang_is_over_when_a_node_succeeds():
    """What keeps the others waiting then is diagnosed anew."""
    job = Job(hang_action="report")
    for member in (0, 1):
        actions = job.idle(member, IDLE, after_s=60.0)
    assert rdzv.StacksWanted in kinds(actions)
    over = job.tell(1, rdzv.AllSucceeded)
    assert read_page(over) == [("hang_ended", "the job goes on: it has not hung")]
    assert rdzv.StacksWanted in kinds(job.idle(0, IDLE, after_s=60.0))


def test_a_hang_that_torch_is_about_to_end_is_told_while_another_node_works():
    job = Job(hang_action="report")
    assert rdzv.StacksWanted in kinds(job.idle(0, IDLE, is_urgent=True, after_s=570.0))
    assert rdzv.StacksWanted not in kinds(job.idle(0, IDLE, is_urgent=True)), "once"
    over = job.idle(0)
    assert read_page(over) == [("hang_ended", "the job goes on: it has not hung")]
    assert job.idle(0, IDLE, after_s=60.0) == []
    assert rdzv.StacksWanted in kinds(job.idle(1, IDLE, after_s=60.0))


def test_what_the_leader_sends_is_what_the_person_reads():
    stack = Stack(global_rank=1, node=1, local_rank=0, text="File x")
    sent = Answer(outcome=AskOutcome.LATE, line="é", step=12, ranks=2, took_s=1.5, late=(LATE,), stacks=(stack,))
    read = parse_answer(encode(sent, 1 << 20))
    assert (read.outcome, read.line, read.step, read.ranks, read.took_s) == (AskOutcome.LATE, "é", 12, 2, 1.5)
    assert [(each.global_rank, each.step, each.silent_s) for each in read.late] == [(1, 7, 31.0)]
    assert [(each.global_rank, each.text) for each in read.stacks] == [(1, "File x")]
