"""The Python API: functions and commands as workers, started from a program. Names, fields and results are torch's.

    launcher       elastic_launch, launch_agent            launch_config  LaunchConfig (imports torch)
    call           pickles a function and its arguments    results        serves workers, keeps what they return
    job            one job: wait, output, records          process        one agent under its guard, as a process
    flags          torch's configuration to flags          failures       outcomes to torch's exceptions
    errors         what torch has no class for

The agent is always a process of its own: a program that starts a job keeps its signal handlers, threads and children.
The package can be imported without torch; what is torch's own class, or derived from one, is loaded when first asked
for. From outside, import the names of `__all__` from this package.
"""

from typing import Any

from muster.elastic.errors import AgentLost, PickleFault
from muster.elastic.launcher import elastic_launch, launch_agent

_LAZY = {
    "LaunchConfig": "muster.elastic.launch_config",
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
    "RunResult": "torch.distributed.elastic.agent.server.api",
}
"""Public names that need torch, and where they are defined."""

__all__ = ["elastic_launch", "launch_agent", "AgentLost", "PickleFault", *_LAZY]  # noqa: PLE0604  # its keys


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(_LAZY[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
