"""Calls that ice-learn 0.4.8's own functions and classes accept are accepted here, by position and by name."""

import inspect
from types import SimpleNamespace
from typing import Any

import pytest

import muster.elastic
from muster.agent.errors import UsageError
from muster.elastic import Events, LocalElasticAgent, agent

pytestmark = pytest.mark.torch

_LOGS = ("stdouts", "stderrs", "tee_stdouts", "tee_stderrs", "error_files")
PARAMETERS = {
    "tail_logfile": ("header", "file", "dst", "finished", "interval_sec", "lock", "progbar_events"),
    "TailLog": ("name", "log_files", "dst", "interval_sec", "progbar_events"),
    "MultiprocessContext": ("name", "entrypoint", "args", "envs", *_LOGS, "start_method", "progbar_events"),
    "start_processes": (
        *("name", "entrypoint", "args", "envs", "log_dir", "start_method", "redirects", "tee", "progbar_events"),
    ),
    "LocalElasticAgent": ("spec", "start_method", "exit_barrier_timeout", "log_dir", "events"),
    "elastic_launch": ("config", "entrypoint"),
    "Events": ("start_method",),
}
"""In their order. Source: `ice/llutil/launcher` of ice-learn 0.4.8, the methods' `self` left out."""


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters(name: str) -> None:
    signature = inspect.signature(getattr(muster.elastic, name))
    signature.bind(*PARAMETERS[name])
    signature.bind(**dict.fromkeys(PARAMETERS[name]))


def test_events_have_ice_learns_attributes() -> None:
    events = muster.elastic.Events("spawn")
    names = ("pause", "paused", "resume", "stop_all_tasks", "trigger_save_checkpoint", "finished_save_checkpoint")
    for name in (*names, "debugger_start", "debugger_end"):
        assert not getattr(events, name).is_set()
    assert (events.progress_bar_iter.value, events.progress_bar_total.value) == (-1, -1)


def test_the_bar_of_a_worker_is_its_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, int | None]] = []
    monkeypatch.setattr("muster.worker.step", lambda i, *, total: told.append((i, total)))
    events = muster.elastic.Events("spawn")
    events.progress_bar_iter.value = 0
    assert told == []
    events.progress_bar_total.value = 20
    with events.progress_bar_iter.get_lock():
        events.progress_bar_iter.value += 1
    events.progress_bar_iter.value = 20
    assert told == [(0, 20), (19, 20)]
    assert (events.progress_bar_iter.value, events.progress_bar_total.value) == (20, 20)


def test_events_of_several_nodes_need_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MUSTER_TOKEN", raising=False)
    monkeypatch.setattr(agent, "build_static_flags", lambda _spec: ())
    spec: Any = SimpleNamespace(rdzv_handler=SimpleNamespace(world_size=2))
    with pytest.raises(UsageError, match=r"^events with 2 nodes .* MUSTER_TOKEN, "):
        LocalElasticAgent(spec, "spawn", 300, None, Events("spawn"))
