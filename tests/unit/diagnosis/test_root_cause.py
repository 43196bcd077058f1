"""Whose failure it was, and what the report's first line says of it."""

from muster.agent.diagnosis.report import Failure
from muster.agent.diagnosis.root_cause import DatedFailure, build_report, choose_root
from muster.agent.rendezvous.consensus.restart_budget import find_final_reason


def see(when_s: float, global_rank: int, **changes) -> DatedFailure:
    failure = Failure(
        node=0,
        node_index=0,
        host="h",
        local_rank=global_rank,
        global_rank=global_rank,
        attempt=0,
        round=1,
        pid=1,
        time_s=when_s,
        exit_code=2,
        **changes,
    )
    return DatedFailure(when_s=when_s, failure=failure)


def report(reason, *seen):
    return build_report("job", reason, 0, 0, seen, ())


def test_the_first_line_names_the_root_cause_as_known_at_the_end() -> None:
    heard_first, failed_first, victim = see(10.01, 0), see(10.0, 1), see(9.0, 2, stopped_by_us=True)
    reason = find_final_reason(choose_root([heard_first]), None, 0, 0)
    assert reason is not None
    assert reason.startswith("rank 0 ")
    made = report(reason, heard_first, failed_first, victim)
    assert [failure.global_rank for failure in made.failures] == [1, 0, 2]
    assert made.reason == "rank 1 on node 0 (h) exited with code 2; no restarts are allowed (--max-restarts 0)"


def test_a_reason_that_names_no_failure_stays() -> None:
    assert report("the nodes came apart", see(1.0, 0)).reason == "the nodes came apart"
    assert report("a worker failed; why", see(1.0, 0, stopped_by_us=True)).reason == "a worker failed; why"
