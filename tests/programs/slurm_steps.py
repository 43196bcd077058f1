"""Counts steps into a weight, saves them where all nodes read, and writes down each step of rank 0: FOLDER TOTAL DELAY.

No rank begins before all are there, as with a collective. A file `leave-RANK` in the folder has that rank say at step
10, once, that its node is at fault.
"""

import glob
import json
import os
import sys
import time

from muster import worker

folder, total, delay_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
rank = int(os.environ["RANK"])
path = worker.resume_path()
state = {"next": 0, "weight": 1.0}
if path:
    with open(f"{path}.json") as file:
        state = json.load(file)
print("rank", rank, "of", os.environ["WORLD_SIZE"], "begins at", state["next"], "on", os.environ["SLURMD_NODENAME"], flush=True)
begun = f"{folder}/begun-{os.environ['SLURM_JOB_ID']}-{os.environ['MASTER_PORT']}-"
open(f"{begun}{rank}", "w").close()
while len(glob.glob(f"{glob.escape(begun)}*")) < int(os.environ["WORLD_SIZE"]):
    time.sleep(0.005)
trace = open(f"{folder}/trace", "a")
for step in range(state["next"], total):
    state = {"next": step + 1, "weight": state["weight"] * 0.999 + step}
    if rank == 0:
        trace.write(f"{step} {os.environ['SLURM_JOB_ID']}.{os.environ.get('SLURM_RESTART_COUNT', '0')}\n")
        trace.flush()
    worker.step(step, total=total)
    if step == 10 and os.path.exists(f"{folder}/leave-{rank}"):
        os.unlink(f"{folder}/leave-{rank}")
        worker.leave_node("its GPU is slow")
    stops = worker.should_stop(step)
    if stops or (step + 1) % 20 == 0 or step + 1 == total:
        path = f"{folder}/step{step}"
        if rank == 0:
            with open(f"{path}.new", "w") as file:
                json.dump(state, file)
            os.replace(f"{path}.new", f"{path}.json")
        worker.saved(step, path)
    if stops:
        print("rank", rank, "stops at", step, flush=True)
        break
    time.sleep(delay_s)
else:
    if rank == 0:
        with open(f"{folder}/weight", "w") as file:
            file.write(repr(state["weight"]))
