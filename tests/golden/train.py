"""The training program of the golden jobs: says its place, then does what its argument says."""

import os
import sys
import time

word = sys.argv[1]
rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
print(f"rank {rank} of {os.environ['WORLD_SIZE']}, attempt {attempt}: {word}", flush=True)


def step(batch):
    raise ValueError(f"bad batch {batch}")


if word == "raise" and rank == "1":
    step(17)
if word == "crash-once" and rank == "1" and attempt == "0":
    os._exit(3)
if word == "eat" and rank == "1":
    hog = []
    while True:
        hog.append(bytearray(os.urandom(1 << 20)))
if word == "raise":
    time.sleep(600)
while word == "wait" and not os.path.exists("go"):
    time.sleep(0.05)
while word in ("sit", "eat"):
    time.sleep(600)
