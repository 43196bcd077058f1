import os

import torch

try:
    import numpy

    ones = numpy.ones((600, 600))
    print("blas", (ones @ ones).sum())  # a fork stops its thread pool, which starts again when used
except ImportError:
    pass
try:
    from threadpoolctl import threadpool_info

    blas_threads = max((pool["num_threads"] for pool in threadpool_info() if pool["internal_api"] == "openblas"), default=0)
except ImportError:
    blas_threads = None
tasks = len(os.listdir("/proc/self/task"))
print("threads", torch.get_num_threads(), torch.get_num_interop_threads(), tasks, blas_threads)
print("cuda", torch.cuda.is_available(), torch.cuda.is_initialized(), torch.cuda.device_count())
print("defaults", torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled())
a = torch.ones(600, 600)
print("product", (a @ a).sum().item())
print("distributed", torch.distributed.is_available(), torch.distributed.is_initialized())
b = torch.rand(10, requires_grad=True)
b.sum().backward()
print("gradient", b.grad.sum().item())
torch.manual_seed(3)
print("seeded", torch.rand(2).tolist(), torch.initial_seed())
