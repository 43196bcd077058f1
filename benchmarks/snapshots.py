"""What a script pays for `muster.snapshots`, beside a loop of `copy_` and `clone()` over the same tensors.

512 MB in 32 tensors, 10,000 small tensors, and 600 distributed tensors of FSDP2's kind, in one process with memory
files of its own. Saves are those from the third on; the thread that sums has ended before each, as during a step.

    python benchmarks/snapshots.py [--count N]
"""

import contextlib
import ctypes
import io
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _sampling import parse_count, sample_in_turn, show
from torch.distributed.tensor import DTensor, Shard

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from snapshot_memory import Node, worker

from muster import snapshots

LIBC = ctypes.CDLL(None)


def time_ms(act: Callable[[], object]) -> float:
    start = time.perf_counter()
    kept = act()
    elapsed_ms = (time.perf_counter() - start) * 1e3
    del kept
    return elapsed_ms


def compare(name: str, state: dict[str, Any], count: int) -> None:
    """Print save beside a loop of copy_, the first two saves beside clone(), and load(into=) beside clone()."""
    tensors = [getattr(value, "_local_tensor", value) for value in state.values()]
    copies = [tensor.clone() for tensor in tensors]
    steps = iter(range(1, 1_000_000))
    node = Node()

    def loop() -> None:
        for copy, tensor in zip(copies, tensors, strict=True):
            copy.copy_(tensor)

    def save() -> float:
        elapsed_ms = time_ms(lambda: snapshots.save(next(steps), state))
        snapshots._process.saver.wait()  # noqa: SLF001
        return elapsed_ms

    def clone() -> float:
        LIBC.malloc_trim(0)  # as in a process that has just started: its memory comes from the system
        return time_ms(lambda: [tensor.clone() for tensor in tensors])

    with worker(node):
        snapshots.load()  # as scripts do before they save
        first = sample_in_turn(2, {"save": save, "clone": clone}, warmups=0)
        save()
        show(f"{name}: the first two", first, unit="ms")
        show(name, sample_in_turn(count, {"save": save, "loop": lambda: time_ms(loop)}, warmups=0), unit="ms")
        newest = max(slot.step for slot in node.control.read_slots(0))
    node.begin_round(2, (1, newest))
    with worker(node), contextlib.redirect_stderr(io.StringIO()):
        load = sample_in_turn(
            count, {"load(into=)": lambda: time_ms(lambda: snapshots.load(into=state)), "clone": clone}, warmups=1
        )
    show(f"{name}: load", load, unit="ms")
    node.close()


@contextlib.contextmanager
def join_group() -> Iterator[None]:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def main(count: int) -> None:
    """Print milliseconds: median and spread."""
    torch.set_num_threads(1)
    compare("512 MB in 32 tensors", {str(n): torch.ones(4 << 20) for n in range(32)}, count)
    compare("10,000 tensors of 256 bytes", {f"layer.{n}.weight": torch.ones(64) for n in range(10_000)}, count)
    with join_group():
        mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
        parts = {f"layer.{n}": torch.ones(1 << 18) for n in range(600)}
        state = {name: DTensor.from_local(part, mesh, [Shard(0)], run_check=False) for name, part in parts.items()}
        compare("FSDP2: 600 tensors of 1 MiB", state, count)


main(parse_count(__doc__))
