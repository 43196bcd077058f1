"""Rank 1 dies in the first attempt; the second one succeeds."""

import os
import time

attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
print(f"attempt={attempt} rank={os.environ['RANK']}", flush=True)
if attempt == 0:
    time.sleep(1)
    if os.environ["RANK"] == "1":
        os._exit(7)
    time.sleep(3600)
