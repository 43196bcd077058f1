"""The leader's and the members' rules of a drain, one by one; `test_drain_simulation` has the histories."""

import itertools
import random
import re

import pytest
from doubles.leader_history import Leader, rules

from muster._shared.layouts import StatusPageLayout
from muster.agent.rendezvous import interface as rdzv
from muster.agent.rendezvous.consensus.actions import JobEnd, Notify, RoundBreak, RoundStart, RoundSummary
from muster.agent.rendezvous.consensus.drain import choose_step
from muster.agent.rendezvous.consensus.events import Reported
from muster.agent.rendezvous.consensus.state import RoundRunning
from muster.agent.rendezvous.consensus.waits import find_next_due_s
from muster.agent.rendezvous.drain_ceiling import RankSlot, build_ceiling, build_report, check_ceiling
from muster.agent.rendezvous.report_messages import Failed


def report(ceiling: int, *ranks: tuple[int, int], first: int = 0, refusal: str | None = None) -> rdzv.DrainReport:
    asking = tuple(
        rdzv.AskingRank(global_rank=number, asked=asked, stride=stride)
        for number, (asked, stride) in enumerate(ranks, first)
    )
    return rdzv.DrainReport(ceiling=ceiling, ranks=asking, refusal=refusal)


class TestChooseStep:
    def test_the_smallest_step_that_all_ranks_ask_about(self):
        rng = random.Random(4)
        for _ in range(2000):
            ranks = [(rng.randrange(40), rng.choice((1, 1, 2, 3, 4, 6, 10))) for _ in range(rng.randrange(1, 5))]
            ceiling = rng.randrange(60)
            lowest = max(ceiling, *(asked for asked, _ in ranks))
            period = 60  # every stride divides it
            found = [
                step
                for step in range(lowest, lowest + period)
                if all((step - asked) % stride == 0 for asked, stride in ranks)
            ]
            assert choose_step([report(ceiling, *ranks)]) == (found[0] if found else None)

    def test_every_nodes_ceiling_counts(self):
        assert choose_step([report(12, (9, 1)), report(20, (18, 2)), report(3, (2, 1))]) == 20

    def test_a_rank_that_has_not_asked_is_taken_to_ask_as_all_others_do(self):
        silent = rdzv.DrainReport(ceiling=0, has_silent=True)
        assert choose_step([report(9, (4, 4), (8, 4)), silent]) == 12
        assert choose_step([report(9, (4, 4), (8, 2)), silent]) is None

    def test_no_rank_asks(self):
        assert choose_step([report(0)]) is None

    def test_a_step_beyond_what_a_command_holds(self):
        most = StatusPageLayout.MAX_STEP
        assert choose_step([report(most, (most - 2, 3))]) is None


def slot(rank: int, asked: int | None, *, stride: int = 1, step: int | None = None, is_asking: bool = True) -> RankSlot:
    return RankSlot(global_rank=rank, step=step, asked=asked, stride=stride, is_asking=is_asking)


class TestCeiling:
    def test_it_is_above_every_published_step_and_verified_at_the_second_look(self):
        slots = [slot(0, 10), slot(1, 7, stride=3), slot(2, None, stride=0)]
        ceiling = build_ceiling(slots)
        assert (ceiling.step, ceiling.is_verified) == (13, False)
        checked = check_ceiling(ceiling, slots)
        assert (checked.step, checked.is_verified) == (13, True)
        asking = ((0, 10, 1), (1, 7, 3))
        built = build_report(checked, slots)
        assert [(rank.global_rank, rank.asked, rank.stride) for rank in built.ranks] == list(asking)

    def test_it_rises_with_a_margin_that_doubles_while_a_published_step_has_reached_it(self):
        ceiling = build_ceiling([slot(0, 10)])
        steps = []
        for asked in (11, 13, 17):
            ceiling = check_ceiling(ceiling, [slot(0, asked)])
            steps.append(ceiling.step)
            assert not ceiling.is_verified
        assert steps == [13, 17, 25]
        assert check_ceiling(ceiling, [slot(0, 24)]).is_verified

    def test_a_verified_ceiling_stays(self):
        ceiling = check_ceiling(build_ceiling([slot(0, 10)]), [slot(0, 10)])
        assert check_ceiling(ceiling, [slot(0, 11)]) == ceiling, "a rank that waits there has published it"


