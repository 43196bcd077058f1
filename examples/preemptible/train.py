"""A data-parallel job that loses nothing when it is preempted or changes its size: all ranks stop at one step and save.

    torchx run -s local_cwd dist.ddp -j 1:2x2 --script examples/preemptible/train.py

Each sample of an epoch is trained once, with any number of ranks in between. It runs unchanged under torchrun. On a
cluster, let --output be a folder that all nodes share.
"""

import argparse
import gc
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from muster import data, worker


def main() -> None:
    """Join the other ranks, train, part."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, default=Path("out/preemptible"), help="folder of the checkpoints")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--save-every", type=int, default=500)
    options = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    train(options, device)
    gc.collect()  # the model goes before its process group: one that outlives it may wait for ever (torch 2.13, gloo)
    dist.destroy_process_group()


def train(options: argparse.Namespace, device: torch.device) -> None:
    """Train from the last checkpoint on, until the end or until all ranks stop."""
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    model = DistributedDataParallel(layers.to(device))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    samples = read_samples()
    sampler = data.Sampler(len(samples), batch=64)  # of all ranks together, whatever their number
    if path := worker.resume_path():  # the last checkpoint that all ranks have saved; None at the first start
        state = torch.load(path, map_location=device, weights_only=True)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        sampler.load_state_dict(state["sampler"])
        print(f"resumes from {path}", flush=True)
    loader = DataLoader(samples, batch_sampler=sampler)
    for part in (part for _ in sampler.epochs(sys.maxsize) for part in sampler.read(loader)):
        inputs, targets = (each.to(device) for each in part.data)
        optimizer.zero_grad()
        (torch.nn.functional.mse_loss(model(inputs), targets) * part.weight).backward()
        optimizer.step()
        sampler.commit()
        i = part.step
        worker.step(i, total=options.steps)
        stops = worker.should_stop(i)  # True at the same step on all ranks
        if stops or worker.should_checkpoint(i) or (i + 1) % options.save_every == 0 or i + 1 == options.steps:
            path = options.output / f"step{i}.pt"
            if dist.get_rank() == 0:
                whole = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
                save({**whole, "sampler": sampler.state_dict()}, path)
            worker.saved(i, path)  # the checkpoint counts once all ranks have said so
        if stops or i + 1 == options.steps:
            break


def read_samples() -> TensorDataset:
    """Make the samples: the sum of squares of 16 numbers."""
    inputs = torch.randn(4096, 16, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, inputs.square().sum(dim=1, keepdim=True))


def save(state: dict[str, object], path: Path) -> None:
    """Write beside the last checkpoint: a kill at any moment leaves a complete one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(state, path.with_suffix(".tmp"))
    path.with_suffix(".tmp").replace(path)


main()
