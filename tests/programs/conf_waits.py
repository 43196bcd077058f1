"""Prints its pid, then the name of the signal that comes; ends with 0 after it."""
import os, signal, sys

def report(signum, frame):
    os.write(1, f"rank {os.environ['RANK']} got {signal.Signals(signum).name}\n".encode())
    sys.exit(0)

for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1"):
    signal.signal(getattr(signal, name), report)
os.write(1, f"rank {os.environ['RANK']} waits {os.getpid()}\n".encode())
while True:
    signal.pause()
