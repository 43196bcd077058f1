"""Compiles a function for the CPU, and tells whether TorchInductor's cache had it; exit code 3 if not."""

import sys

import torch
from torch._dynamo.utils import counters

torch.set_num_threads(1)
compiled = torch.compile(lambda values: (values.sin() * 2 + values.cos()).sum())
result = compiled(torch.arange(64, dtype=torch.float32))
found = counters["inductor"]
print(f"hits {found['fxgraph_cache_hit']} misses {found['fxgraph_cache_miss']} result {result:.3f}")
sys.exit(3 if found["fxgraph_cache_miss"] else 0)
