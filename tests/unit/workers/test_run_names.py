"""The variables by which trackers and traces know a job after a restart."""

import json

import pytest
from doubles.samples import make_round

from muster._shared.records import replace
from muster.agent.cli.arguments import parse_args
from muster.agent.errors import UsageError
from muster.agent.workers.environment import build_worker_env
from muster.agent.workers.run_names import build_tracker_env, derive_span_id, derive_trace_id, parse_trace_parent

TRACKED = {"WANDB_RUN_ID", "WANDB_RESUME", "COMET_EXPERIMENT_KEY", "MLFLOW_RUN_CONTEXT"}
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


def test_without_the_option_no_tracker_is_touched() -> None:
    assert not TRACKED & build("--rdzv-id", "job-x1").keys()


def test_global_rank_0_continues_one_run_in_every_attempt() -> None:
    first, second = (build("--rdzv-id", "job-x1", "--tracker-run", attempt=each) for each in (0, 1))
    assert first.keys() >= TRACKED
    for name in TRACKED - {"MLFLOW_RUN_CONTEXT"}:
        assert first[name] == second[name]
    assert (first["WANDB_RUN_ID"], first["WANDB_RESUME"]) == ("job-x1", "allow")
    assert json.loads(second["MLFLOW_RUN_CONTEXT"]) == {"muster.job_id": "job-x1", "muster.attempt_id": "job-x1-1"}


@pytest.mark.parametrize(("local_rank", "rank_offset"), [(1, 0), (0, 4)])
def test_no_other_rank_does(local_rank: int, rank_offset: int) -> None:
    env = build("--rdzv-id", "job-x1", "--tracker-run", local_rank=local_rank, rank_offset=rank_offset)
    assert not TRACKED & env.keys()


@pytest.mark.parametrize(
    ("name", "value", "left"),
    [
        ("WANDB_RUN_ID", "mine", {"COMET_EXPERIMENT_KEY", "MLFLOW_RUN_CONTEXT"}),
        ("WANDB_RESUME", "never", {"COMET_EXPERIMENT_KEY", "MLFLOW_RUN_CONTEXT"}),
        ("COMET_START_MODE", "create", {"WANDB_RUN_ID", "WANDB_RESUME", "MLFLOW_RUN_CONTEXT"}),
        ("MLFLOW_RUN_ID", "abc", {"WANDB_RUN_ID", "WANDB_RESUME", "COMET_EXPERIMENT_KEY"}),
    ],
)
def test_a_tracker_of_which_the_user_has_set_a_variable_stays_as_it_is(name: str, value: str, left: set[str]) -> None:
    env = build("--rdzv-id", "job-x1", "--tracker-run", **{name: value})
    assert TRACKED & env.keys() == left | ({name} & TRACKED)
    assert env[name] == value


@pytest.mark.parametrize("run_id", ["a:b", "a/b", "a b", "what?", "x" * 200, "it's"])
def test_an_id_that_weights_and_biases_refuses_becomes_another_the_same_each_time(run_id: str) -> None:
    first, second = (build_tracker_env(run_id, attempt, {})["WANDB_RUN_ID"] for attempt in (0, 1))
    assert first == second
    assert not set(first) & set(":;,#?/' ")
    assert 0 < len(first) <= 64


def test_comet_takes_the_key() -> None:
    key = build_tracker_env("job-x1", 0, {})["COMET_EXPERIMENT_KEY"]
    assert key.isalnum()
    assert 32 <= len(key) <= 50


def test_the_option_needs_a_job_with_an_id() -> None:
    with pytest.raises(UsageError, match="--tracker-run needs a job with an id of its own: give --rdzv-id ID"):
        parse_args(["--tracker-run", "--rdzv-backend", "c10d", "x.py"], {})
    assert parse_args(["--tracker-run", "--standalone", "x.py"], {}).tracker_run


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
