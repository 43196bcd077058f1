"""Counts steps without torch, and saves where it is told to stop; the node of the last rank is preempted once.

drain_steps.py FOLDER TOTAL
"""

import os
import signal
import sys
import time
from pathlib import Path

from muster import worker

FOLDER, TOTAL = Path(sys.argv[1]), int(sys.argv[2])
RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
OWN, PREEMPTED = FOLDER / f"step{RANK}", FOLDER / "preempted"

first = int(OWN.read_text()) + 1 if OWN.exists() else 0
print(f"rank {RANK} begins at step {first}, resumes from {worker.resume_path()}", flush=True)
for i in range(first, TOTAL):
    time.sleep(0.01 * (1 + RANK))
    worker.step(i, total=TOTAL)
    if RANK == SIZE - 1 and i == 20 and not PREEMPTED.exists():
        PREEMPTED.touch()
        os.kill(int(os.environ["MUSTER_STATUS_PAGE"].split("/")[2]), signal.SIGTERM)
    if worker.should_stop(i):
        OWN.write_text(str(i))
        worker.saved(i, FOLDER if RANK == 0 else None)
        print(f"rank {RANK} stops at step {i}", flush=True)
        sys.exit()
print(f"rank {RANK} is done", flush=True)
