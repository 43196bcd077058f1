"""What a terminal says of a job that runs, and what is said of one that has ended."""

import pytest

from muster._shared.console.summary import format_status_line, format_summary
from muster._shared.job_view import Goodput, JobState, JobStatus, RankStatus, Recovery, SlowRank, describe_steps
from muster._shared.records import replace

SLOW = SlowRank(global_rank=3, node=1, host="b", is_chronic=True, late_s=0.21, late_fraction=0.34, share=0.9)
ONCE = SlowRank(global_rank=3, node=1, host="b", is_chronic=False, late_s=12.0)
RANKS = tuple(
    RankStatus(global_rank=rank, node=0, local_rank=rank, step=9 - lag, lag_steps=lag)
    for rank, lag in enumerate((0, 7))
)


@pytest.mark.parametrize(
    ("status", "line"),
    [
        (JobStatus(), ""),
        (JobStatus(state=JobState.RESTARTING, reason="rank 1 exited"), ""),
        (JobStatus(step=99, total=100, state=JobState.ENDED), ""),
        (JobStatus(step=11), "step 11"),
        (
            JobStatus(step=11, total=100, rate=7.9, eta_s=3725.0, values=(("loss", 0.5),)),
            "step 11 of 100 (11 %), 7.9 a second, loss 0.5; ETA 1 h 2 min",
        ),
        (JobStatus(step=4, total=10, bar="Epoch 4 of 10"), "Epoch 4 of 10: step 4 of 10 (40 %)"),
        (JobStatus(optimizer_steps=7, rate=0.5), "step 7 (by optimizer), 0.5 a second"),
        (JobStatus(step=200, total=100), "step 200 of 100"),
        (JobStatus(step=5, total=0), "step 5 of 0"),
        (JobStatus(step=5, state=JobState.PAUSED), "paused at step 5"),
        (JobStatus(step=5, slow_ranks=(SLOW,)), "step 5; rank 3 on b is 0.21 s late at each step (34 % of it)"),
        (JobStatus(step=5, slow_ranks=(ONCE,)), "step 5"),
        (JobStatus(step=2, ranks=RANKS), "step 2; rank 1 is 7 steps behind"),
        (JobStatus(step=2, ranks=RANKS[:1]), "step 2"),
        (
            JobStatus(step=5, state=JobState.RESTARTING, reason="rank 1 \x1b]52;c;eA==\x07 exited"),
            "restarting: rank 1 \\x1b]52;c;eA==\\x07 exited; step 5",
        ),
    ],
)
def test_the_line_of_a_job_that_runs(status: JobStatus, line: str) -> None:
    assert format_status_line(status) == line


def test_of_a_job_without_steps_and_recoveries_nothing_is_said() -> None:
    assert format_summary(JobStatus(state=JobState.ENDED, exit_code=0)) == []


def test_steps_goodput_recoveries_and_the_slow_rank() -> None:
    status = JobStatus(
        step=999,
        total=1000,
        goodput=Goodput(
            fraction=0.931, productive_s=100.0, lost_s=(("detect", 0.04), ("start", 4.1), ("repeated", 12.0))
        ),
        recoveries=(
            Recovery(round=1, attempt=1, cause="rank 3 on b exited with code 1", cost_s=4.25),
            Recovery(round=2, attempt=1, cause="node 1 was lost"),
        ),
        recovery_count=2,
        slow_ranks=(SLOW,),
    )
    assert format_summary(status) == [
        "1000 of 1000 steps; goodput 93 %; lost: 12 s in steps that were done again, 4.1 s until the first step",
        "recovery, cost 4.2 s: rank 3 on b exited with code 1",
        "recovery, not completed: node 1 was lost",
        "rank 3 on b is 0.21 s late at each step (34 % of it)",
    ]


@pytest.mark.parametrize(("last", "line"), [(39, "40 of 40 steps"), (40, "40 of 40 steps"), (30, "31 of 40 steps")])
def test_a_script_that_counts_from_1_has_done_no_more_steps_than_there_are(last: int, line: str) -> None:
    """As Trainers do: one said that it had done 41 of 40."""
    assert format_summary(JobStatus(step=last, total=40)) == [line]


def test_a_job_that_ended_before_it_was_as_far_as_before() -> None:
    line = "11 of 4000 steps, 62 before a restart"
    assert format_summary(JobStatus(step=10, total=4000, most_steps_done=62)) == [line]
    assert format_summary(JobStatus(total=4000, most_steps_done=62)) == ["0 of 4000 steps, 62 before a restart"]
    assert format_summary(JobStatus(step=30, total=40, most_steps_done=41)) == ["31 of 40 steps, 40 before a restart"]


def test_values_that_are_not_finite_at_the_end_are_named() -> None:
    status = JobStatus(step=9, values=(("loss", "nan"), ("rate", 0.5), ("norm", "inf")))
    assert format_summary(status) == ["10 steps", "not finite at the last step: loss nan, norm inf"]
    assert format_summary(replace(status, values=(("loss", 0.5),))) == ["10 steps"]


def test_the_first_step_and_failures_by_cause() -> None:
    status = JobStatus(
        step=9,
        goodput=Goodput(fraction=1.0, productive_s=9.0),
        time_to_start_s=4.3,
        failures=(("worker", 1), ("hang", 2), ("node", 1)),
    )
    failures = "interrupted by 1 worker, 2 hangs, 1 lost node"
    assert format_summary(status) == [f"10 steps; the first step after 4.3 s; {failures}"]
    status = replace(status, goodput=Goodput(fraction=0.9, productive_s=90.0, lost_s=(("start", 4.3),)))
    assert format_summary(status) == [f"10 steps; goodput 90 %; lost: 4.3 s until the first step; {failures}"]


def test_who_reports_no_steps_is_told_how_when_something_has_failed() -> None:
    """Of a job of seconds the report says all."""
    status = JobStatus(started_s=1000.0, time_s=1070.0, time_to_start_s=0.5, failures=(("worker", 3),))
    assert format_summary(replace(status, time_s=1002.0)) == []
    assert format_summary(status) == [
        "workers ran after 0.5 s; interrupted by 3 workers; goodput needs muster.worker.step(i) in the script"
    ]


def test_only_the_last_recoveries_are_named() -> None:
    many = tuple(Recovery(round=number, attempt=number, cost_s=1.0) for number in range(16))
    lines = format_summary(JobStatus(recoveries=many, recovery_count=40))
    assert lines == ["35 earlier recoveries", *["recovery, cost 1.0 s"] * 5]
    resizes = (*many[1:], Recovery(round=9, attempt=0, cost_s=2.0, cause="node 1 (h) left: SIGTERM", is_resize=True))
    lines = format_summary(JobStatus(recoveries=resizes, recovery_count=40, resize_count=3))
    change = "change of size, cost 2.0 s: node 1 (h) left: SIGTERM"
    assert lines == ["33 earlier recoveries, 2 earlier changes of size", *["recovery, cost 1.0 s"] * 4, change]
    assert format_summary(JobStatus(optimizer_steps=8, slow_ranks=(ONCE,))) == ["8 steps of the optimizer"]
    assert format_summary(JobStatus(optimizer_steps=1)) == ["1 step of the optimizer"]
    assert describe_steps(1, 1, None) == "1 step"
    assert describe_steps(1, 1, 40) == "1 of 40 steps"
