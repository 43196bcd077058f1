"""A gloo group that sums its ranks; in attempt 0 rank 1 crashes after the first sum with the argument `crash`."""
import os, sys, warnings

warnings.filterwarnings("ignore")
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.ones(1) * (dist.get_rank() + 1)
dist.all_reduce(total)
if sys.argv[1:] == ["crash"] and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    if dist.get_rank() == 1:
        os._exit(9)
    dist.barrier()
os.write(1, f"rank {dist.get_rank()} sum {int(total)} attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}\n".encode())
dist.destroy_process_group()
