"""FSDP2 without a lost step: each rank's shards of each step are kept in memory, and now and then on disk.

    torchx run -s local_cwd dist.ddp -j 2x2 --max_retries 3 --script examples/snapshots/fsdp2.py

Both can be continued by another number of ranks. Under torchrun it has the one on disk only.
"""

import gc
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from job import end_step, join, parse_options
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from muster import snapshots, worker


def main() -> None:
    """Train from the last step on that all ranks have."""
    options = parse_options("out/snapshots-fsdp2")
    device = join()
    mesh = dist.device_mesh.init_device_mesh(device.type, (dist.get_world_size(),))
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1)).to(device)
    for part in (model[0], model[2], model):
        fully_shard(part, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def read_state(step: int) -> dict[str, Any]:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        return {"model": model_state, "optimizer": optimizer_state, "step": step}

    state: dict[str, Any] | None = None
    if snapshot := snapshots.load(into=read_state(0)):
        state = snapshot.state
    elif path := worker.resume_path():  # the last checkpoint that all ranks have saved; None at the first start
        state = read_state(0)
        dcp.load(state, checkpoint_id=path)
    if state:
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    for i in range(state["step"] + 1 if state else 0, options.steps):
        generator = torch.Generator().manual_seed(i * dist.get_world_size() + dist.get_rank())
        inputs = torch.randn(32, 16, generator=generator).to(device)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), inputs.square().sum(dim=1, keepdim=True)).backward()
        optimizer.step()
        worker.step(i, total=options.steps)
        saves, stops = end_step(i, options)
        if saves:
            folder = options.output / f"step{i}"
            dcp.save(read_state(i), checkpoint_id=folder)
            if (folder / ".metadata").exists():  # rank 0 writes it last: without it nothing can be loaded
                worker.saved(i, folder)
        # After the checkpoint: a rank that is killed in it continues before this step, and saves it again.
        snapshots.save(i, read_state(i))  # this rank's shards; no collective
        if stops:
            break


main()
gc.collect()  # the model goes before its process group
dist.destroy_process_group()
