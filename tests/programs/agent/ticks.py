"""One rank prints a line every quarter of a second, with next to no CPU time, until a file appears; the other waits.

Rank 1 leaves it to a child.
"""
import os
import sys
import time

rank, done_file, prints = int(os.environ["RANK"]), sys.argv[1], sys.argv[2] == os.environ["RANK"]
if prints and rank == 1:
    child = os.fork()
    if child:
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
while not os.path.exists(done_file):
    if prints:
        print("tick", rank, flush=True)
    time.sleep(0.25)
