"""A worker that trains with FSDP2 in place: a new module and mesh in each round, with the shards of the snapshot.

    in_place_shards.py FOLDER SIZES          until it has run with these numbers of ranks, such as 4,2,4
    in_place_shards.py FOLDER SIZES kept     the same, but uses a group, and then a mesh, of the first round

Each call of `main` appends a line to `begins`. The file `STEP` has a sum of all bits after this step, and `loaded` a
line with such a sum for each snapshot that was loaded.
"""

import hashlib
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from muster import snapshots, worker

torch.set_num_threads(1)
folder = Path(sys.argv[1])
SIZES = [int(each) for each in sys.argv[2].split(",")]
kept = {}


def append(name: str, line: str) -> None:
    with open(folder / name, "a") as file:
        file.write(f"{line}\n")


def use(name: str, call) -> None:
    try:
        print(f"{name}: {call()}", flush=True)
    except Exception as error:
        append("kept", f"{name}: {type(error).__name__}: {error}")


@worker.in_place
def main() -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    if len(sys.argv) > 3:
        group = dist.new_group(list(range(size)))
        if kept:
            use("group", lambda: dist.all_reduce(torch.ones(1), group=kept["group"]))
            use("mesh", lambda: kept["mesh"].get_group())
        kept.update(group=group, mesh=mesh)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(13, 31), torch.nn.Tanh(), torch.nn.Linear(31, 3))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def read_state() -> dict[str, object]:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        return {"model": model_state, "optimizer": optimizer_state}

    def add_bits() -> str:
        moments = [value for each in optimizer.state.values() for value in each.values()]
        whole = [each.full_tensor() if isinstance(each, DTensor) else each for each in (*model.parameters(), *moments)]
        return hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in whole)).hexdigest()

    first = 0
    if found := snapshots.load(into=read_state()):
        state = found.state
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        first = found.step + 1
        append("loaded", f"{found.step} {add_bits()}")
    append("begins", f"{rank} {os.getpid()} {first} {size}")
    place = len((folder / "begins").read_text().splitlines())
    is_last = place > sum(SIZES[:-1])
    for step in range(first, first + 40 if is_last else 1 << 20):
        optimizer.zero_grad()
        model(torch.randn(8, 13, generator=torch.Generator().manual_seed(step * 8 + rank))).square().mean().backward()
        optimizer.step()
        bits = add_bits()
        worker.step(step)
        if rank == 0:
            (folder / f"step-{step}").write_text(bits)
            (folder / "progress").write_text(str(step))
        snapshots.save(step, read_state())
        time.sleep(0.005)
    dist.barrier()
    dist.destroy_process_group()


main()
