"""Says on which CPUs it runs, and how many threads torch would use there."""

import os

import torch

print("cpus", os.environ["LOCAL_RANK"], *sorted(os.sched_getaffinity(0)), "threads", torch.get_num_threads(), flush=True)
