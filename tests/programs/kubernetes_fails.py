"""Rank 1 raises; the others run for ever."""

import os
import time

print(f"alive rank={os.environ['RANK']}", flush=True)
if os.environ["RANK"] == "1":
    time.sleep(2)
    raise ValueError("the batch was bad")
time.sleep(3600)
