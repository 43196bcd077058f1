"""Trains a linear model in float64 on whole numbers, with a constant batch, and ends some steps after a size came back.

join_losses.py FOLDER RANKS

Rank 0 writes each step, the number of ranks and the loss to the file `losses`. The steps end with RANKS ranks, 20 steps
after a round with fewer.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from muster import data, worker

FOLDER, RANKS = Path(sys.argv[1]), int(sys.argv[2])
RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def make_samples() -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    whole = torch.randint(-8, 8, (64, 4), generator=draw).double()
    return whole[:, :3], whole[:, 3]


inputs, targets = make_samples()
weights, sampler = torch.zeros(3, dtype=torch.float64), data.Sampler(64, batch=8)
path = worker.resume_path()
if path:
    state = torch.load(path, weights_only=True)
    weights = state["weights"]
    sampler.load_state_dict(state["sampler"])
dist.init_process_group("gloo")
has_shrunk = (FOLDER / "shrunk").exists()
first = sampler.steps
for part in (part for _ in sampler.epochs(1_000_000) for part in sampler.read(sampler)):
    own = weights.clone().requires_grad_()
    ((inputs[part.data] @ own - targets[part.data]).square().mean() * part.weight).backward()
    dist.all_reduce(own.grad)
    weights = weights - (own.grad / SIZE / 128).mul(2**20).round().div(2**20)
    sampler.commit()
    time.sleep(0.01)
    if RANK == 0:
        with (FOLDER / "losses").open("a") as losses:
            losses.write(f"{part.step} {SIZE} {(inputs @ weights - targets).square().mean().item().hex()}\n")
        if SIZE < RANKS:
            (FOLDER / "shrunk").touch()
    worker.step(part.step)
    if worker.should_stop(part.step):
        if RANK == 0:
            torch.save({"weights": weights, "sampler": sampler.state_dict()}, FOLDER / "saved")
        worker.saved(part.step, FOLDER / "saved")
        break
    if SIZE == RANKS and has_shrunk and part.step == first + 20:
        break
dist.destroy_process_group()
