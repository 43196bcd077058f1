"""What became of a job, from the records of its agent: state, recoveries and goodput."""

from typing import Any

import pytest
from doubles.record_histories import RECORDS
from doubles.samples import make_record
from hypothesis import example, given

from muster._shared.goodput import CAUSES
from muster._shared.job_history import JobHistory
from muster._shared.job_view import MOST_EVENTS, MOST_RECOVERIES, JobState


class Job:
    """A history and its clock."""

    def __init__(self) -> None:
        self.history = JobHistory()
        self.at_s = 0.0
        self.round = 0
        self.attempt = 0

    def write(self, what: str, after_s: float = 0.0, **detail: Any) -> "Job":
        self.at_s += after_s
        if what == "round_formed":
            self.round += 1
            detail = {"nodes": 2, "world_size": 4, "restarts_left": 3, **detail}
        self.history.write(make_record(what, self.at_s, round=self.round, attempt=self.attempt, detail=detail))
        return self

    def start(self, after_s: float = 1.0) -> "Job":
        self.write("round_formed")
        return self.write("workers_started", after_s)

    def step(self, *steps: int, each_s: float = 1.0, is_counted: bool = True) -> "Job":
        for done in steps:
            self.at_s += each_s
            self.history.record_steps(done, self.at_s, is_counted=is_counted)
        return self

    def fail(self, reason: str = "rank 1 failed", after_s: float = 0.5) -> "Job":
        self.write("round_broken", after_s, kind="failure", reason=reason)
        self.attempt += 1
        return self.write("workers_stopped", 0.25)

    def lost(self) -> dict[str, float]:
        goodput = self.history.build_goodput(self.at_s)
        return {"productive": goodput.productive_s, **dict(goodput.lost_s)}


@pytest.fixture
def job() -> Job:
    return Job().write("agent_started").start()


def test_time_belongs_to_one_cause_and_sums_up(job: Job) -> None:
    job.step(1, 2, 3, 4)  # 1 is the first of the attempt
    assert job.lost() == {"start": 1.0, "productive": 4.0}  # a step takes a second
    job.fail().start(2.0).step(3, 4, 5, 6)  # resumed from the step 2
    assert job.lost() == {"productive": 6.0, "start": 1.0, "detect": 0.5, "stop": 0.2, "restart": 2.0, "repeated": 2.0}
    assert sum(job.lost().values()) == pytest.approx(job.at_s, abs=0.1)
    goodput = job.history.build_goodput(job.at_s)
    assert goodput.fraction == pytest.approx(6.0 / 11.75, abs=0.001)


def test_a_recovery_ends_when_the_job_is_as_far_as_before(job: Job) -> None:
    job.step(1, 2, 3, 4).fail().start()
    (recovery,) = job.history.recoveries
    assert (recovery.cause, recovery.cost_s) == ("rank 1 failed", None)
    assert (recovery.round, recovery.attempt) == (2, 1)
    job.step(3, 4)
    assert job.history.recoveries[0].cost_s is None
    job.step(5)
    assert job.history.recoveries[0].cost_s == 0.5 + 0.25 + 1.0 + 2.0, "the step after the repeated ones counts"
    assert dict(job.history.recoveries[0].parts_s) == {"detect": 0.5, "stop": 0.25, "restart": 1.0, "repeated": 2.0}
    assert job.history.recovery_count == 1
    assert job.history.failures == (("worker", 1),)
    assert job.history.time_to_start_s == 2.0


@pytest.mark.parametrize(("succeeded", "cost_s"), [(True, 0.5 + 0.25 + 1.0 + 2.0), (False, None)])
def test_a_recovery_is_over_when_the_job_has_succeeded_at_the_step_of_the_failure(job: Job, succeeded, cost_s) -> None:
    """Its cost is without what came after the last step."""
    job.step(1, 2, 3, 4).fail().start().step(3, 4).write("job_ended", 7.0, succeeded=succeeded)
    assert [each.cost_s for each in job.history.recoveries] == [cost_s]


