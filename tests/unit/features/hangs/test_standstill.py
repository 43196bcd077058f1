"""A job that stands still is told of, and of which rank the others wait for; as its leader decides it."""

from typing import Any

import pytest
from doubles.two_members import TwoMembers

from muster._shared.reports import Collective, Group, RankProgress, RankView, Stack
from muster.agent.diagnosis.hangs import load_judge
from muster.agent.rendezvous.consensus.actions import Notify
from muster.agent.rendezvous.consensus.events import Reported
from muster.agent.rendezvous.interface import AllSucceeded, NoticeKind, StacksWanted, StoodStill
from muster.agent.rendezvous.report_messages import StacksTaken


class Job(TwoMembers):
    """What the leader wants and says."""

    def __init__(self) -> None:
        super().__init__(hang_action="report")

    def send(self, event: Any) -> list[Any]:
        return [action for action in self.decide(event) if isinstance(action, Notify | StacksWanted)]

    def stand_still(self, member: int, for_s: float) -> list[Any]:
        return self.send(Reported(id=str(member), message=StoodStill(round_number=self.number, for_s=for_s)))

    def look(self, wanted: StacksWanted, *stacks: Stack) -> list[Any]:
        """The members answer with their stacks."""
        told = []
        for member, stack in enumerate(stacks):
            event = Reported(
                id=str(member), message=StacksTaken(round_number=self.number, number=wanted.number, stacks=(stack,))
            )
            told += self.send(event)
        return told


def make_stack(rank: int, *, waits: bool, **progress: Any) -> Stack:
    entry = Collective(number=6, operation="all_reduce", sizes="", age_s=50.0, is_done=False)
    group = Group(
        name="0", description="default_pg", entered=6 if waits else 5, completed=5, entries=(entry,) if waits else ()
    )
    view = RankView(global_rank=rank, node=rank, host="h", is_answering=True, has_server=True, groups=(group,))
    shown = RankProgress(global_rank=rank, **{"still_s": 50.0, **progress})
    return Stack(global_rank=rank, node=rank, local_rank=0, text="", view=view, progress=shown)


WAITS, ABSENT = make_stack(0, waits=True), make_stack(1, waits=False)
NAMED = "rank 1 (node 1, h) did not enter all_reduce #6 of default_pg; rank 0 has waited in it for 50 s"


@pytest.fixture
def job() -> Job:
    return Job()


def test_all_members_must_stand_still(job: Job) -> None:
    assert job.stand_still(0, 50.0) == []
    job.now_s = 20.0
    [wanted] = job.stand_still(1, 50.0)
    [told] = job.look(wanted, WAITS, ABSENT)
    assert f"still: {NAMED}; " in told.text
    assert told.kind is NoticeKind.STILL
    assert told.ranks == (1,), "muster log --failed prints it where the job is cancelled then"


def test_it_is_said_again_at_intervals_that_double_and_taken_back(job: Job) -> None:
    asked = []
    for for_s in (50.0, 60.0, 99.0, 100.0, 150.0, 200.0):
        job.now_s = for_s
        for wanted in (*job.stand_still(0, for_s), *job.stand_still(1, for_s)):
            asked.append(for_s)
            assert [line.kind for line in job.look(wanted, WAITS, ABSENT)] == [NoticeKind.STILL]
    assert asked == [50.0, 100.0, 200.0]
    [told] = job.stand_still(1, 0.0)
    assert ("no longer stands" in told.text, told.kind) == (True, NoticeKind.STILL_OVER)
    assert job.stand_still(0, 0.0) == []


@pytest.mark.parametrize("progress", [{"moved": ""}, {"still_s": 1.0}])
def test_a_rank_that_has_moved_meanwhile_is_not_accused(progress: dict[str, Any], job: Job) -> None:
    job.stand_still(0, 50.0)
    [wanted] = job.stand_still(1, 50.0)
    waits, absent = make_stack(0, waits=False, **progress), make_stack(1, waits=False, is_busy=True, **progress)
    assert job.look(wanted, waits, absent) == []
    assert job.stand_still(0, 0.0) == [], "nothing was said that could be taken back"


def test_a_member_that_goes_on_while_the_ranks_are_looked_at_ends_it(job: Job) -> None:
    job.stand_still(0, 50.0)
    [wanted] = job.stand_still(1, 50.0)
    job.stand_still(1, 0.0)
    assert job.look(wanted, WAITS, ABSENT) == []


def test_of_a_program_that_has_done_nothing_yet_nothing_is_said() -> None:
    """It waits for orders, for instance, and uses no process group."""
    for still_s, said in ((None, []), (50.0, ["no rank seems to keep the others waiting; ranks 0-1: step 3"])):
        job = Job()
        job.stand_still(0, 50.0)
        [wanted] = job.stand_still(1, 50.0)
        step = None if still_s is None else 3
        stacks = [make_stack(rank, waits=False, still_s=still_s, step=step) for rank in range(2)]
        told = [line.text for line in job.look(wanted, *stacks)]
        assert told == [f"the job stands still, for 50 s now: {text}; nothing is stopped" for text in said]


def test_where_most_ranks_are_is_said_where_none_waits_for_another() -> None:
    stacks = []
    for rank, line in enumerate((7, 9, 9)):
        text = f'Current thread 0x1 (most recent call first):\n  File "/w/main.py", line {line} in main\n'
        progress = RankProgress(global_rank=rank, still_s=50.0)
        stacks.append(Stack(global_rank=rank, node=rank, local_rank=0, text=text, progress=progress))
    assert "ranks 1-2 are at main.py:9" in load_judge().describe_standstill(stacks, 50.0)


def test_members_that_have_succeeded_are_not_waited_for(job: Job) -> None:
    job.send(Reported(id="0", message=AllSucceeded(round_number=job.number)))
    [wanted] = job.stand_still(1, 50.0)
    assert wanted.ids == ("0", "1")
    assert job.stand_still(0, 50.0) == []
