"""A worker of accelerate or Fabric: all ranks add their ranks; prints who started it."""

import os
import sys

import torch
import torch.distributed

torch.distributed.init_process_group("gloo")
total = torch.tensor(float(os.environ["RANK"]))
torch.distributed.all_reduce(total)
facts = ("ranks", os.environ["RANK"], os.environ["WORLD_SIZE"], int(total), sys.argv[1:], os.environ["OMP_NUM_THREADS"])
sys.stdout.write(f"{' '.join(map(str, facts))}\n")  # one write: the other rank writes at the same time
torch.distributed.destroy_process_group()
if "fail" in sys.argv and os.environ["RANK"] == "1":
    raise ValueError("the text")
