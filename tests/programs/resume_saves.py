"""A worker that saves and resumes.

resume_saves.py FOLDER fails    all ranks save step 9; rank 0 fails in the first attempt, once all have saved
resume_saves.py FOLDER waits    all ranks save step 9 and wait
resume_saves.py FOLDER ends     all ranks end
"""

import os
import sys
import time
from pathlib import Path

from muster import worker

FOLDER, HOW = Path(sys.argv[1]), sys.argv[2]
RANK, SIZE, ATTEMPT = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"))

print(f"rank {RANK} of attempt {ATTEMPT} resumes from {worker.resume_path()}", flush=True)
if HOW == "ends" or (HOW == "fails" and ATTEMPT > 0):
    sys.exit()
worker.step(9)
worker.saved(9, FOLDER / f"checkpoint{RANK}")
(FOLDER / f"saved{RANK}").touch()
print(f"rank {RANK} waits", flush=True)
while HOW == "waits" or RANK > 0 or not all((FOLDER / f"saved{rank}").exists() for rank in range(SIZE)):
    time.sleep(0.05)
sys.exit(3)
