"""POINT [apart] [held] [nodes]: in attempt 0, rank 1 is killed while the others are in POINT; the next goes through all.

POINT: init, new_group, reduce, destroy, wait (all stay until something else ends them) or none. `apart`: ranks reach the
process group 0.3 s apart. `held`: rank 1 prints "held" and stays before POINT in place of being killed. `nodes`: only a
round of two nodes counts as attempt 0.
"""

import os
import signal
import sys
import threading
import time

import torch
import torch.distributed as dist

point = sys.argv[1]
rank = int(os.environ["RANK"])
is_first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
if "nodes" in sys.argv:
    is_first = is_first and os.environ["GROUP_WORLD_SIZE"] == "2"


def pass_point(name: str) -> None:
    """Where rank 1 is killed, a moment after the others have gone on."""
    if is_first and name == point and rank == 1:
        time.sleep(0.1)
        if "held" in sys.argv:
            print("held", flush=True)
            threading.Event().wait()
        os.kill(os.getpid(), signal.SIGKILL)


if "apart" in sys.argv:
    time.sleep(0.3 * rank)
pass_point("init")
dist.init_process_group("gloo")
pass_point("new_group")
group = dist.new_group()
pass_point("reduce")
value = torch.ones(1)
dist.all_reduce(value, group=group)
assert value.item() == dist.get_world_size()
print("ready", rank, flush=True)
if is_first and point == "wait":
    threading.Event().wait()
pass_point("destroy")
dist.barrier()
dist.destroy_process_group()
print("done", rank, flush=True)