def test_a_recovery_from_a_hang_that_was_named_costs_the_hang_too(job: Job) -> None:
    job.step(1, 2, 3, 4).write("hang_named", 30.0, text="rank 1 did not enter barrier")
    job.write("round_broken", 5.0, kind="failure", hang=True, reason="the job hung").write("workers_stopped", 1.0)
    job.start().step(5, 6)
    parts = {"hang": 35.0, "stop": 1.0, "restart": 1.0}
    assert (job.history.recoveries[0].cost_s, dict(job.history.recoveries[0].parts_s)) == (37.0, parts)


@given(RECORDS)
@example(
    [(after_s, (what, {})) for what, after_s in (("fenced", 0), ("workers_started", 2), ("fenced", 0))]
    + [(0, ("agent_started", {})), (0, ("workers_started", {}))]
)
def test_the_parts_of_a_recovery_sum_up_to_its_cost_and_all_to_no_more_than_was_lost(history: list) -> None:
    job, has_workers = Job().write("agent_started").start(), True
    for after_s, entry in history:
        if len(entry) == 2:
            job.write(entry[0], after_s, **entry[1])
            if entry[0] in ("agent_started", "workers_started"):
                has_workers = entry[0] == "workers_started"
        elif has_workers:
            job.at_s += after_s
            done, ago_s, is_counted, phase = entry
            job.history.record_steps(done, job.at_s - ago_s, is_counted=is_counted, phase=phase)
    over = [each for each in job.history.recoveries if each.cost_s is not None]
    for each in over:
        assert sum(part_s for _, part_s in each.parts_s) == pytest.approx(each.cost_s, abs=0.001)
    lost_s = sum(each for name, each in job.history.read_buckets(job.at_s).items() if name in CAUSES)
    assert sum(each.cost_s or 0.0 for each in over) <= lost_s + 0.05 * len(over) + 0.01


def test_a_signal_to_the_agent_begins_no_recovery(job: Job) -> None:
    job.step(1, 2).write("round_broken", kind="left", reason="node 0 (vm) left: Ctrl-C (SIGINT)")
    assert job.history.recovery_count == 1
    job.history.record_stop()
    assert (job.history.recovery_count, job.history.recoveries) == (0, ())


@pytest.mark.parametrize("is_first", [True, False])
def test_the_round_that_a_stop_of_the_job_has_ended_is_no_recovery(job: Job, is_first: bool) -> None:
    """The timeline has the records of one agent alone, and no end of it."""
    job.step(1, 2)
    for what in ("round_broken", "signal") if is_first else ("signal", "round_broken"):
        job.write(what, 0.5, kind="membership", reason="node 1 left: SIGTERM", name="SIGTERM")
    assert (job.history.recoveries, job.history.recovery_count, job.history.failures) == ((), 0, ())


@pytest.mark.parametrize("change", ["joined", "left"])
def test_a_change_of_size_is_counted_as_one(job: Job, change: str) -> None:
    job.step(1, 2).write("round_broken", kind="membership", reason="node 1", **{change: True})
    job.start().step(3, 4).fail()
    history = job.history
    assert (history.recovery_count, history.resize_count, history.failures) == (2, 1, (("worker", 1),))
    assert [each.is_resize for each in history.recoveries] == [True, False]


def test_a_signal_during_a_recovery_leaves_it(job: Job) -> None:
    job.step(1, 2).fail()
    job.start().write("round_broken", kind="left", reason="node 0 (vm) left: Ctrl-C (SIGINT)")
    job.history.record_stop()
    assert [each.cause for each in job.history.recoveries] == ["rank 1 failed"]


def test_a_script_without_steps_has_no_goodput_and_recovers_with_its_workers(job: Job) -> None:
    job.fail(after_s=10.0).start(2.0)
    assert job.history.build_goodput(job.at_s) is None
    assert job.history.time_to_start_s == 1.0
    assert job.history.recoveries[0].cost_s == pytest.approx(2.25)


def test_steps_of_an_optimizer_are_never_repeated(job: Job) -> None:
    job.step(1, 2, 3, is_counted=False).fail().start().step(1, 2, 3, is_counted=False)
    assert "repeated" not in job.lost()
    assert job.history.recoveries[0].cost_s is not None


