"""CUDA from a worker's first call on: devices, results, and what its children can do."""

import multiprocessing
import os
import sys

import torch
from device_files import list_device_files


def list_templates(agent):
    found = []
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/stat") as stat, open(f"/proc/{pid}/cmdline", "rb") as cmdline:
                parent = int(stat.read().rpartition(") ")[2].split()[1])
                if parent == agent and cmdline.read().startswith(b"muster-template\0"):
                    found.append(pid)
        except OSError:
            pass  # it has ended
    return found


def double(queue):
    queue.put((torch.ones(2, device="cuda") * 2).sum().item())


def main():
    print("before", torch.cuda.is_initialized(), list_device_files("self"), list_device_files(os.getppid()))
    templates = list_templates(os.getppid())
    if "template" in sys.argv:
        print("templates", len(templates), [list_device_files(pid) for pid in templates])
    print("devices", torch.cuda.device_count(), torch.cuda.current_device(), torch.cuda.get_device_name(0))
    ones = torch.ones(256, 256, device="cuda")
    print("product", (ones @ ones).sum().item(), torch.cuda.is_initialized())
    weight = torch.ones(1, 1, 3, 3, device="cuda", requires_grad=True)
    torch.nn.functional.conv2d(torch.ones(1, 1, 8, 8, device="cuda"), weight).sum().backward()
    print("gradient", weight.grad.sum().item())
    torch.manual_seed(3)
    print("seeded", torch.rand(2, device="cuda").tolist())
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        total = ones.sum()
    stream.synchronize()
    print("stream", total.item(), torch.cuda.get_allocator_backend(), torch.cuda.memory_allocated() > 0)
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    child = context.Process(target=double, args=(queue,))
    child.start()
    print("child", queue.get(timeout=100))
    child.join()
    batches = torch.utils.data.DataLoader(torch.arange(4), batch_size=2, num_workers=1, pin_memory=True)
    print("pinned", [(batch.is_pinned(), batch.to("cuda").tolist()) for batch in batches])


if __name__ == "__main__":
    main()
