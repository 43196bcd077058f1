"""Counts steps; says where it runs, and whether a secret is on any command line of this machine."""

import contextlib
import os
import sys
import time
from pathlib import Path

from muster import worker

STEPS = int(sys.argv[1])
secret = os.environ.get("MY_API_KEY", "")
lines = b""
for path in Path("/proc").glob("[0-9]*/cmdline"):
    with contextlib.suppress(OSError):
        line = path.read_bytes()
        lines += b"" if b"torchx" in line else line  # the user's own command
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], "attempt", os.environ["TORCHELASTIC_RESTART_COUNT"])
print("secret is", "shown" if secret and secret.encode() in lines else "kept", "of", len(secret), flush=True)
for step in range(STEPS):
    if worker.should_stop(step):
        print("stops at", step, flush=True)
        break
    worker.step(step, total=STEPS)
    print("step", step, flush=True)
    time.sleep(0.05)
