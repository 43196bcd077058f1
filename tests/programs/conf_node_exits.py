"""MARK: node 0's worker exits with 0 at once; node 1's first one fails once the file MARK exists."""
import os, pathlib, sys, time

group, attempt = os.environ["GROUP_RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
os.write(1, f"group {group} attempt {attempt} pid {os.getpid()}\n".encode())
if group != "0" and attempt == "0":
    while not pathlib.Path(sys.argv[1]).exists():
        time.sleep(0.02)
    sys.exit(3)
