"""Fails in another way in each attempt; its rules of `--on` say what follows. Argument: which of the lists below.

All attempts but the last three do a step before, so that their restarts do not wait.
"""

import json
import os
import signal
import sys
import time

from muster import worker


def leave_no_key() -> None:
    {}["x"]


def reset() -> None:
    raise ConnectionResetError(104, "Connection reset by peer")


def run_out_of_memory() -> None:
    raise MemoryError


def be_killed() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)
    signal.pause()


def exit_with(code: int, rank: int = 1):
    return rank, lambda: sys.exit(code)


LISTS = {
    "all": [
        (1, leave_no_key),
        exit_with(33),
        exit_with(34),
        (1, be_killed),
        (1, run_out_of_memory),
        (1, reset),
        (1, lambda: json.loads("{")),
        (1, lambda: worker.leave_node("its GPU is slow")),
        exit_with(55),
        exit_with(77, rank=0),
        exit_with(55),
    ],
    "stop": [(1, lambda: int("a"))],
    "give up": [(1, lambda: worker.give_up("no learning rate works"))],
}
NO_STEPS = 3
"""So many of the last attempts of the first list do no step."""

attempt, rank = (int(os.environ[name]) for name in ("TORCHELASTIC_RESTART_COUNT", "RANK"))
todo = LISTS[sys.argv[1]]
print("attempt", attempt, flush=True)
if len(todo) - attempt > NO_STEPS:
    worker.step(attempt + 1)
failing, fail = todo[attempt]
if rank == failing:
    fail()
time.sleep(600)
