"""How a job ends: what SIGKILL of the agent leaves, and how long a crash takes when another worker ignores SIGTERM.

python benchmarks/end.py [--count N]
"""

import os
import signal
import subprocess
import time
from pathlib import Path

from _launching import (
    LAUNCHERS,
    TORCHRUN,
    Command,
    Mark,
    build_standalone_flags,
    launched,
    list_descendants,
    read_marks,
    scratch,
)
from _sampling import SampleFailed, parse_count, sample_in_turn, show

STAY = """
import json, os, signal, subprocess, sys, time
if "stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "600"])
fd = os.open(os.environ["MARKS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
os.write(fd, (json.dumps({"t": time.monotonic(), "pid": os.getpid(), "child": child.pid}) + "\\n").encode())
if "crash" in sys.argv and os.environ["RANK"] == "0":
    time.sleep(0.5)
    os._exit(1)
time.sleep(600)
"""


def count_left(launcher: Command, folder: Path) -> float:
    """Count workers and grandchildren alive 1 s after SIGKILL of the agent (muster's is the guard's child)."""
    with launched(launcher, folder, STAY, build_standalone_flags(2)) as job:
        pids = list_pids(job.wait_marks(2))
        below = list_descendants(job.process.pid)
        agent = job.process.pid if launcher == TORCHRUN else min(set(below) - set(pids))
        os.kill(agent, signal.SIGKILL)
        time.sleep(1.0)
        return float(kill_left(pids))


def measure_crash(launcher: Command, folder: Path) -> float:
    """One worker crashes, the other ignores SIGTERM, `--shutdown-timeout 3`: from the crash to the launcher's end."""
    flags = [*build_standalone_flags(2), "--shutdown-timeout", "3"]
    with launched(launcher, folder, STAY, flags, args=["stubborn", "crash"]) as job:
        try:
            began_s = max(mark["t"] for mark in job.wait_marks(2)) + 0.5
            job.process.wait(60)
            return time.monotonic() - began_s
        except subprocess.TimeoutExpired:
            raise SampleFailed from None
        finally:
            kill_left(list_pids(read_marks(job.marks)))


def list_pids(marks: list[Mark]) -> list[int]:
    """Workers and their children."""
    return [mark[key] for mark in marks for key in ("pid", "child")]


def kill_left(pids: list[int]) -> int:
    """SIGKILL those that still run; their number."""
    left = [pid for pid in pids if "\nState:\tZ" not in read_status(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return len(left)


def read_status(pid: int) -> str:
    """/proc/PID/status; a zombie's for a process that is gone."""
    try:
        return Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return "\nState:\tZ"


def main(count: int) -> None:
    with scratch() as folder:
        series = sample_in_turn(count, {n: lambda c=c: count_left(c, folder) for n, c in LAUNCHERS.items()})
        show("processes left 1 s after SIGKILL of the agent", series, unit="of 4")
        series = sample_in_turn(
            count, {n: lambda c=c: measure_crash(c, folder) for n, c in LAUNCHERS.items()}, warmups=0
        )
        show("crash beside a peer that ignores SIGTERM, --shutdown-timeout 3", series)


if __name__ == "__main__":
    main(parse_count(__doc__))
