import os

import torch
import torch.distributed as dist

store = dist.FileStore(os.environ["PROBE_STORE"], 2)
dist.init_process_group("gloo", store=store, rank=int(os.environ["RANK"]), world_size=2)
one = torch.ones(1)
dist.all_reduce(one)
print("sum", one.item())
dist.destroy_process_group()
