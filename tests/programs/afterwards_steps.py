"""Does STEPS steps of SECONDS and saves its step in FOLDER; fails, or hangs, once where told: `crash=30:1 hang=60:0`."""

import pathlib
import sys
import time

import os

import torch
import torch.distributed as dist

from muster import worker

folder, steps, seconds = pathlib.Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
faults = dict(part.split("=") for part in sys.argv[4:])
rank = int(os.environ["RANK"])
saved = folder / "step"


def save(step):
    if rank == 0:
        (folder / "step.new").write_text(str(step))
        os.replace(folder / "step.new", saved)
    worker.saved(step, saved)


def is_due(kind, i):
    step, at = (int(part) for part in faults.get(kind, "-1:-1").split(":"))
    if rank != at or i < step or (folder / kind).exists():
        return False
    (folder / kind).touch()
    return True


dist.init_process_group("gloo")
start = int(saved.read_text()) + 1 if saved.exists() else 0
time.sleep(5 * seconds)  # the first step of an attempt takes longer
for i in range(start, steps):
    time.sleep(seconds)
    if is_due("crash", i):
        raise RuntimeError("bad batch </script><b>17</b>")
    if is_due("hang", i):
        time.sleep(3600)
    dist.all_reduce(torch.ones(1))
    worker.step(i, total=steps, loss=1.0 / (i + 1))
    worker.wait_while_paused()
    if worker.should_stop(i):
        save(i)
        break
    if worker.should_checkpoint(i):
        time.sleep(10 * seconds)
        save(i)
    elif i % 20 == 19:
        save(i)
