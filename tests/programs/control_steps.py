"""Counts steps without torch; asks for stop, checkpoint and pause, or for nothing.

control_steps.py FOLDER TOTAL [quiet]
"""

import os
import sys
import time
from pathlib import Path

from muster import worker

FOLDER, TOTAL = Path(sys.argv[1]), int(sys.argv[2])
RANK = int(os.environ["RANK"])

print(f"rank {RANK} begins", flush=True)
for i in range(TOTAL):
    time.sleep(0.02)
    worker.step(i, total=TOTAL)
    if i == 3:
        (FOLDER / f".pid{RANK}").write_text(str(os.getpid()))
        (FOLDER / f".pid{RANK}").replace(FOLDER / f"pid{RANK}")  # a reader sees all of it
        print(f"rank {RANK} counts", flush=True)
    if "quiet" in sys.argv:
        continue
    before_s = time.monotonic()
    worker.wait_while_paused()
    if time.monotonic() - before_s > 0.5:
        print(f"rank {RANK} has waited at step {i}", flush=True)
    if worker.should_checkpoint(i):
        print(f"rank {RANK} saves at step {i}", flush=True)
        worker.saved(i, FOLDER)
    if worker.should_stop(i):
        worker.saved(i, FOLDER)
        print(f"rank {RANK} stops at step {i}", flush=True)
        break
