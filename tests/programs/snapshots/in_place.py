"""A worker that trains with DDP in place, in several buckets, and has the faults that its folder names.

    in_place.py FOLDER LAST          until the step LAST
    in_place.py FOLDER LAST SIZE     until LAST steps after SIZE ranks have begun

A fault is a file `PLACE RANK STEP SIGKILL|SIGSTOP` in FOLDER: the rank that finds it at this place of this step removes
it, and does so. With a file `asks` the ranks ask `should_stop`. Each call of `main` appends a line to `begins`, and the
last line has a sum of all bits.
"""

import contextlib
import hashlib
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from muster import snapshots, worker

torch.set_num_threads(1)
folder = Path(sys.argv[1])
faults, asks = (folder / "faults").exists(), (folder / "asks").exists()
time.sleep(float(os.environ.get("SETUP_S", "0")))
torch.manual_seed(0)
layers = torch.nn.Sequential(*[each for _ in range(5) for each in (torch.nn.Linear(32, 32), torch.nn.Tanh())])
optimizer = torch.optim.Adam(layers.parameters(), lr=0.01)
now = {"rank": -1, "step": -1}


def meet(place: str) -> None:
    """Have the fault of this place, if there is one."""
    if not faults:
        return
    for signum in (signal.SIGKILL, signal.SIGSTOP):
        with contextlib.suppress(FileNotFoundError):
            (folder / f"{place} {now['rank']} {now['step']} {signum.name}").unlink()
            os.kill(os.getpid(), signum)


class Backward(torch.autograd.Function):
    """Has a fault in the middle of the backward."""

    @staticmethod
    def forward(_context, value):
        return value.clone()

    @staticmethod
    def backward(_context, gradient):
        meet("backward")
        return gradient


class Data(torch.utils.data.Dataset):
    """Random rows."""

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(8, 32, generator=torch.Generator().manual_seed(index))


def read_state() -> dict[str, object]:
    return {"model": layers.state_dict(), "optimizer": optimizer.state_dict()}


def count_groups() -> int:
    """What torch's globals still know of process groups."""
    known = [*vars(dist.distributed_c10d).items(), *vars(dist.distributed_c10d._world).items()]
    sizes = [len(value) for name, value in known if name.startswith("_") and isinstance(value, dict | list)]
    return dist.distributed_c10d._world.group_count + sum(sizes)


def main() -> None:
    now.update(rank=int(os.environ["RANK"]), step=-1)
    known = count_groups()
    meet("init")
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    meet("load")
    first = 0
    if found := snapshots.load(into=read_state()):
        layers.load_state_dict(found.state["model"])
        optimizer.load_state_dict(found.state["optimizer"])
        first = found.step + 1
    with open(folder / "begins", "a") as file:
        file.write(f"{rank} {os.getpid()} {first} {size} {known}\n")
    last = int(sys.argv[2])
    if len(sys.argv) > 3:
        last = first + last if size == int(sys.argv[3]) else 1 << 20
    meet("group")
    dist.new_group(list(range(size)))
    model = DistributedDataParallel(layers, bucket_cap_mb=0.01)
    snapshots.rebuild_buckets(model, lambda: model(torch.zeros(8, 32)).sum())
    rows = range(rank + first * size, last * size, size)
    loader = iter(torch.utils.data.DataLoader(Data(), batch_size=None, sampler=rows, num_workers=1))
    for step in range(first, last):
        now["step"] = step
        meet("loader")
        batch = next(loader)
        optimizer.zero_grad()
        Backward.apply(model(batch)).square().mean().backward()
        meet("reduce")
        dist.all_reduce(torch.ones(1))
        optimizer.step()
        worker.step(step, total=last)
        if asks and worker.should_stop(step):
            sys.exit("told to stop")
        meet("save")
        snapshots.save(step, read_state(), replicated=True)
        if rank == 0:
            (folder / "progress").write_text(str(step))
        time.sleep(0.005)
    moments = [value for each in optimizer.state.values() for value in each.values()]
    data = b"".join(each.detach().numpy().tobytes() for each in (*layers.parameters(), *moments))
    print(f"rank {rank} done {hashlib.sha256(data).hexdigest()[:16]}\n", end="", flush=True)
    dist.barrier()
    dist.destroy_process_group()


(main if os.environ.get("RESTARTED") else worker.in_place(main))()
