"""Counts steps without torch, saves when it is told to stop, and goes on from there with whatever number of nodes.

resize_steps.py FOLDER [quiet]

It writes "WORLD BEGIN" to FOLDER/begins at each start of global rank 0, and ends when FOLDER/finish exists. Each rank's
process id is in FOLDER/pidRANK once it counts steps.
"""

import os
import sys
import time
from pathlib import Path

from muster import worker

FOLDER = Path(sys.argv[1])
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
SAVED = FOLDER / "saved"

i = int(SAVED.read_text()) + 1 if SAVED.exists() else 0
if RANK == 0:
    with open(FOLDER / "begins", "a") as begins:
        begins.write(f"{WORLD} {i}\n")
sys.stdout.write(f"rank {RANK} of {WORLD} begins at step {i}\n")
sys.stdout.flush()
counts = False
while not (FOLDER / "finish").exists():
    time.sleep(0.02)
    worker.step(i)
    if "quiet" not in sys.argv and worker.should_stop(i):
        if RANK == 0:
            SAVED.write_text(str(i))
        worker.saved(i, SAVED)
        sys.stdout.write(f"rank {RANK} of {WORLD} stops at step {i}\n")
        break
    if not counts:
        (FOLDER / f".pid{RANK}").write_text(str(os.getpid()))
        (FOLDER / f".pid{RANK}").replace(FOLDER / f"pid{RANK}")  # a reader sees all of it
        counts = True
    i += 1
