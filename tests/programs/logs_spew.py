"""Writes argv[1] numbered lines to stdout, a few to stderr, and leaves both unterminated."""

import os
import sys

rank = os.environ["LOCAL_RANK"]
for number in range(int(sys.argv[1])):
    sys.stdout.write(f"rank {rank} line {number:07d} {'x' * 60}\n")
sys.stdout.write(f"rank {rank} ends")
sys.stderr.write(f"rank {rank} warns\nrank {rank} dies")
sys.stdout.flush()
sys.stderr.flush()
os._exit(7)
