"""What people are told of snapshots: in the status of a job, and in the summary after a recovery."""

from types import SimpleNamespace

from muster._shared.console import summary
from muster._shared.job_history import JobHistory
from muster._shared.job_view import JobStatus


def follow(history, what, at_s, **detail):
    record = SimpleNamespace(what=what, detail=detail, monotonic_s=at_s, time_s=at_s, round=1, attempt=0)
    history.write(record)


def describe_recovery(snapshot_step, done):
    history = JobHistory()
    follow(history, "agent_started", 0.0)
    follow(history, "round_formed", 1.0, nodes=1, world_size=2)
    follow(history, "workers_started", 2.0)
    history.record_steps(done, 3.0, is_counted=True)
    follow(history, "round_broken", 4.0, kind="failure", reason="rank 1 was ended by SIGKILL")
    follow(history, "round_formed", 5.0, nodes=1, world_size=2, snapshot_step=snapshot_step)
    [recovery] = history.recoveries
    return summary._describe_recovery(recovery)


def test_the_summary_says_where_the_ranks_continued_and_how_many_steps_they_repeated():
    cause = ": rank 1 was ended by SIGKILL"
    assert describe_recovery(4312, 4314) == (
        "recovery, not completed, continued at step 4,312 from memory, 1 step repeated" + cause
    )
    assert describe_recovery(4310, 4314).endswith("step 4,310 from memory, 3 steps repeated" + cause)
    assert describe_recovery(None, 4314) == "recovery, not completed" + cause


def test_the_status_says_step_and_age_of_the_newest_snapshot():
    status = JobStatus(step=815, total=1000, rate=2.0, snapshot_step=812, snapshot_s=100.0, time_s=102.4)
    assert status.describe() == "step 815 of 1000, 2.0 a second, snapshot of step 812 (2 s old)"
    assert JobStatus(step=815).describe() == "step 815"
