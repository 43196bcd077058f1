"""A program that starts functions by torchrunx: `torchrunx_job.py sum|fail|exit`."""

import os
import sys

import torchrunx


def add(value):
    import torch
    import torch.distributed as dist

    tensor = torch.tensor([value + dist.get_rank()])
    dist.all_reduce(tensor)
    parent = open(f"/proc/{os.getppid()}/cmdline").read()  # muster's agent
    return int(os.environ["RANK"]), int(tensor), "--muster-driven" in parent


def fail(value):
    if os.environ["RANK"] == "1":
        raise ValueError("the text")
    return value


def leave(value):
    if os.environ["RANK"] == "1":
        os._exit(3)
    import time

    time.sleep(600)


if __name__ == "__main__":
    function = {"sum": add, "fail": fail, "exit": leave}[sys.argv[1]]
    launcher = torchrunx.Launcher(hostnames=["localhost"], workers_per_host=2, backend="gloo" if sys.argv[1] == "sum" else None)
    try:
        result = launcher.run(function, 10)
        print(result.results)
    except Exception as error:
        print(type(error).__name__, error)