def test_a_pause_counts_for_nothing(job: Job) -> None:
    job.step(1, 2).write("drain_begun", kind="pause", drain=1)
    assert job.history.state is JobState.RUNNING
    job.write("drain_committed", drain=1, step=1)
    assert job.history.state is JobState.PAUSED
    job.write("drain_withdrawn", 100.0, reason="resumed").step(3)
    assert job.history.state is JobState.RUNNING
    assert job.lost() == {"start": 1.0, "productive": 3.0}
    goodput = job.history.build_goodput(job.at_s)
    assert goodput.pause_s == 100.0


def test_a_hang_is_a_state_until_it_is_over(job: Job) -> None:
    job.step(1, 2).write("hang_named", 50.0, text="rank 1 absent")
    assert (job.history.state, job.history.reason) == (JobState.HUNG, "rank 1 absent")
    assert job.history.since_s == 1000.0 + job.at_s
    job.write("moved_again", 10.0, text="the job goes on").step(3)
    assert job.history.state is JobState.RUNNING
    assert job.lost() == {"start": 1.0, "productive": 3.0, "hang": 60.0}


def test_which_rank_has_kept_the_others_waiting_is_an_event_and_the_cause(job: Job) -> None:
    job.step(1, 2).write("round_broken", 20.0, kind="failure", hang=True, reason="the job hung: no step for 20 s")
    job.write("hang_explained", 0.5, text="rank 1 absent").write("workers_stopped")
    assert "job hung" in job.history.recoveries[-1].cause
    assert job.history.events[-1].text == "rank 1 absent"
    job.start().step(3, 4).write("hang_explained", text="late")
    assert "job hung" in job.history.recoveries[-1].cause


def test_a_drain_and_the_end(job: Job) -> None:
    job.step(1).write("drain_begun", kind="stop", drain=1)
    assert job.history.state is JobState.DRAINING
    job.write("drain_committed", drain=1, step=7)
    assert "stop at step 7" in job.history.reason
    job.write("job_ended", 1.0, succeeded=True, drained=True, reason="")
    job.write("agent_ended", exit_code=143)
    assert (job.history.state, job.history.exit_code) == (JobState.ENDED, 143)
    assert "before the work" in job.history.reason
    assert job.history.has_ended_at_one_step


def test_a_job_that_waits_for_nodes_says_so(job: Job) -> None:
    job.step(1).fail("node 1 was lost")
    job.write("nodes_awaited", 3.0, reason="1 of 2 nodes are here")
    assert (job.history.state, job.history.since_s) == (JobState.WAITING, 1000.0 + job.at_s)
    job.at_s += 57.0
    job.start().step(1)
    assert job.history.state is JobState.RUNNING
    assert job.lost()["waiting"] == 57.0
    job.write("nodes_awaited", reason="of no account while workers run")
    assert job.history.state is JobState.RUNNING


@pytest.mark.parametrize(
    ("nodes", "kept", "events"),
    [(1, 3, ["1 of 4 processes was replaced, and the others kept running"]), (1, 0, []), (2, 1, [])],
)
def test_how_many_processes_were_replaced_is_an_event_if_others_kept_running(nodes, kept, events, job: Job) -> None:
    job.fail().write("round_formed", nodes=nodes).write("workers_started", kept=kept)
    after = [each.text for each in job.history.events]
    assert after[after.index("rank 1 failed") + 2 :] == events


def test_a_failure_for_good_has_its_reason_and_is_one_event(job: Job) -> None:
    job.write("round_broken", kind="final", reason="rank 1 failed")
    job.write("job_ended", succeeded=False, drained=False, reason="rank 1 failed")
    assert [each.text for each in job.history.events][1:] == ["rank 1 failed"]
    assert (job.history.state, job.history.exit_code, job.history.recoveries) == (JobState.ENDED, 1, ())


def test_it_does_not_grow_with_the_age_of_the_job(job: Job) -> None:
    for number in range(100):
        job.step(number + 1).fail(f"failure {number}").start()
    assert (len(job.history.recoveries), len(job.history.events)) == (MOST_RECOVERIES, MOST_EVENTS)
    assert job.history.recovery_count == 100
    assert job.history.recoveries[-1].cause == "failure 99"
    assert len(job.history.read_buckets(job.at_s)) <= 12
