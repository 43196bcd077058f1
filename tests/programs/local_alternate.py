"""Writes 2 x N numbered lines, one to standard output, one to standard error, in turn."""

import os
import sys

for number in range(int(sys.argv[1])):
    os.write(1, b"out %d\n" % number)
    os.write(2, b"err %d\n" % number)
