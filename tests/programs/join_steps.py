"""Counts steps without torch, saves where it is told to stop, and ends some steps after so many ranks take part.

join_steps.py FOLDER RANKS [quiet|slow]

Rank 0 of each round writes its steps to the file `steps`. `quiet`: it never asks whether to stop. `slow`: saving takes
as long as the file `saving` exists.
"""

import os
import sys
import time
from pathlib import Path

from muster import worker

FOLDER, RANKS, HOW = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

path = worker.resume_path()
first = int(Path(path).read_text()) + 1 if path else 0
print(f"rank {RANK} of {SIZE} begins at step {first}", flush=True)
for i in range(first, 1_000_000):
    time.sleep(0.005)
    if RANK == 0:
        with (FOLDER / "steps").open("a") as steps:
            steps.write(f"{i} {SIZE}\n")
    worker.step(i)
    if HOW != ["quiet"] and worker.should_stop(i):
        while HOW == ["slow"] and (FOLDER / "saving").exists():
            time.sleep(0.01)
        if RANK == 0:
            (FOLDER / "saved").write_text(str(i))
        worker.saved(i, FOLDER / "saved" if RANK == 0 else None)
        break
    if SIZE == RANKS and i == first + 30:
        break
