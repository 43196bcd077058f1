"""What the end of a replica's guard leaves behind, and what is no orphan."""

import subprocess
import sys

import pytest

PROGRAM = """
import os, subprocess, threading
from muster.schedulers.processes.driver import kill_orphans

own = subprocess.Popen(["sleep", "600"])
guard = subprocess.Popen(["sleep", "600"], start_new_session=True)
orphans = [subprocess.Popen(["sleep", "600"], start_new_session=True) for _ in range(20)]

def come_and_go():  # as the commands of a thread that asks a cluster's controller
    for _ in range(100):
        subprocess.run(["true"], check=True)

thread = threading.Thread(target=come_and_go)
thread.start()
while thread.is_alive():
    kill_orphans({guard.pid})
assert not [each for each in orphans if os.path.exists(f"/proc/{each.pid}")], "they were killed and reaped"
print(own.poll(), guard.poll())
for each in (own, guard):
    each.kill()
    each.wait()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_commands_of_this_process_are_no_orphans() -> None:
    """They were killed, and if they ended by themselves, the supervisor ended with a ChildProcessError."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "None None\n", ""), done
