"""A small training job of torch: uneven cadence, gradient accumulation, a DataLoader worker, evaluation; it resumes.

    drain_trains.py FOLDER TOTAL

Each rank writes `FOLDER/rank<R>.json` with its step and weight when it saves: at the end, and when it is told to stop.
`quiet` as a third word: it never asks.
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

ACCUMULATE = 4
RANK = int(os.environ["RANK"])
FOLDER, TOTAL = Path(sys.argv[1]), int(sys.argv[2])
IS_QUIET = "quiet" in sys.argv
OWN = FOLDER / f"rank{RANK}.json"


class Numbers(torch.utils.data.IterableDataset):
    """The batch of step i is i: what was trained can be computed."""

    def __init__(self, first: int) -> None:
        self.first = first

    def __iter__(self):
        return iter(range(self.first, TOTAL))


def main() -> None:
    dist.init_process_group("gloo")
    first, weight = 0, 0
    if OWN.exists():
        saved = json.loads(OWN.read_text())
        first, weight = saved["step"] + 1, saved["weight"]
        print(f"rank {RANK} resumes at step {first}", flush=True)
    loader = torch.utils.data.DataLoader(Numbers(first), batch_size=None, num_workers=1)
    i, gradient, stopped = first - 1, 0, False
    for i, batch in enumerate(loader, first):
        time.sleep(random.random() * 0.01 * (1 + RANK))
        gradient += int(batch) * (RANK + 1)
        if (i + 1) % ACCUMULATE:
            continue
        total = torch.tensor([gradient])
        dist.all_reduce(total)
        weight, gradient = weight + int(total), 0
        worker.step(i, total=TOTAL)
        if (i + 1) % (10 * ACCUMULATE) == 0:
            if i + 1 == 10 * ACCUMULATE:
                print(f"rank {RANK} evaluates", flush=True)
            with worker.phase("eval"):
                time.sleep(0.2 if RANK == 0 else 0.05)
        if i + 1 == 5 * ACCUMULATE:
            print(f"rank {RANK} trains", flush=True)
        if not IS_QUIET and worker.should_stop(i):
            stopped = True
            break
    time.sleep(0.3 * RANK)  # saving takes some ranks longer
    temporary = OWN.with_suffix(".tmp")
    temporary.write_text(json.dumps({"step": i, "weight": weight}))
    temporary.replace(OWN)
    worker.saved(i, OWN)
    print(f"rank {RANK} {'stopped' if stopped else 'ended'} at step {i}, deadline {worker.deadline_s()}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


main()
