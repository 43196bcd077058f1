"""Forms a group with the other workers, prints it, works for argv[1] seconds, prints done."""

import os
import sys
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
one = torch.ones(1)
dist.all_reduce(one)
rank, world = dist.get_rank(), dist.get_world_size()
assert int(one.item()) == world
print(f"training rank={rank} world={world} attempt={os.environ['TORCHELASTIC_RESTART_COUNT']}", flush=True)
dist.destroy_process_group()
time.sleep(float(sys.argv[1]))
print(f"done rank={rank}", flush=True)
