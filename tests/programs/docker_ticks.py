"""Prints steps until /data/go exists."""

import os
import time

step = 0
while not os.path.exists("/data/go"):
    print("step", step, flush=True)
    step += 1
    time.sleep(0.05)
