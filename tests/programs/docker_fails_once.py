"""Fails in its first attempt; in the second it waits for /data/go."""

import os
import time

attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
print("attempt", attempt, flush=True)
if attempt == "0":
    raise SystemExit(3)
while not os.path.exists("/data/go"):
    time.sleep(0.05)
