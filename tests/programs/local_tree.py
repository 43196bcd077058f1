"""Starts a grandchild that called setsid and has an empty environment, prints it, and waits. Arguments: [ignore-term]."""

import os
import signal
import sys
import time

if "ignore-term" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    os.execve("/bin/sleep", ["sleep", "1000"], {})
print("tree is up", flush=True)
while True:
    time.sleep(1000)
