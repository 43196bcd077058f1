"""The variables by which a job is one run in a tracker."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
from doubles.samples import make_round

from muster.agent.cli.arguments import parse_args
from muster.agent.errors import UsageError
from muster.agent.features import PARTS, RowContext
from muster.agent.features.trackers.node import build_tracker_env, create_part
from muster.agent.workers.environment import build_worker_env

TRACKED = {"WANDB_RUN_ID", "WANDB_RESUME", "COMET_EXPERIMENT_KEY", "MLFLOW_RUN_CONTEXT"}


def build(*flags: str, local_rank: int = 0, rank_offset: int = 0, attempt: int = 0, **environ: str) -> dict[str, str]:
    config = parse_args(["--rdzv-backend", "c10d", *flags, "x.py"], environ)
    formed = make_round(4, rank_offset=rank_offset, attempt=attempt)
    env = build_worker_env(config, formed, local_rank, error_file=None)
    (row,) = (row for row in PARTS if row.name == "trackers")
    context: Any = SimpleNamespace(config=config)
    starts = row.starts(RowContext(config=config, formed=formed, page=None))
    return env | create_part(context).build_env(formed, local_rank) if starts else env


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
    with pytest.raises(UsageError, match=r"--tracker-run .* --rdzv-id ID"):
        parse_args(["--tracker-run", "--rdzv-backend", "c10d", "x.py"], {})
    assert parse_args(["--tracker-run", "--standalone", "x.py"], {}).features["trackers"]
