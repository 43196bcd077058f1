"""FOLDER: says its rank and pid, waits for FOLDER/end<rank>.<attempt>, and ends with the code that stands in it."""
import os
import pathlib
import sys
import time

rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
print(f"rank {rank} attempt {attempt} pid {os.getpid()}", flush=True)
end = pathlib.Path(sys.argv[1], f"end{rank}.{attempt}")
while not (end.exists() and end.read_text()):
    time.sleep(0.02)
sys.exit(int(end.read_text()))
