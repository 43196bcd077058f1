"""The variables by which scripts and traces know a job after a restart."""

import pytest
from doubles.samples import make_round

from muster._shared.records import replace
from muster.agent.cli.arguments import parse_args
from muster.agent.workers.environment import build_worker_env
from muster.agent.workers.run_names import derive_span_id, derive_trace_id, parse_trace_parent

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def build(*flags: str, local_rank: int = 0, rank_offset: int = 0, attempt: int = 0, **environ: str) -> dict[str, str]:
    config = parse_args(["--rdzv-backend", "c10d", *flags, "x.py"], environ)
    formed = make_round(4, rank_offset=rank_offset, attempt=attempt)
    return build_worker_env(config, formed, local_rank, error_file=None)


def test_every_rank_knows_the_job_and_the_attempt() -> None:
    first, later = build("--rdzv-id", "job-x1"), build("--rdzv-id", "job-x1", local_rank=3, attempt=2)
    assert (first["MUSTER_JOB_ID"], first["MUSTER_ATTEMPT_ID"]) == ("job-x1", "job-x1-0")
    assert (later["MUSTER_JOB_ID"], later["MUSTER_ATTEMPT_ID"]) == ("job-x1", "job-x1-2")


def test_a_job_without_an_id_of_its_own_exports_none() -> None:
    assert not {"MUSTER_JOB_ID", "MUSTER_ATTEMPT_ID"} & build().keys()


# -- traces -----------------------------------------------------------------------------------------------------------


def test_workers_of_a_round_belong_to_the_span_of_its_attempt() -> None:
    config = replace(parse_args(["--standalone", "x.py"], {"TRACEPARENT": "user's"}), trace_parent=PARENT)
    found = [
        parse_trace_parent(build_worker_env(config, make_round(number=number), 1, error_file=None)["TRACEPARENT"])
        for number in (1, 2)
    ]
    trace_id = PARENT.split("-")[1]
    assert [each and each.trace_id for each in found] == [trace_id, trace_id]
    assert [each and each.span_id for each in found] == [derive_span_id(trace_id, "attempt", n) for n in (1, 2)]


def test_without_traces_the_users_parent_stays() -> None:
    assert build(TRACEPARENT=PARENT)["TRACEPARENT"] == PARENT


@pytest.mark.parametrize(
    "text",
    [
        "",
        "00-short-00f067aa0ba902b7-01",
        PARENT.upper(),
        PARENT + "-more",
        "ff" + PARENT[2:],
        f"00-{'0' * 32}-00f067aa0ba902b7-01",
        f"00-{'1' * 32}-{'0' * 16}-01",
    ],
)
def test_what_is_no_trace_parent(text: str) -> None:
    assert parse_trace_parent(text) is None


def test_a_trace_parent_is_written_as_it_was_read() -> None:
    found = parse_trace_parent(PARENT)
    assert (found.format(), found.is_sampled) == (PARENT, True)
    assert not parse_trace_parent(PARENT[:-1] + "0").is_sampled  # type: ignore[union-attr]


def test_the_id_of_a_trace_follows_from_the_job() -> None:
    assert derive_trace_id("job-x1") == derive_trace_id("job-x1") != derive_trace_id("job-x2")
    assert len(derive_trace_id("job-x1")) == 32
