"""`LaunchConfig` and `WorkerSpec`: torch's classes with their fields, order and defaults.

Only the rendezvous backend differs: it is muster's. It imports torch, so the package's `__getattr__` loads it when it
is first needed.
"""

import os
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.elastic.agent.server.api import WorkerSpec as TorchWorkerSpec
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, LogsSpecs, Std
from torch.distributed.launcher.api import LaunchConfig as TorchLaunchConfig

from muster.agent.errors import UsageError


class TemporaryLogsSpecs(DefaultLogsSpecs):  # type: ignore[misc]  # torch has no types here
    """torch's default, but without a folder in /tmp for every configuration. The agent makes one if a log needs it."""

    def __init__(self) -> None:
        LogsSpecs.__init__(self)
        self._run_log_dir = None

    @property
    def root_log_dir(self) -> str:
        """Made when first asked for."""
        self._root_log_dir: str | None = self._root_log_dir or DefaultLogsSpecs().root_log_dir
        return str(self._root_log_dir)


@dataclass
class LaunchConfig(TorchLaunchConfig):  # type: ignore[misc]  # torch has no types here
    """torch's `LaunchConfig`.

    With every version of torch, the fields that are listed here have the positions that torch gives them.

    `log_dir`, `redirects` and `tee` are those of torch before 2.3. With `logs_specs` they are refused. `metrics_cfg`
    has no effect, as with torch. `monitor_interval` has no effect, because nothing is polled.
    """

    rdzv_backend: str = "muster"
    """"muster" (here "c10d" means it too), "static", or one of torch's own handlers: "c10d-torch", "etcd", ..."""
    log_line_prefix_template: str | None = None
    metrics_cfg: dict[str, str] = field(default_factory=dict)
    local_addr: str | None = None
    event_log_handler: str = "null"
    numa_options: Any = None
    signals_to_handle: str = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
    duplicate_stdout_filters: list[str] | None = None
    duplicate_stderr_filters: list[str] | None = None
    virtual_local_rank: bool = False
    shutdown_timeout: int | None = None
    log_dir: str | None = None
    redirects: Any = None
    tee: Any = None
    logs_specs: Any = None

    def __post_init__(self) -> None:
        older = {"log_dir": self.log_dir, "redirects": self.redirects, "tee": self.tee}
        values = {name: value for name, value in older.items() if value is not None}
        if values and self.logs_specs is not None:
            raise UsageError(f"LaunchConfig: {', '.join(values)} and logs_specs say the same; give one of them")
        if values:
            self.logs_specs = DefaultLogsSpecs(
                log_dir=self.log_dir, redirects=self.redirects or Std.NONE, tee=self.tee or Std.NONE
            )
        elif self.logs_specs is None:
            self.logs_specs = TemporaryLogsSpecs()
        if self.shutdown_timeout is None:
            self.shutdown_timeout = int(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30"))
        elif self.shutdown_timeout < 0:
            raise ValueError(f"shutdown_timeout must be non-negative, got {self.shutdown_timeout}")
        super().__post_init__()


@dataclass
class WorkerSpec(TorchWorkerSpec):  # type: ignore[misc]  # torch has no types here
    """torch's `WorkerSpec`.

    With every version of torch, the fields that are listed here have the positions that torch gives them.

    `redirects` and `tee` are those of torch before 2.3. `monitor_interval` has no effect: nothing is polled.
    """

    rdzv_handler: Any = None
    """None: this node alone, with muster's own rendezvous."""
    max_restarts: int = 3
    master_port: int | None = None
    master_addr: str | None = None
    local_addr: str | None = None
    event_log_handler: str = "null"
    numa_options: Any = None
    duplicate_stdout_filters: list[str] | None = None
    duplicate_stderr_filters: list[str] | None = None
    virtual_local_rank: bool = False
    redirects: Any = None
    tee: Any = None
