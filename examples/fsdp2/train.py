"""FSDP2 with distributed checkpoints: a preempted job stops all ranks at one step, saves, and resumes there.

    torchx run -s local_cwd dist.ddp -j 2x2 --script examples/fsdp2/train.py

The checkpoint can be loaded by another number of ranks, as in an elastic job. It runs unchanged under torchrun.
"""

import argparse
import gc
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from muster import worker


def main() -> None:
    """Join the other ranks, train, part."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, default=Path("out/fsdp2"), help="folder of the checkpoints")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--save-every", type=int, default=250)
    options = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    train(options, device)
    gc.collect()  # the model goes before its process group
    dist.destroy_process_group()


def train(options: argparse.Namespace, device: torch.device) -> None:
    """Train from the last checkpoint on, until the end or until all ranks stop."""
    torch.manual_seed(0)
    mesh = dist.device_mesh.init_device_mesh(device.type, (dist.get_world_size(),))
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1)).to(device)
    for part in (model[0], model[2], model):
        fully_shard(part, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def read_state(step: int) -> dict[str, object]:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        return {"model": model_state, "optimizer": optimizer_state, "step": step}

    first = 0
    if path := worker.resume_path():  # the last checkpoint that all ranks have saved; None at the first start
        state = read_state(0)
        dcp.load(state, checkpoint_id=path)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        first = state["step"] + 1
        print(f"resumes from {path}", flush=True)
    for i in range(first, options.steps):
        generator = torch.Generator().manual_seed(i * dist.get_world_size() + dist.get_rank())
        inputs = torch.randn(32, 16, generator=generator).to(device)
        loss = torch.nn.functional.mse_loss(model(inputs), inputs.square().sum(dim=1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        worker.step(i, total=options.steps)
        stops = worker.should_stop(i)  # True at the same step on all ranks
        if stops or worker.should_checkpoint(i) or (i + 1) % options.save_every == 0 or i + 1 == options.steps:
            folder = options.output / f"step{i}"
            dcp.save(read_state(i), checkpoint_id=folder)  # all ranks are here at the same step
            if (folder / ".metadata").exists():  # rank 0 writes it last: without it nothing can be loaded
                worker.saved(i, folder)
        if stops:
            break


main()
