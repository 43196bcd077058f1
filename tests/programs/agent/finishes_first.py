"""In the first attempt rank 0 exits with 0 at once, and the others fail when a file appears; later all succeed."""
import os
import sys
import time

rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
print(f"rank {rank} attempt {attempt}", flush=True)
if attempt == "0" and rank != "0":
    began = time.monotonic()
    while not os.path.exists(sys.argv[1]) and time.monotonic() - began < 60:
        time.sleep(0.05)
    sys.exit(7)
