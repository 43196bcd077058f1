"""Prints its CPUs and the number of threads that torch would use."""

import os

import torch

print("cpus", os.environ["LOCAL_RANK"], *sorted(os.sched_getaffinity(0)), "threads", torch.get_num_threads(), flush=True)
