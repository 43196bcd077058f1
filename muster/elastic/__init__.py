"""The Python API: functions and commands as workers, started from a program. Names, fields and results are torch's.

    handle         our own API: launch and its handle
    launcher       elastic_launch, launch_agent            agent          LocalElasticAgent
    torch_records  LaunchConfig, WorkerSpec (imports torch)
    processes      start_processes and its contexts        rendezvous     handlers that the caller made
    flags          torch's configuration to flags          failures       outcomes to torch's exceptions
    tail           TailLog, tail_logfile, live bars        worker_group   torch's metrics and events
    events         ice-learn's Events                      jobs/          one job of any of these: `call` pickles its
                                                           function, `results` receives what workers return
    fork/          start_method="fork": workers are forks of the program itself

The agent is always a process of its own: a program that starts a job keeps its signal handlers, threads and children.
The package can be imported without torch. Classes that are torch's own, or derived from them, are loaded when they are
first asked for. From outside, import the names of `__all__` from this package.
"""

from typing import Any

from muster.elastic.agent import DEFAULT_ROLE, LocalElasticAgent
from muster.elastic.events import Events
from muster.elastic.handle import JobHandle, JobState, LaunchFailed, Results, launch
from muster.elastic.jobs.errors import AgentLost, PickleFault, ResultsMissing
from muster.elastic.launcher import elastic_launch, launch_agent
from muster.elastic.processes import (
    IS_WINDOWS,
    MultiprocessContext,
    PContext,
    SubprocessContext,
    start_processes,
)
from muster.elastic.tail import TailLog, tail_logfile

_LAZY = {
    "WorkerSpec": "muster.elastic.torch_records",
    "LaunchConfig": "muster.elastic.torch_records",
    "ChildFailedError": "torch.distributed.elastic.multiprocessing.errors",
    "ProcessFailure": "torch.distributed.elastic.multiprocessing.errors",
    "record": "torch.distributed.elastic.multiprocessing.errors",
    "SignalException": "torch.distributed.elastic.multiprocessing.api",
    "Std": "torch.distributed.elastic.multiprocessing.api",
    "to_map": "torch.distributed.elastic.multiprocessing.api",
    "LogsSpecs": "torch.distributed.elastic.multiprocessing.api",
    "DefaultLogsSpecs": "torch.distributed.elastic.multiprocessing.api",
    "LogsDest": "torch.distributed.elastic.multiprocessing.api",
    "RunProcsResult": "torch.distributed.elastic.multiprocessing.api",
    "WorkerState": "torch.distributed.elastic.agent.server.api",
    "Worker": "torch.distributed.elastic.agent.server.api",
    "WorkerGroup": "torch.distributed.elastic.agent.server.api",
    "RunResult": "torch.distributed.elastic.agent.server.api",
}
"""Public names that need torch, and where they are defined."""

__all__ = [
    "launch",
    "JobHandle",
    "JobState",
    "Results",
    "LaunchFailed",
    "AgentLost",
    "PickleFault",
    "ResultsMissing",
    "elastic_launch",
    "launch_agent",
    "LocalElasticAgent",
    "DEFAULT_ROLE",
    "IS_WINDOWS",
    "Events",
    "start_processes",
    "PContext",
    "MultiprocessContext",
    "SubprocessContext",
    "TailLog",
    "tail_logfile",
    "WorkerSpec",
    "LaunchConfig",
    "ChildFailedError",
    "ProcessFailure",
    "record",
    "SignalException",
    "Std",
    "to_map",
    "LogsSpecs",
    "DefaultLogsSpecs",
    "LogsDest",
    "RunProcsResult",
    "WorkerState",
    "Worker",
    "WorkerGroup",
    "RunResult",
]


_NO_BASE = "the agent is a process of its own, and there is nothing to derive from; use LocalElasticAgent"
_NOT_HERE = {
    "ElasticAgent": _NO_BASE,
    "SimpleElasticAgent": _NO_BASE,
    "SubprocessHandler": "processes are the agent's; PContext.pids() has their ids",
}
"""Public names of torch's that have no counterpart, and why."""


def __getattr__(name: str) -> Any:
    if name in _NOT_HERE:
        # An import would replace AttributeError's text.
        raise ImportError(f"{__name__} has no {name}: {_NOT_HERE[name]}")
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(_LAZY[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
