"""A worker that saves when it is told to stop, and ends when it can resume. It fails if nobody tells it within a minute."""

import os
import time

from muster import worker

rank = os.environ["RANK"]
print(f"rank {rank} resumes from {worker.resume_path()}", flush=True)
step = 0
while worker.resume_path() is None:
    assert step < 3000, "nobody has told this rank to stop"
    time.sleep(0.02)
    if worker.should_stop(step):
        worker.saved(step, f"/data/{step}")
        print(f"rank {rank} stops at step {step}", flush=True)
        break
    if step == 2:
        print(f"rank {rank} asks", flush=True)
    step += 1
