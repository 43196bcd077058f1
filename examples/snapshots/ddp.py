"""A data-parallel job that loses no step: its state of each step is kept in memory, and now and then on disk.

    torchx run -s local_cwd dist.ddp -j 2x2 --max_retries 3 --script examples/snapshots/ddp.py

It continues from the newer of the two. Under torchrun it has the one on disk only.
"""

import gc
from typing import Any

import torch
import torch.distributed as dist
from job import end_step, join, parse_options
from torch.nn.parallel import DistributedDataParallel

from muster import snapshots, worker


def main() -> None:
    """Train from the last step on that all ranks have."""
    options = parse_options("out/snapshots-ddp")
    device = join()
    layers = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    model = DistributedDataParallel(layers.to(device))
    snapshots.rebuild_buckets(model, lambda: model(torch.zeros(32, 16, device=device)).mean())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def read_state(step: int) -> dict[str, Any]:
        rng = torch.get_rng_state()  # of each rank; a loader's and a scheduler's state belong here as well
        return {"model": layers.state_dict(), "optimizer": optimizer.state_dict(), "rng": rng, "step": step}

    state: dict[str, Any] | None = None
    if snapshot := snapshots.load():
        state = snapshot.state
    elif path := worker.resume_path():  # the last checkpoint that all ranks have saved; None at the first start
        state = torch.load(path, map_location="cpu", weights_only=True)
    if state:
        layers.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"])
    for i in range(state["step"] + 1 if state else 0, options.steps):
        inputs = torch.randn(32, 16).to(device)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), inputs.square().sum(dim=1, keepdim=True)).backward()
        optimizer.step()
        worker.step(i, total=options.steps)
        saves, stops = end_step(i, options)
        if saves:
            path = options.output / f"step{i}.pt"
            if dist.get_rank() == 0:
                path.parent.mkdir(parents=True, exist_ok=True)
                torch.save(read_state(i), path.with_suffix(".tmp"))
                path.with_suffix(".tmp").replace(path)
            worker.saved(i, path)
        # After the checkpoint: a rank that is killed in it continues before this step, and saves it again.
        snapshots.save(i, read_state(i), replicated=True)  # the weights of one rank of a node are those of all
        if stops:
            break


main()
gc.collect()  # the model goes before its process group
dist.destroy_process_group()
