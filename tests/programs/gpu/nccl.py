"""Ranks on the GPUs there are: `asks` prints what NCCL's monitor answers, `sleeps` has rank 1 miss an all-reduce, and `fills`
takes most of the memory, is killed, and tells in the next attempt what is free."""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist

from muster import worker
from muster.agent.features.hangs.monitor import ask
from muster.agent.features.hangs.monitor_reports import read_report


def fill() -> None:
    free, total = torch.cuda.mem_get_info()
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        torch.empty(free - (1 << 30), dtype=torch.uint8, device="cuda")[0] = 1
        torch.cuda.synchronize()
        os.kill(os.getpid(), signal.SIGKILL)
    print(f"free {free / total:.3f}", flush=True)


def choose_device() -> torch.device:
    """Choose this rank's GPU. Ranks may share one: NCCL then takes them for ranks of several hosts."""
    local_rank = int(os.environ["LOCAL_RANK"])
    count = torch.cuda.device_count()
    if local_rank >= count:
        os.environ["NCCL_HOSTID"] = f"host-{local_rank}"
    return torch.device("cuda", local_rank % count)


def main(how: str) -> None:
    device = choose_device()
    torch.cuda.set_device(device)
    if how == "fills":
        fill()
        return
    dist.init_process_group("nccl", device_id=device)
    values = torch.ones(1024, device="cuda")
    for step in range(5):
        dist.all_reduce(values)
        torch.cuda.synchronize()
        if how == "steps":
            worker.step(step, total=5)
    if how == "asks":
        text = ask(os.environ["NCCL_RAS_ADDR"], time.monotonic() + 10.0) or b""
        report = read_report(text)
        own = [] if report is None else [each for each in report.members if each.pid == os.getpid()]
        version = ".".join(map(str, torch.cuda.nccl.version()))
        print(f"nccl {version} told {report and report.version} own {len(own)} size {len(text)}", flush=True)
        print(text.decode("utf-8", "replace"), file=sys.stderr)
    if how == "sleeps" and os.environ["RANK"] == "1":
        time.sleep(600)
    if how == "steps":
        time.sleep(5)
    dist.all_reduce(values)
    torch.cuda.synchronize()
    dist.destroy_process_group()


main(sys.argv[1])
