"""Trains without torch: argv is what is wrong with it.

right      nothing
forgets    it does not resume
data       its data begins again after a restart
alone      only rank 0 saves and asks, the others go on
torn       it writes over its last checkpoint, piece by piece
"""

import json
import os
import sys
import time
from pathlib import Path

from muster import worker

WRONG, TOTAL = sys.argv[1], 50
IS_FIRST = os.environ["RANK"] == "0"
LAST = Path("checkpoints", "last.json")
weight, first = 0.0, 0
found = (LAST if LAST.exists() else None) if WRONG == "torn" else worker.resume_path()
if WRONG != "forgets" and found:
    state = json.loads(Path(found).read_text())
    weight, first = state["weight"], state["step"] + 1
batches = iter(range(TOTAL)) if WRONG == "data" else iter(range(first, TOTAL))


def save(i: int) -> None:
    text = json.dumps({"step": i, "weight": weight})
    LAST.parent.mkdir(exist_ok=True)
    if WRONG == "torn":
        with LAST.open("w", buffering=1) as file:
            for piece in text:
                file.write(piece)
                file.flush()
                time.sleep(0.005)
        return
    path = LAST.with_name(f"{i}.json")
    if IS_FIRST:
        path.with_suffix(".tmp").write_text(text)
        path.with_suffix(".tmp").replace(path)
    worker.saved(i, path)


for i in range(first, TOTAL):
    time.sleep(0.1)
    weight += next(batches)
    worker.step(i, total=TOTAL, weight=weight)
    if WRONG in ("alone", "torn") and not IS_FIRST:
        if WRONG == "torn":
            worker.should_stop(i)
        continue
    stops = worker.should_stop(i)
    if stops or i % 4 == 3:
        save(i)
    if stops:
        break
