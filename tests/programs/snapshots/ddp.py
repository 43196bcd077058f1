"""A worker that trains with DDP, in several buckets, and saves every step by `muster.snapshots`.

    ddp.py FOLDER       until the step that `ends` finds
    ddp.py FOLDER LAST  until the step LAST

Ranks have BatchNorm statistics and dropout of their own. The last line has a sum of all bits of the
weights and moments.
"""

import hashlib
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from ends import find_end
from torch.nn.parallel import DistributedDataParallel

from muster import snapshots, worker

torch.set_num_threads(1)
folder = Path(sys.argv[1])
last = int(sys.argv[2]) if len(sys.argv) > 2 else None
dist.init_process_group("gloo")
rank = dist.get_rank()
progress_fd = os.open(folder / "progress", os.O_WRONLY | os.O_CREAT)
torch.manual_seed(0)
parts = [(torch.nn.Linear(32, 32), torch.nn.BatchNorm1d(32), torch.nn.Dropout(0.1), torch.nn.Tanh()) for _ in range(5)]
layers = torch.nn.Sequential(*[each for part in parts for each in part])
model = DistributedDataParallel(layers, bucket_cap_mb=0.01)
optimizer = torch.optim.Adam(layers.parameters(), lr=0.01)
torch.manual_seed(rank)
snapshots.rebuild_buckets(model, lambda: model(torch.zeros(8, 32)).sum())
step = 0


def read_state() -> dict[str, object]:
    return {"model": layers.state_dict(), "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()}


if found := snapshots.load():
    step = found.step
    layers.load_state_dict(found.state["model"])
    optimizer.load_state_dict(found.state["optimizer"])
    torch.set_rng_state(found.state["rng"])
(folder / f"worker-{rank}").write_text(str(os.getpid()))
while step < (find_end(folder, rank, step) if last is None else last):
    step += 1
    optimizer.zero_grad()
    (model(torch.randn(8, 32)).square().mean() * (1 + rank)).backward()
    optimizer.step()
    if last is None:
        time.sleep(0.005)
        worker.step(step)
        snapshots.save(step, read_state())
        if rank == 0:
            os.pwrite(progress_fd, step.to_bytes(8, "little"), 0)
moments = [value for each in optimizer.state.values() for value in each.values()]
data = b"".join(each.detach().numpy().tobytes() for each in (*layers.parameters(), *moments))
print(f"rank {rank} done {step} {hashlib.sha256(data).hexdigest()[:16]}\n", end="", flush=True)  # in one piece
dist.barrier()
dist.destroy_process_group()
