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


def say(text):
    sys.stdout.write(f"{text}\n")  # in one piece: other ranks write to the same pipe
    sys.stdout.flush()



say(f"rank {RANK} begins")
for i in range(TOTAL):
    time.sleep(0.02)
    worker.step(i, total=TOTAL)
    if i == 3:
        (FOLDER / f".pid{RANK}").write_text(str(os.getpid()))
        (FOLDER / f".pid{RANK}").replace(FOLDER / f"pid{RANK}")  # a reader sees all of it
        say(f"rank {RANK} counts")
    if "quiet" in sys.argv:
        continue
    before_s = time.monotonic()
    worker.wait_while_paused()
    if time.monotonic() - before_s > 0.5:
        say(f"rank {RANK} has waited at step {i}")
    if worker.should_checkpoint(i):
        say(f"rank {RANK} saves at step {i}")
        worker.saved(i, FOLDER)
    if worker.should_stop(i):
        worker.saved(i, FOLDER)
        say(f"rank {RANK} stops at step {i}")
        break
