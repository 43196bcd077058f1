"""Writes argv[1] numbered lines to each of stdout and stderr: at full speed, or argv[2] lines of each a second.

Every tenth line is argv[3] characters longer. A line is written with one call per stream.
"""

import os
import sys
import time

count, per_second, more = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
rank = os.environ.get("RANK", "0")
began_s = time.monotonic()
for number in range(count):
    tail = "." * more if number % 10 == 0 else ""
    for fd, name in ((1, "out"), (2, "err")):
        text = f"{name} {rank} {number:06d} {tail}\n".encode()
        while text:
            text = text[os.write(fd, text) :]
    if per_second:
        time.sleep(max(0.0, began_s + (number + 1) / per_second - time.monotonic()))
