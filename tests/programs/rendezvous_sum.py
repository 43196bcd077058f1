"""All-reduces ones and prints the sum; rank 1 crashes in the attempt named by CRASH_ATTEMPT; SUMS: how many to do."""

import os
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
for number in range(int(os.environ.get("SUMS", "1"))):
    ones = torch.ones(1)
    dist.all_reduce(ones)
    line = f"sum {int(ones.item())} of {dist.get_world_size()} rank {dist.get_rank()} number {number} attempt {attempt}"
    print(line, flush=True)
    time.sleep(float(os.environ.get("PAUSE_S", "0")))
if os.environ.get("CRASH_ATTEMPT") == attempt and dist.get_rank() == 1:
    raise SystemExit(3)
dist.barrier()
dist.destroy_process_group()
