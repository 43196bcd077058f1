"""One all-reduce over all ranks; each prints its result."""
import os
import warnings

warnings.filterwarnings("ignore")

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
value = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(value)
print(f"rank {os.environ['RANK']} of {dist.get_world_size()} got {int(value.item())}", flush=True)
dist.destroy_process_group()
