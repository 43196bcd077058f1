"""A worker that trains with FSDP2. It continues from memory, or, to compare, from what `torch.save` has written.

    shards.py FOLDER            until the step that `ends` finds; saves every step by `muster.snapshots`
    shards.py FOLDER FROM LAST  from the file FROM ("-": the beginning) to the step LAST; writes FOLDER/LAST.pt

The last line of rank 0 has a sum of all bits of the weights.
"""

import hashlib
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from ends import find_end
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

from muster import snapshots, worker

torch.set_num_threads(1)
folder = Path(sys.argv[1])
begin, last = (sys.argv[2], int(sys.argv[3])) if len(sys.argv) > 2 else (None, None)
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
log_fd = os.open(folder / f"log-{rank}-{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
progress_fd = os.open(folder / "progress", os.O_WRONLY | os.O_CREAT)
torch.manual_seed(0)
mesh = dist.device_mesh.init_device_mesh("cpu", (size,))
model = torch.nn.Sequential(torch.nn.Linear(13, 31), torch.nn.Tanh(), torch.nn.Linear(31, 3))
fully_shard(model, mesh=mesh)
weights = {name: each.detach() for name, each in model.named_parameters()}
momenta = {name: torch.zeros_like(each) for name, each in weights.items()}
step = 0


def gather() -> dict[str, torch.Tensor]:
    both = {f"{kind}.{name}": each for kind, all_ in (("w", weights), ("m", momenta)) for name, each in all_.items()}
    return {name: each.full_tensor() for name, each in both.items()}


if begin is None:
    if found := snapshots.load(into={"model": weights, "momenta": momenta, "step": 0}):
        step = found.step
elif begin != "-":
    for name, whole in torch.load(begin, weights_only=True).items():
        into = (weights if name[0] == "w" else momenta)[name[2:]]
        into.to_local().copy_(distribute_tensor(whole, mesh, into.placements).to_local())
    step = int(Path(begin).stem)
os.write(log_fd, (json.dumps(["started", size, step]) + "\n").encode())
while step < (find_end(folder, rank, step) if last is None else last):
    step += 1
    generator = torch.Generator().manual_seed(step * size + rank)
    inputs = torch.randn(8, 13, generator=generator)
    model.zero_grad()
    model(inputs).square().mean().backward()
    with torch.no_grad():
        for name, each in model.named_parameters():
            momenta[name].mul_(0.9).add_(each.grad)
            each.sub_(momenta[name] * 0.05)
    if last is None:
        time.sleep(0.005)
        worker.step(step)
        snapshots.save(step, {"model": weights, "momenta": momenta, "step": step})
        if rank == 0:
            os.pwrite(progress_fd, step.to_bytes(8, "little"), 0)
whole = gather()
if rank == 0:
    data = b"".join(whole[name].numpy().tobytes() for name in sorted(whole))
    print(f"all of {size} done {step} {hashlib.sha256(data).hexdigest()[:16]}", flush=True)
    if last is not None:
        torch.save(whole, folder / f"{last}.pt")
dist.barrier()
dist.destroy_process_group()
