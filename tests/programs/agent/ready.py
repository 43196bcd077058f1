"""Prints its rank and attempt, then does what its arguments say (for the first attempt, or for all)."""
import os
import signal
import subprocess
import sys
import time

rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
words = sys.argv[1:]

if "ignore-term" in words:
    for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
if "grandchild-ignores-term" in words:
    subprocess.Popen(["sh", "-c", "trap '' TERM INT HUP QUIT; while :; do sleep 1; done"])
if "grandchild-hides" in words:
    subprocess.Popen(
        ["setsid", "env", "-i", "sleep", "1000"],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, close_fds=True,
    )
if "grandchildren" in words:
    for _ in range(200):
        subprocess.Popen(["sleep", "1000"])
if "term-witness" in words:
    # The child records its own SIGTERM; the worker takes a moment to clean up.
    witness = sys.argv[-1]
    code = f"import signal,time;signal.signal(15,lambda *a: open({witness!r},'w').close());print('watching',flush=True);time.sleep(1000)"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    child.stdout.readline()

    def bow_out(*_):
        time.sleep(0.3)
        os._exit(0)

    signal.signal(signal.SIGTERM, bow_out)

print(f"ready rank {rank} attempt {attempt}", flush=True)

if "crash" in words and rank == 0:
    os._exit(3)
if "crash-once" in words and rank == 0 and attempt == 0:
    os._exit(3)
if "done" in words:
    sys.exit(0)
if "stop-self" in words and rank == 0:
    os.kill(os.getpid(), signal.SIGSTOP)
while True:
    time.sleep(0.05)
