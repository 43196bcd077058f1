"""Rank 0 blocks all signals and never ends; the others fail when a file appears."""
import os
import signal
import sys
import time

fail_file = sys.argv[1]
if os.environ["RANK"] == "0":
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
print("ready", os.environ["RANK"], flush=True)
while os.environ["RANK"] == "0" or not os.path.exists(fail_file):
    time.sleep(0.02)
sys.exit(3)
