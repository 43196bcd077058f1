"""All-reduces ones and prints the sum; rank 1 crashes in the attempt named by CRASH_ATTEMPT."""

import os

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
ones = torch.ones(1)
dist.all_reduce(ones)
print(f"sum {int(ones.item())} of {dist.get_world_size()} rank {dist.get_rank()} attempt {attempt}", flush=True)
if os.environ.get("CRASH_ATTEMPT") == attempt and dist.get_rank() == 1:
    raise SystemExit(3)
dist.barrier()
dist.destroy_process_group()
