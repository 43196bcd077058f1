"""Reports steps through muster.worker, and ends in the way that its argument names."""

import os
import signal
import subprocess
import sys
import time

from muster import worker

how = sys.argv[1]
for i in range(8):
    worker.step(i, total=10, loss=1.0 / (i + 1))
    assert worker.should_stop(i) is False

if how == "where":
    import muster

    print(f"muster is {muster.__file__}, managed {worker.is_managed()}", flush=True)
elif how == "raise":
    raise ValueError("after step 7")
elif how == "fork":
    if os.fork() == 0:
        worker.step(900)
        os._exit(worker.is_managed())
    assert os.wait()[1] == 0
    raise ValueError("after the fork")
elif how == "second":
    code = "from muster import worker; worker.step(900); raise SystemExit(worker.is_managed())"
    assert subprocess.run([sys.executable, *sys.argv[2:], "-c", code]).returncode == 0
    raise ValueError("after the second process")
elif how == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
elif how == "waits":
    print("waiting", flush=True)
    time.sleep(600)
elif how == "steps":  # reports steps, and does nothing else that the agent could see
    for i in range(8, 100):
        worker.step(i)
        time.sleep(0.1)
