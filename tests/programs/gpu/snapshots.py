"""Trains on the device, saves a snapshot at each step, kills itself twice, and compares what it gets back.

The training is deterministic: what `load` gives for a step must be, bit by bit, what the same steps give again.

    snapshots.py WAY
"""

import os
import random
import signal
import sys
import threading
import time
from typing import Any

import torch

from muster import snapshots, worker

STEPS, KILLS, WIDTH = 60, 2, 1024
DEVICE = torch.device("cuda")
WAYS = {
    "plain": {},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "graph": {"capturable": True},
    "compiled": {"capturable": True},
    "average": {"fused": True},
    "outside": {},
}
"""Options of the optimizer. `average` keeps one of the weights, and `outside` changes these outside of `step`."""


class Trainer:
    def __init__(self, way: str) -> None:
        torch.manual_seed(0)
        layers = (torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.ReLU(), torch.nn.Linear(2 * WIDTH, WIDTH))
        self.way = way
        self.model = torch.nn.Sequential(*layers).to(DEVICE)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, **WAYS[way])
        self.average = [each.detach().clone() for each in self.model.parameters()] if way == "average" else []
        self._inputs = torch.empty(64, WIDTH, device=DEVICE)
        self._update = torch.compile(self.optimizer.step) if way == "compiled" else self.optimizer.step
        self._graph: Any = None

    def train(self, step: int) -> None:
        generator = torch.Generator().manual_seed(step)
        self._inputs.copy_(torch.randn(64, WIDTH, generator=generator))
        if self.way != "graph":
            self._work()
        elif step < 3:  # before a capture
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self._work()
            torch.cuda.current_stream().wait_stream(side)
        else:
            if self._graph is None:
                self._graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(self._graph):
                    self._work()
            self._graph.replay()
        with torch.no_grad():
            if self.way == "outside":
                for each in self.model.parameters():
                    each.mul_(0.999)
            for average, each in zip(self.average, self.model.parameters(), strict=False):
                average.mul_(0.9).add_(each, alpha=0.1)

    def _work(self) -> None:
        self.optimizer.zero_grad(set_to_none=False)
        self.model(self._inputs).square().mean().backward()
        self._update()

    def read_state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict()["state"],
            "average": dict(enumerate(self.average)),
        }


def list_tensors(state: dict[Any, Any]) -> dict[str, torch.Tensor]:
    found = {}
    for name, value in state.items():
        if isinstance(value, dict):
            found.update({f"{name}.{inner}": tensor for inner, tensor in list_tensors(value).items()})
        else:
            found[str(name)] = value.detach().cpu()
    return found


def kill_soon(attempt: int) -> None:
    time.sleep(random.Random(attempt).uniform(0.3, 0.9))
    os.kill(os.getpid(), signal.SIGKILL)


def main(way: str) -> None:
    torch.use_deterministic_algorithms(True)
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    snapshot = snapshots.load()
    trainer, start = Trainer(way), 0
    if snapshot is not None:
        start = snapshot.step + 1
        for step in range(start):
            trainer.train(step)
        torch.cuda.synchronize()
        found, expected = list_tensors(snapshot.state), list_tensors(trainer.read_state())
        differ = [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)]
        print(f"loaded step {snapshot.step}: {len(expected)} tensors, differ {differ}", flush=True)
    for step in range(start, STEPS):
        trainer.train(step)
        if attempt < KILLS and step == start + 8:
            threading.Thread(target=kill_soon, args=(attempt,), daemon=True).start()
        snapshots.save(step, trainer.read_state())
        worker.step(step, total=STEPS)
        if attempt < KILLS:
            time.sleep(0.05)  # the kill comes before the end
    torch.cuda.synchronize()


main(sys.argv[1])
