"""Runs hang.py so that NCCL's own monitor is the only recorder: torch's server is missing, as before torch 2.5.

What NCCL would count is written to a file of this rank in the folder that COUNTS names, before each call: JSON with the
process and by communicator the counts of `doubles.nccl_monitor.OPERATIONS`. NCCL's barrier is an AllReduce. The
collectives themselves are gloo's.
"""

import json
import os
import runpy
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist

PLACES = {"broadcast": 0, "all_reduce": 4, "barrier": 4}
counts: dict[str, list[int]] = {}


def write() -> None:
    path = os.path.join(os.environ["COUNTS"], os.environ["RANK"])
    with open(f"{path}.new", "w") as file:
        json.dump({"pid": os.getpid(), "counts": counts}, file)
    os.replace(f"{path}.new", path)


def count(name: str, call: Callable[..., object]) -> Callable[..., object]:
    def counted(*arguments: object, **more: object) -> object:
        if counts:
            is_pair = any(isinstance(each, dist.ProcessGroup) for each in arguments)
            counts["bb" if is_pair else "aa"][PLACES[name]] += 1
            write()
        return call(*arguments, **more)

    return counted


def begin(name: str, call: Callable[..., object]) -> Callable[..., object]:
    """A communicator that is made at once, as with `init_process_group(device_id=)`."""

    def begun(*arguments: object, **more: object) -> object:
        made = call(*arguments, **more)
        counts[name] = [0] * 5
        write()
        return made

    return begun


del torch._C._distributed_c10d._WorkerServer
for operation in PLACES:
    setattr(dist, operation, count(operation, getattr(dist, operation)))
dist.init_process_group = begin("aa", dist.init_process_group)
dist.new_group = begin("bb", dist.new_group)
runpy.run_path(os.path.join(os.path.dirname(__file__), "hang.py"), run_name="__main__")
sys.exit(0)
