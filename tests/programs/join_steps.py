"""Counts steps without torch, saves where it is told to stop, and ends some steps after so many ranks take part.

join_steps.py FOLDER RANKS [quiet|slow|snapshots|handled]

Rank 0 of each round writes its steps to the file `steps`. `quiet`: it never asks whether to stop. `slow`: saving takes
as long as the file `saving` exists. `snapshots`: it keeps snapshots and never asks. `handled`: the same, and it ends
itself when it gets SIGTERM.
"""

import os
import signal
import sys
import time
from pathlib import Path

from muster import worker

FOLDER, RANKS, HOW = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

path = worker.resume_path()
first = int(Path(path).read_text()) + 1 if path else 0
keeps, signals = HOW in (["snapshots"], ["handled"]), []
if keeps:
    from muster import snapshots

    found = snapshots.load()
    first = found.step + 1 if found else 0
if HOW == ["handled"]:
    signal.signal(signal.SIGTERM, lambda number, _frame: signals.append(number))
print(f"rank {RANK} of {SIZE} begins at step {first}", flush=True)
for i in range(first, 1_000_000):
    time.sleep(0.005)
    if RANK == 0:
        with (FOLDER / "steps").open("a") as steps:
            steps.write(f"{i} {SIZE}\n")
    worker.step(i)
    if keeps:
        snapshots.save(i, {"step": i}, replicated=True)
        if signals:
            break
    elif HOW != ["quiet"] and worker.should_stop(i):
        while HOW == ["slow"] and (FOLDER / "saving").exists():
            time.sleep(0.01)
        if RANK == 0:
            (FOLDER / "saved").write_text(str(i))
        worker.saved(i, FOLDER / "saved" if RANK == 0 else None)
        break
    if SIZE == RANKS and i == first + 30:
        break
