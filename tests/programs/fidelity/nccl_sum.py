"""One all-reduce over NCCL, one rank per GPU; the first attempt crashes. Prints which processes hold the driver's files."""

import os

import torch
import torch.distributed as dist
from device_files import list_device_files

agent = os.getppid()
with open(f"/proc/{agent}/stat") as stat:
    guard = int(stat.read().rpartition(") ")[2].split()[1])
holders = [list_device_files(agent), list_device_files(guard)]

device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
dist.init_process_group("nccl", device_id=device)
one = torch.ones(1, device=device)
dist.all_reduce(one)
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
print(f"attempt {attempt} sum {one.item()} of {os.environ['LOCAL_WORLD_SIZE']} holders {holders}", flush=True)
dist.barrier()
if attempt == "0":
    os._exit(1)
dist.destroy_process_group()