class Job(Leader):
    """A leader with a running round of three members."""

    def __init__(self, *, min_nodes: int = 3, max_nodes: int = 3) -> None:
        super().__init__(rules(min_nodes, max_nodes, max_restarts=0))
        self.join(0, 1, 2)
        if not isinstance(self.state.phase, RoundRunning):
            self.wait(10.0)
        assert isinstance(self.state.phase, RoundRunning)

    @property
    def number(self) -> int:
        return self.state.round_number

    def tell(self, index: int, message):
        return self.feed(Reported(id=f"m{index}", message=message))

    def ask(self, index: int = 1, number: int | None = None):
        asked = rdzv.DrainAsked(round_number=number or self.number, reason="received SIGTERM", limit_s=10)
        return self.tell(index, asked)

    def report(self, index: int, own: rdzv.DrainReport, drain: int = 1):
        return self.tell(index, rdzv.DrainReported(round_number=self.number, drain=drain, report=own))

    def agree(self, *asking: int):
        """These nodes ask, and step 5 is committed."""
        for index in asking or (1,):
            self.ask(index)
        for index in range(3):
            self.report(index, report(5, (4, 1), first=index))

    def succeed(self, index: int, drained_rank: int | None = None):
        return self.tell(index, rdzv.AllSucceeded(round_number=self.number, drained_rank=drained_rank))

    def drain(self, *asking: int):
        """All have stopped at step 5; the actions that follow."""
        self.agree(*asking)
        self.succeed(0, 0)
        self.succeed(2, 2)
        return self.succeed(1, 1)

    def reform(self) -> list[RoundStart]:
        return [each for each in self.wait(1.0) if isinstance(each, RoundStart)]


def kinds(actions) -> list[type]:
    return [each.__class__ for each in actions]


@pytest.fixture
def job():
    return Job()


