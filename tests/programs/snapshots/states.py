"""Saves a state of each step, is killed once, and says whether what it finds then is what it had saved.

    states.py BIG SMALL    numbers of bytes: ten steps with one, and then with the other
    states.py BYTES stay   three steps; then it stays until there is a file `go`
"""

import os
import signal
import sys
import time

import torch

from muster import snapshots
from muster._shared.snapshot_file import find_files, open_files

STEPS, FAILS_AT = 20, 15


def make(step: int) -> dict:
    size = int(sys.argv[1] if step < STEPS / 2 else sys.argv[2])
    state = torch.full((size,), step, dtype=torch.uint8)
    state[:: 1 << 20] = 255 - step
    return {"x": state}


def is_right(state: dict, step: int) -> bool:
    """Whether it is that, without as much memory again."""
    x = state["x"]
    if not torch.equal(x[:: 1 << 20], torch.full_like(x[:: 1 << 20], 255 - step)):
        return False
    x[:: 1 << 20] = step
    return all(bool((part == step).all()) for part in x.split(1 << 25))


def wait_for_save(step: int) -> None:
    """Until the step is in memory whole: a large state is when a thread has computed its sums."""
    control = open_files(find_files(os.environ)).control
    while control.find_slot(int(os.environ["LOCAL_RANK"]), (control.lineage, step)) is None:
        time.sleep(0.01)


first, attempt = 0, int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if snapshot := snapshots.load():
    first = snapshot.step + 1
    same = is_right(snapshot.state, first - 1)
    print(f"rank {os.environ['RANK']} continues {snapshot.step} {'right' if same else 'WRONG'}\n", end="", flush=True)


last = 3 if sys.argv[-1] == "stay" else STEPS
for step in range(first, last):
    snapshots.save(step, make(step))
    if step == FAILS_AT and not attempt:
        wait_for_save(step)
        os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[-1] == "stay":
    print(f"rank {os.environ['RANK']} stays\n", end="", flush=True)
    while not os.path.exists("go"):
        time.sleep(0.05)
print(f"rank {os.environ['RANK']} done\n", end="", flush=True)
