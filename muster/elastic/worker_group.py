"""Torch's `WorkerGroup` as the agent's records describe it, and what torch's agent reports to its process's handlers.

torch's metrics and events handlers (`torch.distributed.elastic.metrics`, `.events`) belong to the program that starts
the job. So they are called here, in the thread that waits for the job, with torch's names and fields. Three things
differ from torch. A state is reported when it begins, not at every look of a polling agent. `_monitor_workers` has no
metrics, because nothing is polled. ASSIGN_WORKER_RANKS is not reported, because ranks come with the rendezvous.

Source: torch/distributed/elastic/agent/server/api.py of torch 2.13 (`_record_metrics`, `_construct_event`, `@prof`).
"""

import json
import logging
import socket
import sys
import time
import traceback
from collections.abc import Mapping
from typing import Any

Record = Mapping[str, Any]
"""See `elastic.jobs.job.Record`."""

_HANDLERS = "torch.distributed.elastic.events.handlers"


def has_event_handler(name: str) -> bool:
    """Return whether torch's events have a handler of this name in this process."""
    handlers = sys.modules.get(_HANDLERS)
    return handlers is not None and name in handlers._log_handlers  # noqa: SLF001  # torch has no public list


class WorkerGroupWatch:
    """Keeps torch's WorkerGroup of one node up to date, and calls torch's handlers. It imports torch."""

    def __init__(self, spec: Any, *, entrypoint_name: str, run_id: str, backend: str) -> None:
        """Report nothing yet.

        Args:
            spec: torch's `WorkerSpec`, or an object with its role, local_world_size, max_restarts and
                event_log_handler.
            entrypoint_name: for events, as the others.
            run_id: the job's.
            backend: of the rendezvous.
        """
        from torch.distributed.elastic.agent.server import api

        self._api: Any = api
        self.group: Any = api.WorkerGroup(spec)
        self._spec = spec
        self._entrypoint_name = entrypoint_name
        self._run_id = run_id
        self._backend = backend
        self._restarts_left = spec.max_restarts
        self._rendezvous_began_s = 0.0
        self._round_broke_s: float | None = None
        self._began_s = time.monotonic()
        self._run_time_s = 0
        self._host: str | None = None

    def begin(self) -> None:
        """Begin to count the time of `run`."""
        self._began_s = time.monotonic()

    # -- the agent's records ----------------------------------------------------------------------------------------

    def handle(self, record: Record) -> None:
        """Take in one record of the agent."""
        match record["what"]:
            case "agent_started":
                self._rendezvous_began_s = record["monotonic_s"]
            case "round_formed":
                self._begin_round(record)
            case "worker_released":
                self.group.workers[record["detail"]["local_rank"]].id = record["detail"]["pid"]
            case "workers_started":
                self._report_started(record)
                self._set_state(self._api.WorkerState.HEALTHY)
            case "round_broken":
                self._round_broke_s = record["monotonic_s"]
                self._set_broken(record["detail"]["kind"])
            case "workers_stopped":
                self._rendezvous_began_s = record["monotonic_s"]
                if self._round_broke_s is not None:
                    self._put_duration("LocalElasticAgent._stop_workers", record["duration_s"] or 0.0)
                self.group.state = self._api.WorkerState.STOPPED
            case _:
                pass

    def _begin_round(self, record: Record) -> None:
        group, detail = self.group, record["detail"]
        duration_s = record["monotonic_s"] - self._rendezvous_began_s
        self._restarts_left = detail["restarts_left"]
        self._put_duration("SimpleElasticAgent._rendezvous", duration_s)
        self._record("RENDEZVOUS", duration_ms=duration_s * 1000)  # as torch: the group before the round
        group.group_rank, group.group_world_size = record["node"], detail["nodes"]
        group.master_addr, _, port = detail["master"].rpartition(":")
        group.master_port = int(port)
        group.workers = [
            self._api.Worker(
                local_rank=local_rank,
                global_rank=detail["rank_offset"] + local_rank,
                role_rank=detail["role_rank_offset"] + local_rank,
                world_size=detail["world_size"],
                role_world_size=detail["role_world_size"],
            )
            for local_rank in range(self._spec.local_world_size)
        ]

    def _set_broken(self, kind: str) -> None:
        if kind == "final":
            self.group.state = self._api.WorkerState.FAILED  # reported by `record_result`
        else:
            self._set_state(self._api.WorkerState.FAILED if kind == "failure" else self._api.WorkerState.UNHEALTHY)

    def _report_started(self, record: Record) -> None:
        now_s = record["monotonic_s"]
        self._put_duration("LocalElasticAgent._start_workers", record["duration_s"] or 0.0)
        self._put_duration("SimpleElasticAgent._initialize_workers", now_s - self._rendezvous_began_s)
        if self._round_broke_s is not None:
            self._put_duration("SimpleElasticAgent._restart_workers", now_s - self._round_broke_s)
            self._round_broke_s = None
        for worker in self.group.workers:
            self._record("START", worker=worker)

    # -- the end ----------------------------------------------------------------------------------------------------

    def record_result(self, result: Any) -> None:
        """Report how the workers have ended.

        Args:
            result: torch's RunResult.
        """
        has_failed = result.is_failed()
        self._run_time_s = int(time.monotonic() - self._began_s)
        self._set_state(result.state)
        tries_left = 0.0 if has_failed else (self._restarts_left + 1) / (self._spec.max_restarts + 1)
        self._put("flakiness", int(100 - 100 * tries_left))
        self._put("run_total", 1)
        has_restarted = self._restarts_left != self._spec.max_restarts
        for end, is_end in (("success", not has_failed), ("failed", has_failed)):
            self._put(f"run_{end}_with_retries", int(is_end and has_restarted))
            self._put(f"run_{end}_no_retries", int(is_end and not has_restarted))
        for worker in self.group.workers:
            failure = result.failures.get(worker.global_rank)
            was_stopped = has_failed and failure is None
            self._record("TERMINATED" if was_stopped else result.state.value, worker=worker, failure=failure)
        self.record_return()

    def record_return(self, *, is_success: bool = True) -> None:
        """Tell that `run` returns, or raises."""
        self._put_duration("SimpleElasticAgent.run", time.monotonic() - self._began_s, is_success=is_success)

    def record_job(self, state: str) -> None:
        """Report what torch's launcher reports at the very end."""
        self._record(state, raw_error=_format_exception(state))

    def build_job_event(self, state: str) -> Any:
        """Return torch's Event of the agent: "SUCCEEDED" or "FAILED", with the exception that is being handled."""
        return self._build_event(state, None, None, _format_exception(state), None)

    def _set_state(self, state: Any) -> None:
        self.group.state = state
        self._put("remaining_restarts", self._restarts_left)
        self._put(state.name.lower(), 1)

    # -- torch's metrics --------------------------------------------------------------------------------------------

    def _put(self, name: str, value: int) -> None:
        from torch.distributed.elastic.metrics import put_metric

        put_metric(f"workers.{self._spec.role}.{name}", value)

    def _put_duration(self, name: str, duration_s: float, *, is_success: bool = True) -> None:
        from torch.distributed.elastic.metrics import put_metric

        put_metric(f"{name}.{'success' if is_success else 'failure'}", 1)
        put_metric(f"{name}.duration.ms", int(duration_s * 1000))

    # -- torch's events ---------------------------------------------------------------------------------------------

    def _record(
        self,
        state: str,
        *,
        worker: Any = None,
        failure: Any = None,
        raw_error: str | None = None,
        duration_ms: float | None = None,
    ) -> None:
        destination = getattr(self._spec, "event_log_handler", "null")
        if _is_heard(destination):
            from torch.distributed.elastic.events import record

            record(self._build_event(state, worker, failure, raw_error, duration_ms), destination)

    def _build_event(
        self, state: str, worker: Any, failure: Any, raw_error: str | None, duration_ms: float | None
    ) -> Any:
        from torch.distributed.elastic.events import Event, EventSource

        if self._host is None:
            self._host = socket.getfqdn(socket.gethostname())  # may ask a name server
        about: dict[str, Any] = {
            "group_world_size": self.group.group_world_size,
            "entry_point": self._entrypoint_name,
        }
        if worker is not None:  # torch's values are tuples, by accident
            about["local_rank"] = (worker.local_rank,)
            about["role_rank"] = (worker.role_rank,)
            about["role_world_size"] = (worker.role_world_size,)
            about["exit_code"] = (getattr(failure, "exitcode", None),)
            about["worker_pid"] = (getattr(failure, "pid", None),)
        metadata = {
            "run_id": self._run_id,
            "global_rank": getattr(worker, "global_rank", None),
            "group_rank": self.group.group_rank,
            "worker_id": None if worker is None else str(worker.id),
            "role": self._spec.role,
            "hostname": self._host,
            "state": state,
            "total_run_time": self._run_time_s,
            "rdzv_backend": self._backend,
            "raw_error": raw_error if failure is None else json.dumps(failure.error_file_data),
            "metadata": json.dumps(about),
            "agent_restarts": self._spec.max_restarts - self._restarts_left,
            "duration_ms": duration_ms,
        }
        source = EventSource.AGENT if worker is None else EventSource.WORKER
        return Event(name=f"torchelastic.worker.status.{state}", source=source, metadata=metadata)


def _is_heard(destination: str) -> bool:
    """Return whether a handler gets this destination's events: to build one may cost a question to a name server."""
    if not has_event_handler(destination):
        return False
    from torch.distributed.elastic.events import get_logging_handler

    handlers = [get_logging_handler(destination), *logging.getLogger(f"torchelastic-events-{destination}").handlers]
    return any(not isinstance(each, logging.NullHandler) for each in handlers)


def _format_exception(state: str) -> str | None:
    return traceback.format_exc() if state == "FAILED" else None
