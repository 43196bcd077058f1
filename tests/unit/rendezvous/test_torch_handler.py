"""What the agent makes of what one of torch's handlers finds, also after it was closed: it may block for long."""

import os
from collections.abc import Iterator, Sequence

import pytest
from doubles.leader_history import failure
from doubles.rendezvous_links import StandingClock, make_config

from muster._shared.records import replace
from muster._shared.reports import Stack
from muster.agent.diagnosis.hangs import HangJudge
from muster.agent.rendezvous import interface as rdzv
from muster.agent.rendezvous.report_messages import Failed, StacksTaken, Stopped
from muster.agent.rendezvous.torch_handlers import messages as torch_messages
from muster.agent.rendezvous.torch_handlers.messages import Order
from muster.agent.rendezvous.torch_handlers.rendezvous import STANDSTILL, TorchRendezvous
from muster.agent.rendezvous.torch_handlers.watch import FailedElsewhere
from muster.agent.runtime.loop import Loop

FOUND = rdzv.Notice(text="found")


class FakeThread:
    """Keeps its commands."""

    def __init__(self) -> None:
        self.orders: list[Order] = []

    def start(self) -> None:
        """Nothing."""

    def send_command(self, command: torch_messages.Command) -> None:
        self.orders.append(command.order)

    def stop(self) -> None:
        """Nothing."""


@pytest.fixture
def clock() -> StandingClock:
    return StandingClock()


@pytest.fixture
def loop(clock: StandingClock) -> Iterator[Loop]:
    loop = Loop(clock)
    yield loop
    loop.close()


@pytest.fixture
def posted() -> list[rdzv.RendezvousEvent]:
    return []


@pytest.fixture
def thread() -> FakeThread:
    return FakeThread()


@pytest.fixture
def rendezvous(loop: Loop, posted: list[rdzv.RendezvousEvent], thread: FakeThread) -> Iterator[TorchRendezvous]:
    config = make_config(backend="c10d-torch", host="localhost", max_nodes=1, max_restarts=1)
    rendezvous = TorchRendezvous(config, loop=loop, post=posted.append, make_thread=lambda _owner: thread)
    yield rendezvous
    rendezvous.close()


def test_a_finding_is_handled_on_the_loop(loop, rendezvous, posted) -> None:
    rendezvous.post_finding(FOUND)
    assert posted == []
    loop.turn()
    assert posted == [rdzv.Notice(text="found")]


def test_a_late_finding_is_written_to_no_descriptor_that_was_opened_since(loop, rendezvous, posted) -> None:
    rendezvous.close()
    pipes = [os.pipe() for _ in range(8)]  # they get the lowest numbers that are free
    try:
        rendezvous.post_finding(FOUND)
        loop.turn()
        for read_fd, _ in pipes:
            os.set_blocking(read_fd, False)
            with pytest.raises(BlockingIOError):
                os.read(read_fd, 1)
    finally:
        for fd in (fd for pipe in pipes for fd in pipe):
            os.close(fd)
    assert posted == []


def test_a_handler_that_forms_no_round_is_not_silent(loop, clock, rendezvous, posted) -> None:
    rendezvous.join()
    said = []
    for passed_s in (5.0, 30.0, 95.0, 200.0):
        clock.passed_s = passed_s
        loop.turn(0.0)
        said.append(len(posted))
        if passed_s == 95.0:
            rendezvous.post_finding(FORMED)
            loop.turn(0.0)
    line = "no round yet: c10d-torch, --nnodes 1; still trying; check that all nodes run, the address and the firewall"
    assert posted[:2] == [rdzv.Notice(text=line)] * 2
    assert said == [0, 1, 2, 3], "the third is the round"


FORMED = torch_messages.HandlerFormedRound(
    group_rank=0,
    group_world_size=2,
    rank_offset=0,
    world_size=2,
    role_rank_offset=0,
    role_world_size=2,
    master_addr="h",
    master_port=2,
    use_agent_store=False,
)
FAILURE = failure(1)
STACK = Stack(global_rank=0, node=0, local_rank=0, text="")


class Job:
    """One node of two, in its first round."""

    def __init__(self, loop: Loop, rendezvous: TorchRendezvous, posted: list[rdzv.RendezvousEvent]) -> None:
        self._loop = loop
        self._rendezvous = rendezvous
        self._posted = posted
        self.number = 0
        rendezvous.join()
        self.find(FORMED)

    def find(self, finding: torch_messages.ThreadFinding) -> list[rdzv.RendezvousEvent]:
        self._rendezvous.post_finding(finding)
        self._loop.turn()
        return self._take()

    def send(self, message: rdzv.NodeMessage) -> list[rdzv.RendezvousEvent]:
        self._rendezvous.send(message)
        return self._take()

    def fail(self) -> list[rdzv.RendezvousEvent]:
        """A worker fails, then all are stopped."""
        failed = Failed(round_number=self.number, failures=(replace(FAILURE, round=self.number),))
        return self.send(failed) + self.send(Stopped(round_number=self.number))

    def stand_still(self, for_s: float) -> list[rdzv.RendezvousEvent]:
        return self.send(rdzv.StoodStill(round_number=self.number, for_s=for_s))

    def look(self, *stacks: Stack) -> list[rdzv.RendezvousEvent]:
        return self.send(StacksTaken(round_number=self.number, number=STANDSTILL, stacks=stacks))

    def _take(self) -> list[rdzv.RendezvousEvent]:
        posted = self._posted[:]
        self._posted.clear()
        for event in posted:
            if isinstance(event, rdzv.RoundFormed):
                self.number = event.round.number
        return posted


