"""Trains with DDP in place: if a rank is lost, the others run `main` again in the same process.

    muster-agent --standalone --nproc-per-node 2 --max-restarts 1 --spare-workers 1 examples/snapshots/in_place.py

Rank 1 kills itself once, as the kernel does when memory runs out. Model and optimizer stay; what belongs to the process
group is inside `main`.
"""

import os

import torch
import torch.distributed as dist

from muster import snapshots, worker

torch.manual_seed(0)
layers = torch.nn.Linear(16, 1)
optimizer = torch.optim.Adam(layers.parameters())


def read_state():
    """Return what a snapshot keeps."""
    return {"model": layers.state_dict(), "optimizer": optimizer.state_dict()}


@worker.in_place
def main():
    """Train, from the last snapshot of all ranks if there is one."""
    dist.init_process_group("gloo")
    first = 0
    if snapshot := snapshots.load(into=read_state()):
        layers.load_state_dict(snapshot.state["model"])
        optimizer.load_state_dict(snapshot.state["optimizer"])
        first = snapshot.step + 1
    model = torch.nn.parallel.DistributedDataParallel(layers)
    snapshots.rebuild_buckets(model, lambda: model(torch.zeros(8, 16)).mean())
    for i in range(first, 40):
        optimizer.zero_grad()
        model(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()
        worker.step(i, total=40)
        snapshots.save(i, read_state(), replicated=True)
        if i == 20 and os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), 9)
    dist.destroy_process_group()


main()
