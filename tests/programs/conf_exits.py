"""CODE RANK: local rank RANK exits with CODE (or kills itself with signal -CODE); the others wait."""
import os, signal, sys, time

code, rank = int(sys.argv[1]), sys.argv[2]
if rank in ("all", os.environ["RANK"]):
    if code < 0:
        os.kill(os.getpid(), -code)
    sys.exit(code)
time.sleep(1000)
