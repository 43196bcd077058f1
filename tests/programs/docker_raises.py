"""Rank 1 raises; the others wait for ever."""

import os
import time

if os.environ["RANK"] == "1":
    raise ValueError("the data set is empty")
time.sleep(3600)
