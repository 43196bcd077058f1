"""A training job of torch whose result does not depend on the number of nodes: uneven cadence, gradient accumulation, a
DataLoader worker, evaluation. It resumes from `worker.resume_path()`, and ends 40 steps after that.

    drain_trains.py FOLDER

The weight after step i is the sum of all numbers up to i: each batch counts on one rank only.
"""

import json
import os
import random
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from muster import worker

ACCUMULATE, LONG, MORE = 4, 40_000, 40
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
FOLDER = Path(sys.argv[1])


class Numbers(torch.utils.data.IterableDataset):
    def __init__(self, first: int, total: int) -> None:
        self.first, self.total = first, total

    def __iter__(self):
        return iter(range(self.first, self.total))


def save(i: int, weight: int) -> None:
    path = FOLDER / f"step{i}.json"
    if RANK == 0:
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps({"step": i, "weight": weight, "world": WORLD}))
        temporary.replace(path)
    time.sleep(0.1 * RANK)  # saving takes some ranks longer
    worker.saved(i, path)


def main() -> None:
    dist.init_process_group("gloo")
    first, weight, total = 0, 0, LONG
    if path := worker.resume_path():
        saved = json.loads(Path(path).read_text())
        first, weight = saved["step"] + 1, saved["weight"]
        total = first + MORE
    loader = torch.utils.data.DataLoader(Numbers(first, total), batch_size=None, num_workers=1)
    gradient, stopped = 0, False
    print(f"rank {RANK} of {WORLD} begins at step {first}", flush=True)
    for i, batch in enumerate(loader, first):
        time.sleep(random.random() * 0.01 * (1 + RANK))
        gradient += int(batch) if (i // ACCUMULATE) % WORLD == RANK else 0
        if (i + 1) % ACCUMULATE:
            continue
        part = torch.tensor([gradient])
        dist.all_reduce(part)
        weight, gradient = weight + int(part), 0
        worker.step(i, total=total)
        if (i + 1) % (10 * ACCUMULATE) == 0:
            if i + 1 == 10 * ACCUMULATE:
                print(f"rank {RANK} of {WORLD} evaluates", flush=True)
            with worker.phase("eval"):
                time.sleep(0.2 if RANK == 0 else 0.05)
        if i + 1 == 5 * ACCUMULATE:
            print(f"rank {RANK} trains", flush=True)
        if worker.should_stop(i):
            stopped = True
            break
    save(i, weight)
    how = "stopped" if stopped else "ended"
    print(f"rank {RANK} of {WORLD} {how} at step {i}, deadline {worker.deadline_s()}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


main()
