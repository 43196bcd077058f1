"""What `torchx status` says beside each replica that has failed or was cancelled, and how short `torchx run` is."""

import json

import pytest
from torchx.specs import AppDef, AppState, AppStatus, Role
from torchx.specs.api import NONE, ReplicaStatus

from muster._shared.reports import Failure, Report
from muster.schedulers.adapter.status import build_status, shorten_status
from muster.schedulers.wording.facts import AppFacts
from muster.schedulers.wording.reasons import Code, Reason


def build_failure(node: int, **fields: object) -> Failure:
    place: dict[str, object] = {"node": node, "node_index": node, "host": "h", "local_rank": 0, "global_rank": 8 * node}
    known = {**place, "attempt": 0, "round": 1, "pid": 7, "time_s": 1e9}
    return Failure(**{**known, **fields})  # type: ignore[arg-type]


REPORT = Report(
    reason="rank 8 on node 1 (h) exited with code 3",
    failures=(
        build_failure(1, exit_code=3, exception="ValueError: bad batch 17\nof many"),
        build_failure(0, signal="SIGTERM", collateral=True),
    ),
)


def build_facts(state: AppState, replica_state: AppState, report: Report | None = None, error: str = NONE) -> AppFacts:
    replicas = [
        ReplicaStatus(id=index, state=replica_state, role="main", hostname="h", structured_error_msg=error)
        for index in range(3)
    ]
    return AppFacts(
        app_id="app",
        app=AppDef("app", roles=[Role(name="main", image="")]),
        state=state,
        replicas=replicas,
        reasons=(Reason(code=Code.JOB_FAILED, text="why"),),
        error='{"message": {"message": "x"}}',
        reports={} if report is None else {"main": report},
    )


def show(facts: AppFacts) -> str:
    """The part of `torchx status` about replicas."""
    status = build_status(facts)
    text = AppStatus(status.state, roles=status.roles_statuses).format()
    return str(text).partition("Roles:")[2].partition("    Msg:")[0]


def test_the_replica_of_the_root_cause_has_its_rank_reason_and_time() -> None:
    """Each was "FAILED (no reply file)"."""
    shown = show(build_facts(AppState.FAILED, AppState.FAILED, REPORT)).splitlines()
    assert shown[1:4] == [" *main[0]:FAILED (ended because of main[1])", "  main[1]:FAILED (exitcode: 3)", shown[3]]
    assert "timestamp: 2001-09-0" in shown[3]
    assert shown[5:7] == [
        "        error_msg: rank 8 exited with code 3 (ValueError: bad batch 17)",
        "  main[2]:FAILED (ended because of main[1])",
    ]


@pytest.mark.parametrize(
    ("state", "replica_state", "why"),
    [
        (AppState.FAILED, AppState.FAILED, "see Msg"),
        (AppState.RUNNING, AppState.FAILED, "see Msg"),
        (AppState.FAILED, AppState.CANCELLED, "stopped when the job failed"),
        (AppState.CANCELLED, AppState.CANCELLED, "the job was cancelled"),
        (AppState.RUNNING, AppState.CANCELLED, "stopped"),
    ],
)
def test_what_is_said_without_a_report(state: AppState, replica_state: AppState, why: str) -> None:
    shown = show(build_facts(state, replica_state))
    marks = ("*", " ", " ")
    expected = [f" {mark}main[{index}]:{replica_state} ({why})" for index, mark in enumerate(marks)]
    assert shown.split("\n")[1:4] == expected


def test_a_report_of_before_says_nothing_of_a_job_that_runs() -> None:
    assert "main[1]:FAILED (see Msg)" in show(build_facts(AppState.RUNNING, AppState.FAILED, REPORT))


def test_an_error_that_an_adapter_knows_is_kept() -> None:
    known = json.dumps({"message": {"message": "Evicted", "errorCode": 1, "extraInfo": {"timestamp": "1"}}})
    status = build_status(build_facts(AppState.FAILED, AppState.FAILED, REPORT, error=known))
    assert {each.structured_error_msg for each in status.roles_statuses[0].replicas} == {known}
    running = build_status(build_facts(AppState.RUNNING, AppState.RUNNING, REPORT))
    assert {each.structured_error_msg for each in running.roles_statuses[0].replicas} == {NONE}


@pytest.mark.torchx
def test_what_torchx_run_prints_of_a_failed_job_does_not_grow_with_its_nodes() -> None:
    """It was six lines for each, below the report."""
    status = build_status(build_facts(AppState.FAILED, AppState.FAILED, REPORT))
    short = shorten_status(status, has_lines=False)
    assert (short.state, short.msg, short.roles_statuses) == (AppState.FAILED, "why", [])
    assert json.loads(short.structured_error_msg) == {"message": {"message": "x"}}
    assert shorten_status(status, has_lines=True).structured_error_msg == NONE, "the lines above have it"
    assert len(status.roles_statuses[0].replicas) == 3, "the adapter's own is unchanged"
