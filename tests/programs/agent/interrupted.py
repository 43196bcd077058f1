"""Counts steps until it is told to stop; asks `should_stop` and `should_checkpoint` as the words say."""

import sys
import time

from muster import worker


def say(text):
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


for i in range(1_000_000):
    time.sleep(0.01)
    worker.step(i)
    if i == 3:
        say("counting")
    if "pause" in sys.argv:
        worker.wait_while_paused()
    if "checkpoint" in sys.argv and worker.should_checkpoint(i):
        say(f"saves at step {i}")
        worker.saved(i)
    if "stop" in sys.argv and worker.should_stop(i):
        say(f"saves and stops at step {i}")
        worker.saved(i)
        break
