"""Chooses CUDA's own allocator as many training scripts do: before torch is imported."""

import os

os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "backend:cudaMallocAsync"
import torch

print(torch.cuda.get_allocator_backend(), torch.ones(4, device="cuda").sum().item())
