"""MARK: node 1's first worker fails once node 0's, which makes the file MARK, has printed."""
import os, pathlib, sys, time

group, attempt = os.environ["GROUP_RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
os.write(1, f"group {group} attempt {attempt}\n".encode())
if attempt == "0":
    mark = pathlib.Path(sys.argv[1])
    if group == "1":
        while not mark.exists():
            time.sleep(0.02)
        sys.exit(3)
    mark.touch()
    time.sleep(1000)
