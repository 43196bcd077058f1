"""HOW: starts a sleeping grandchild, in its own session and without environment; then waits, crashes or ends."""
import os, signal, subprocess, sys

child = subprocess.Popen(["/bin/sleep", "1000"], env={}, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
os.write(1, f"rank {os.environ['RANK']} waits {child.pid}\n".encode())
if sys.argv[1] == "crash":
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[1] == "wait":
    signal.pause()
