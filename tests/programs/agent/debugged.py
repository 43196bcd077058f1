"""A breakpoint between two lines: of rank `argv[1]`, or the builtin's ("builtin"). Then it sleeps, has talked, or meets more."""

import os
import pathlib
import sys
import time

from muster import worker


def wait_for(name):
    while not pathlib.Path(name).exists():
        time.sleep(0.01)


rank = int(os.environ["RANK"])
then = sys.argv[2] if len(sys.argv) > 2 else "0"
secret = 40 + rank
print(f"before {rank}", flush=True)
if then == "talks" and rank == 1:
    wait_for("held")
    print("rank 1 talks", flush=True)
    pathlib.Path("written").touch()
if sys.argv[1] == "builtin":
    breakpoint()
else:
    worker.breakpoint(int(sys.argv[1]))
secret += 1
print(f"after {rank} {secret}", flush=True)
for turn in range(3 if then == "again" else 0):
    breakpoint()
    print(f"turn {turn} of {rank}", flush=True)
if then.isdigit():
    time.sleep(int(then))
