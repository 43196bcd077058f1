"""The job of `gpu.py` that saves snapshots: 0.67 GB of parameters and twice as much of Adam's state.

It prints what a step takes with and without a save, and what copies of the same tensors take. Then it kills itself, and
prints what loading takes.
"""

import os
import signal
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from muster import snapshots, worker

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WIDTH, BATCH = (4096, 8192) if DEVICE.type == "cuda" else (256, 64)


def wait() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def time_ms(act: Callable[[], object]) -> float:
    wait()
    begun_s = time.perf_counter()
    act()
    wait()
    return (time.perf_counter() - begun_s) * 1e3


def main() -> None:
    """Measure, and be killed, in the first attempt; load in the second."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(10)]).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    inputs = torch.randn(BATCH, WIDTH, device=DEVICE)
    numbers = iter(range(1_000_000))

    def train() -> None:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    def read_state() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def train_and_save(calls_ms: list[float]) -> None:
        step = next(numbers)
        train()
        begun_s = time.perf_counter()
        snapshots.save(step, read_state())
        calls_ms.append((time.perf_counter() - begun_s) * 1e3)
        worker.step(step)

    wait()
    begun_s = time.perf_counter()
    snapshot = snapshots.load()
    if snapshot is not None:
        loaded_s = time.perf_counter() - begun_s
        model.load_state_dict(snapshot.state["model"])
        optimizer.load_state_dict(snapshot.state["optimizer"])
        wait()
        placed_s = time.perf_counter() - begun_s - loaded_s
        print(f"snapshot: load {loaded_s:.3f} s, onto {DEVICE.type} {placed_s:.3f} s", flush=True)
        return
    for _ in range(4):
        train()
        train_and_save([])
    calls_ms: list[float] = []
    plain_ms = time_ms(lambda: [train() for _ in range(20)]) / 20
    saved_ms = time_ms(lambda: [train_and_save(calls_ms) for _ in range(30)]) / 30
    state = [value for each in optimizer.state.values() for value in each.values() if torch.is_tensor(value)]
    tensors = [*(parameter.detach() for parameter in model.parameters()), *state]
    pinned = [torch.empty(each.shape, dtype=each.dtype, pin_memory=DEVICE.type == "cuda") for each in tensors]

    def copy() -> None:
        for target, source in zip(pinned, tensors, strict=True):
            target.copy_(source, non_blocking=True)

    copy()
    copied_ms = statistics.median(time_ms(copy) for _ in range(5))
    moved_ms = statistics.median(time_ms(lambda: [each.cpu() for each in tensors]) for _ in range(3))
    size = sum(each.numel() * each.element_size() for each in tensors)
    print(
        f"snapshot: {size / 1e9:.2f} GB, step {plain_ms:.1f} ms, with a save {saved_ms:.1f} ms, "
        f"call of save {statistics.median(calls_ms):.2f} ms, copies to pinned memory {copied_ms:.1f} ms, "
        f".cpu() {moved_ms:.0f} ms",
        flush=True,
    )
    time.sleep(1)  # the last snapshot is complete
    os.kill(os.getpid(), signal.SIGKILL)


main()
