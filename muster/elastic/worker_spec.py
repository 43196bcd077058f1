"""`WorkerSpec`: torch's class, with muster's rendezvous as the default and the older fields.

It imports torch, so the package's `__getattr__` loads it when it is first needed.
"""

from dataclasses import dataclass
from typing import Any

from torch.distributed.elastic.agent.server.api import WorkerSpec as TorchWorkerSpec


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
