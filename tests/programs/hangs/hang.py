"""One rank, or all, hang in the way that the first argument names; rank 1 is the guilty one."""

import ctypes
import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from muster import worker

LONG_S = 600.0
SHORT = timedelta(seconds=95)


def wait() -> None:
    time.sleep(LONG_S)


def spin() -> None:
    while True: pass


class Stuck(Dataset):
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(LONG_S)
        return torch.ones(4)


def main(how: str, guilty: int) -> None:
    rank = int(os.environ["RANK"])
    is_guilty = rank == guilty
    if how == "init":
        sys.stdout.write("ready\n")
    if how == "init" and is_guilty:
        wait()
    if how == "old":  # as before torch 2.5
        del torch._C._distributed_c10d._WorkerServer
    dist.init_process_group("gloo", timeout=SHORT if how == "evaluates" else None)
    values = torch.ones(4)
    for _ in range(5):
        dist.all_reduce(values)
    sys.stdout.write("ready\n")  # whole, where both ranks share one standard output
    sys.stdout.flush()
    if how in ("sleeps", "old") and is_guilty:
        wait()
    pair = dist.new_group([0, 1], group_desc="pair") if how == "group" else None
    if how == "group" and is_guilty:
        wait()
    if pair is not None:
        dist.barrier(pair)
    if how == "asks":
        worker.should_stop(1)
        if is_guilty:
            wait()
    if how == "skips" and is_guilty:
        dist.barrier()
        wait()
    if how == "other" and is_guilty:
        dist.broadcast(values, 0)
    if how == "spins" and is_guilty:
        spin()
    if how == "evaluates" and is_guilty:
        with worker.phase("eval"):
            spin()
    if how == "native" and is_guilty:
        ctypes.PyDLL(None).sleep(int(LONG_S))
    if how == "stops" and is_guilty:
        os.kill(os.getpid(), 19)
    if how == "size" and is_guilty:  # as a last batch without samples: gloo lets this rank go on
        dist.all_reduce(torch.ones(0))
        values = torch.ones(4)
    if how in ("exits", "leaves") and is_guilty:
        if how == "leaves" and os.fork() == 0:  # a helper keeps the connections open
            wait()
        os._exit(0)
    if how == "loads" and is_guilty:
        for _ in DataLoader(Stuck(), num_workers=1):
            sys.stdout.write("loaded\n")
    if how == "receives" and not is_guilty:
        dist.recv(values, guilty)
    if how == "receives" and is_guilty:
        wait()
    dist.all_reduce(values)


main(sys.argv[1], int(sys.argv[2]))
