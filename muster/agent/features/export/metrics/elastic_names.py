"""Builds what torch's elastic agent publishes about itself, by its names, from this agent's records. Pure.

torch's `workers.ROLE.NAME` is `torchelastic_workers_NAME{role="ROLE"}` here. Its measurements of a method,
`CLASS.METHOD.duration.ms` and `.success`, are `torchelastic_duration_ms` and `torchelastic_success` with the label
`name`. As with torch, each agent reports on itself.

Some values are missing, because nothing here corresponds to them. These are the durations of `_assign_worker_ranks`
(ranks come with the round), `_monitor_workers` (nothing polls) and `run` (nobody could read it after the agent's end).
`.failure` is missing too: a step of this agent that fails ends the job, which `muster_job_failures` and the report
show.

Source: torch/distributed/elastic/agent/server/api.py and local_elastic_agent.py (`put_metric` and `@prof`).
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from muster._shared.records import NO_ITEMS, record, replace

if TYPE_CHECKING:
    from muster.agent.runtime.event_log import EventRecord

RENDEZVOUS: Final = "SimpleElasticAgent._rendezvous"
INITIALIZE: Final = "SimpleElasticAgent._initialize_workers"
RESTART: Final = "SimpleElasticAgent._restart_workers"
START: Final = "LocalElasticAgent._start_workers"
STOP: Final = "LocalElasticAgent._stop_workers"
STATES: Final = ("healthy", "unhealthy", "failed", "succeeded")
ENDS: Final = ("run_success_no_retries", "run_success_with_retries", "run_failed_no_retries", "run_failed_with_retries")


@record
class TorchNames:
    """The values of one agent up to now."""

    state: str = ""
    """The state of the workers, one of `STATES`; "" if none has been started."""
    end: str = ""
    """How the workers of the job have ended, one of `ENDS`; "" if they have not, or were stopped."""
    took_ms: Mapping[str, int] = NO_ITEMS
    """How long the last call took, by torch's name of the method."""
    calls: Mapping[str, int] = NO_ITEMS
    """The number of calls, by the same names."""
    rendezvous_s: float = 0.0
    """Since when this node has taken part in rendezvous, by the clock of the records."""
    broken_s: float | None = None
    """When the last round ended; None if its workers run."""


def follow(names: TorchNames, event: "EventRecord") -> TorchNames:
    """Apply one record of the agent."""
    now_s, what = event.monotonic_s, event.what
    if what == "agent_started":
        return replace(names, rendezvous_s=now_s)
    if what == "round_formed":
        return _count(names, RENDEZVOUS, now_s - names.rendezvous_s)
    if what == "workers_started":
        names = _count(names, START, event.duration_s or 0.0)
        names = _count(names, INITIALIZE, now_s - names.rendezvous_s)
        if names.broken_s is not None:
            names = _count(names, RESTART, now_s - names.broken_s)
        return replace(names, state="healthy", broken_s=None)
    if what in ("round_broken", "fenced"):
        has_failed = event.detail.get("kind") in ("failure", "final")
        return replace(names, state="failed" if has_failed else "unhealthy", broken_s=now_s)
    if what == "workers_stopped":
        names = replace(names, rendezvous_s=now_s)
        return names if names.broken_s is None else _count(names, STOP, event.duration_s or 0.0)
    if what == "job_ended" and event.detail.get("drained") is not True:
        is_success = event.detail.get("succeeded") is True
        retries = "with" if event.attempt else "no"
        end = f"run_{'success' if is_success else 'failed'}_{retries}_retries"
        return replace(names, state="succeeded" if is_success else "failed", end=end)
    return names


def _count(names: TorchNames, method: str, took_s: float) -> TorchNames:
    took_ms = {**names.took_ms, method: int(took_s * 1000)}
    return replace(names, took_ms=took_ms, calls={**names.calls, method: names.calls.get(method, 0) + 1})