@pytest.fixture
def job(loop: Loop, rendezvous: TorchRendezvous, posted: list[rdzv.RendezvousEvent]) -> Job:
    return Job(loop, rendezvous, posted)


class Judge(HangJudge):
    def describe_standstill(self, stacks: Sequence[Stack], for_s: float) -> str:
        return f"{[each.global_rank for each in stacks]} stand still for {for_s:.0f} s"


@pytest.fixture(autouse=True)
def _judge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("muster.agent.diagnosis.hangs.load_judge", Judge)


def test_a_node_tells_what_its_ranks_do_once_those_of_all_nodes_stand_still(job: Job, thread: FakeThread) -> None:
    assert job.stand_still(50.0) == []
    assert job.find(torch_messages.AllStandStill()) == [rdzv.StacksWanted(round_number=1, number=STANDSTILL)]
    [told] = job.look(STACK)
    assert told == rdzv.Notice(text="[0] stand still for 50 s", kind=rdzv.NoticeKind.STILL)
    [told] = job.stand_still(0.0)
    assert told == rdzv.Notice(text="the job goes on and no longer stands still", kind=rdzv.NoticeKind.STILL_OVER)
    assert job.stand_still(0.0) == []
    assert thread.orders == [Order.NEXT, Order.STAND_STILL, Order.MOVE, Order.MOVE]


def test_a_node_whose_ranks_go_on_tells_nothing_of_them(job: Job) -> None:
    job.stand_still(50.0)
    job.stand_still(0.0)
    assert job.find(torch_messages.AllStandStill()) == []
    job.stand_still(50.0)
    assert job.find(torch_messages.AllStandStill()) != []
    job.stand_still(0.0)
    assert job.look(STACK) == []


def test_a_round_begins_with_ranks_that_move(job: Job) -> None:
    job.stand_still(50.0)
    job.fail()
    job.find(FORMED)
    assert job.find(torch_messages.AllStandStill()) == []
    assert job.stand_still(0.0) == []


def test_a_failure_makes_a_new_attempt_of_this_node(job: Job, thread: FakeThread) -> None:
    [broken] = job.fail()
    assert isinstance(broken, rdzv.RoundBroken)
    assert (broken.kind, "(h1) exited with code 1" in broken.reason) == (rdzv.BreakKind.FAILURE, True)
    [formed] = job.find(replace(FORMED, group_rank=1))
    assert isinstance(formed, rdzv.RoundFormed)
    made = formed.round
    assert (made.number, made.attempt, made.restarts_left, made.group_rank, made.node_index) == (2, 1, 0, 1, 0)
    assert thread.orders == [Order.NEXT, Order.PAUSE, Order.NEXT]


def test_nodes_that_wait_make_a_new_round_and_no_attempt(job: Job, thread: FakeThread) -> None:
    for number in range(1, 8):
        [broken] = job.find(torch_messages.NodesWaiting(count=2))
        assert isinstance(broken, rdzv.RoundBroken)
        assert (broken.kind, "2 nodes waiting" in broken.reason) == (rdzv.BreakKind.MEMBERSHIP, True)
        assert job.find(torch_messages.NodesWaiting(count=2)) == []
        assert job.send(Stopped(round_number=number)) == []
        [formed] = job.find(FORMED)
        assert isinstance(formed, rdzv.RoundFormed)
        assert (formed.round.number, formed.round.attempt) == (number + 1, 0)
    assert thread.orders == [Order.NEXT, *[Order.PAUSE, Order.NEXT] * 7]


def test_the_last_failure_ends_the_job_once_the_others_know(job: Job, thread: FakeThread) -> None:
    job.fail()
    job.find(FORMED)
    [broken] = job.fail()
    assert isinstance(broken, rdzv.RoundBroken)
    assert broken.kind is rdzv.BreakKind.FINAL
    assert thread.orders[3:] == [Order.FAIL, Order.AWAIT_END]
    assert job.find(FailedElsewhere(reason="node 2 has failed", root=None)) == []
    [ended] = job.find(torch_messages.EndKnown(succeeded=False))
    assert isinstance(ended, rdzv.JobEnded)
    assert ended.prints_report
    assert ended.report is not None
    assert ended.report.reason == broken.reason


@pytest.mark.parametrize("is_waiting", [False, True])
def test_a_failure_elsewhere_ends_the_job_here(is_waiting: bool, job: Job, thread: FakeThread) -> None:
    if is_waiting:  # for the next round
        job.fail()
    posted = job.find(FailedElsewhere(reason="node 2 has failed", root=replace(FAILURE, node=2)))
    if not is_waiting:
        assert [each.reason for each in posted if isinstance(each, rdzv.RoundBroken)] == ["node 2 has failed"]
        assert job.send(Stopped(round_number=1)) == []
        assert thread.orders == [Order.NEXT, Order.AWAIT_END]
        posted = job.find(torch_messages.EndKnown(succeeded=False))
    [ended] = posted
    assert isinstance(ended, rdzv.JobEnded)
    assert (ended.succeeded, ended.prints_report) == (False, False)
    assert ended.report is not None
    assert [each.node for each in ended.report.failures] == [2]


def test_a_success_is_told_to_the_others_first(job: Job, thread: FakeThread) -> None:
    assert job.send(rdzv.AllSucceeded(round_number=1)) == []
    assert thread.orders == [Order.NEXT, Order.DONE]
    assert job.find(torch_messages.EndKnown(succeeded=True)) == [rdzv.JobEnded(succeeded=True)]
