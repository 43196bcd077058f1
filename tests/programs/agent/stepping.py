"""Does a step of 20 ms until the file that it is given exists."""

import os
import sys
import time

from muster import worker

step = 0
while not os.path.exists(sys.argv[1]):
    worker.step(step, total=1_000_000, loss=0.5)
    print(f"\x1b[1mstep {step}\x1b[0m", flush=True)
    step += 1
    time.sleep(0.02)