class TestLeader:
    def test_a_drain_is_committed_when_all_have_reported(self, job):
        [begin] = job.ask()
        assert begin.ids == ("m0", "m1", "m2")
        assert begin.message == rdzv.DrainBegun(round_number=job.number, drain=1, limit_s=10)
        assert job.ask(2) == [], "one drain serves both"
        assert job.report(0, report(11, (10, 1))) == []
        assert job.report(1, report(12, (8, 2), first=1)) == []
        job.now_s += 0.015
        commit, line = job.report(2, report(13, (12, 1), first=2))
        assert commit.ids == ("m0", "m1", "m2")
        assert commit.message == rdzv.DrainCommitted(round_number=job.number, drain=1, step=14)
        assert re.findall(r"step \d+|\d+ ms|rank \d", line.text)[:3] == ["step 14", "15 ms", "rank 1"]
        assert job.report(2, report(99, (12, 1))) == [], "a committed step stays"

    def test_the_job_has_not_succeeded_when_a_rank_stopped_at_the_step(self, job):
        job.agree()
        job.succeed(0, 0)
        job.now_s += 2
        job.succeed(2, 2)
        line, end = job.succeed(1, 1)
        assert "; rank 1 was the" in line.text
        assert isinstance(end, JobEnd)
        assert (end.succeeded, end.is_drained, end.report) == (False, True, None)

    def test_in_an_elastic_job_the_others_go_on_without_an_attempt(self):
        job = Job(min_nodes=2)
        line, broken = job.drain(1)
        assert line.text.endswith("1 was the last")
        assert (broken.kind, broken.leaving) == (rdzv.BreakKind.DRAINED, ("m1",))
        assert broken.is_leave
        assert "(h1) leaves after step 5" in broken.reason
        job.stop_all(0, 2)
        job.tell(1, rdzv.Leaving(reason="received SIGTERM"))
        job.lose(1)
        starts = job.reform()
        assert [each.ids for each in starts] == [("m0",), ("m2",)]
        recovery = starts[0].facts.value.recovery
        assert (recovery.round_number, recovery.attempt) == (2, 0)

    def test_a_node_that_leaves_gets_no_assignment_before_it_says_so_either(self):
        job = Job(min_nodes=2)
        job.drain(1)
        job.stop_all(0, 1, 2)
        assert job.formed_of() == ["m0", "m2"]

    def test_a_spare_takes_the_place_of_the_node_that_leaves(self, job):
        job.join(3)
        _, broken = job.drain(1)
        assert (broken.kind, broken.leaving) == (rdzv.BreakKind.DRAINED, ("m1",))
        assert sorted(broken.ids) == ["m0", "m1", "m2", "m3"], "the spare must know whose part has ended"

    def test_all_that_have_asked_leave(self):
        job = Job(min_nodes=1)
        _, broken = job.drain(1, 0)
        assert set(broken.leaving) == {"m0", "m1"}
        assert "(h1), node 0 (h0) leave after" in broken.reason
        assert job.state.quorum_rounds[-1].ended == {0, 1}

    def test_a_node_that_asks_after_its_workers_have_stopped_leaves_too(self):
        job = Job(min_nodes=1)
        job.agree()
        job.succeed(0, 0)
        assert job.ask(0) == []
        job.succeed(2, 2)
        assert set(job.succeed(1, 1)[-1].leaving) == {"m0", "m1"}

    def test_with_too_few_others_the_job_ends_for_all(self):
        job = Job(min_nodes=2)
        _, end = job.drain(1, 2)
        assert (end.__class__, end.is_drained) == (JobEnd, True)

    @pytest.mark.parametrize(("min_nodes", "leaving"), [(1, ("m1",)), (2, ("m0", "m1"))])
    def test_a_loss_after_the_step_was_committed(self, min_nodes, leaving):
        job = Job(min_nodes=min_nodes)
        job.agree()
        broken, *_ = job.lose(2)
        assert (broken.kind, broken.leaving) == (rdzv.BreakKind.MEMBERSHIP, leaving)
        assert job.state.quorum_rounds[-1].ended == frozenset(), "their workers may still run"

    def test_a_loss_before_the_step_was_committed_ends_no_job(self, job):
        """A job of a fixed size waits for another node."""
        job.ask()
        broken, *_ = job.lose(2)
        assert (broken.kind, broken.leaving) == (rdzv.BreakKind.MEMBERSHIP, ())

    def test_the_job_has_succeeded_when_its_ranks_ended_before_the_step(self, job):
        job.agree()
        job.succeed(0)
        job.succeed(1)
        [end] = job.succeed(2)
        assert (end.succeeded, end.is_drained) == (True, False)

    def test_workers_that_have_ended_hold_nothing_up(self, job):
        job.succeed(2)
        [begin] = job.ask()
        assert begin.ids == ("m0", "m1")
        job = Job()
        job.ask()
        job.report(0, report(5, (4, 1)))
        job.report(1, report(7, (6, 1), first=1))
        commit, _ = job.succeed(2)
        assert (commit.step, commit.ids) == (7, ("m0", "m1", "m2")), "the third must know how the job ends"

    @pytest.mark.parametrize(
        ("own", "reason"),
        [
            (report(0, refusal="rank 2 decreases"), "rank 2 decreases"),
            (report(9, (4, 2), first=2), "there is no step that all ranks will ask about"),
        ],
    )
    def test_a_drain_without_a_common_step_is_withdrawn_as_a_whole(self, own, reason, job):
        job.ask()
        job.report(0, report(5, (4, 1)))
        job.report(1, report(6, (5, 2), first=1))
        withdrawal, line = job.report(2, own)
        assert withdrawal.ids == ("m0", "m1", "m2")
        assert withdrawal.message == rdzv.DrainWithdrawn(round_number=job.number, drain=1, reason=reason)
        assert isinstance(line, Notify)
        assert job.report(1, report(6, (5, 2))) == []
        assert job.ask()[0].drain == 2, "late reports of the first one do not count for the second"
        assert job.report(1, report(6, (5, 1)), drain=1) == []

    def test_ranks_that_never_ask_are_named_as_such(self, job):
        job.ask()
        for index in range(3):
            actions = job.report(index, rdzv.DrainReport(ceiling=0, has_silent=True))
        assert actions[0].reason == "no rank calls should_stop"

    def test_a_failure_ends_the_round_and_the_drain_with_it(self):
        job = Job(min_nodes=2)
        job.ask()
        job.report(0, report(5, (4, 1)))
        job.tell(2, Failed(round_number=job.number, failures=()))
        actions = job.wait(1.0)
        assert RoundBreak in kinds(actions)
        assert job.report(1, report(5, (4, 1))) == []

    def test_a_failure_on_the_last_attempt_fails_the_job_for_all_also_after_the_step_was_committed(self):
        job = Job(min_nodes=2)
        job.agree()
        job.fail(2)
        [broken] = [each for each in job.wait(1.0) if isinstance(each, RoundBreak)]
        assert (broken.kind, broken.leaving) == (rdzv.BreakKind.FINAL, ())

    def test_events_of_other_rounds_and_members_change_nothing(self, job):
        assert job.ask(number=7) == []
        assert job.ask(9) == []
        assert job.report(0, report(5, (4, 1))) == [], "no drain has begun"
        job.ask()
        assert job.report(0, report(5, (4, 1)), drain=4) == []

    def test_a_node_that_joins_does_not_break_a_drain(self):
        job = Job(min_nodes=2, max_nodes=4)
        job.ask()
        job.now_s += 100
        (told,) = job.join(3)
        assert isinstance(told, RoundSummary)
        assert told.ids == ("m3",)
        assert job.tell(3, rdzv.Prepared()) == []
        assert find_next_due_s(job.state, job.now_s) > job.now_s


def test_numbers_of_kinds_of_ranks_do_not_matter():
    """Any order of reports gives the same step."""
    reports = [report(5, (4, 2)), report(9, (1, 3), first=1), report(7, (2, 1), first=2)]
    assert len({choose_step(list(order)) for order in itertools.permutations(reports)}) == 1
