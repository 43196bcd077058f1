"""Rank 0 fails once rank 1 ignores SIGTERM; or, with `wait`, both ignore it and wait."""
import os, pathlib, signal, sys, time

signal.signal(signal.SIGTERM, signal.SIG_IGN)
mark = pathlib.Path(sys.argv[1])
rank = os.environ["RANK"]
if rank == "1":
    mark.write_text("")
if len(sys.argv) > 2:
    os.write(1, f"rank {rank} waits\n".encode())
elif rank == "0":
    while not mark.exists():
        time.sleep(0.01)
    sys.exit(1)
time.sleep(1000)
