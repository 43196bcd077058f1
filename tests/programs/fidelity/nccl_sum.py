"""One all-reduce over NCCL, one rank per GPU; the first attempt crashes. Prints which processes have a CUDA context.

The agent may hold the driver's files, because it reads the devices through NVML. Its guard holds none.
"""

import os
import subprocess

import torch
import torch.distributed as dist
from device_files import list_device_files

agent = os.getppid()
with open(f"/proc/{agent}/stat") as stat:
    guard = int(stat.read().rpartition(") ")[2].split()[1])

device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
dist.init_process_group("nccl", device_id=device)
one = torch.ones(1, device=device)
dist.all_reduce(one)
listed = subprocess.run(
    ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"], capture_output=True, text=True, check=True
).stdout.split()
names = {os.getpid(): "worker", agent: "agent", guard: "guard"}
contexts = sorted(name for pid, name in names.items() if str(pid) in listed)
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
print(
    f"attempt {attempt} sum {one.item()} of {os.environ['LOCAL_WORLD_SIZE']} contexts {contexts} "
    f"files {list_device_files(guard)}",
    flush=True,
)
dist.barrier()
if attempt == "0":
    os._exit(1)
dist.destroy_process_group()
