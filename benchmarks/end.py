"""How a job ends: what SIGKILL of the agent leaves, and how long a crash beside a stubborn peer takes.

python benchmarks/end.py [RUNS]
"""

import os
import signal
import sys
import time
from pathlib import Path

from _measure import LAUNCHERS, list_descendants, read_marks, scratch, show, start, stop, take_turns, wait_for

STAY = """
import json, os, signal, subprocess, sys, time
if "stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "600"])
fd = os.open(os.environ["MARKS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
os.write(fd, (json.dumps({"pid": os.getpid(), "child": child.pid}) + "\\n").encode())
if "crash" in sys.argv and os.environ["RANK"] == "0":
    time.sleep(0.5)
    os._exit(1)
time.sleep(600)
"""


def left_after_sigkill(launcher: tuple[str, ...], folder: Path) -> float:
    """Workers and grandchildren alive 1 s after SIGKILL of the agent (of muster's: the process below the guard)."""
    marks, script = folder / "marks", folder / "stay.py"
    marks.unlink(missing_ok=True)
    script.write_text(STAY)
    process = start([*launcher, "--standalone", "--nproc-per-node", "2", str(script)], MARKS=str(marks))
    wait_for(lambda: len(read_marks(marks)) >= 2, 60)
    pids = [int(str(mark[key])) for mark in read_marks(marks) for key in ("pid", "child")]
    below = list_descendants(process.pid)
    agent = process.pid if launcher == LAUNCHERS["torchrun"] else min(set(below) - set(pids))
    os.kill(agent, signal.SIGKILL)
    time.sleep(1.0)
    left = [pid for pid in pids if Path(f"/proc/{pid}").exists() and "\nState:\tZ" not in read_status(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    stop(process)
    return float(len(left))


def read_status(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return "\nState:\tZ"


def crash_s(launcher: tuple[str, ...], folder: Path) -> float:
    """One worker crashes, its peer ignores SIGTERM, `--shutdown-timeout 3`: from the crash to the launcher's end."""
    marks, script = folder / "marks", folder / "stay.py"
    marks.unlink(missing_ok=True)
    script.write_text(STAY)
    flags = ["--standalone", "--nproc-per-node", "2", "--shutdown-timeout", "3"]
    process = start([*launcher, *flags, str(script), "stubborn", "crash"], MARKS=str(marks))
    try:
        wait_for(lambda: len(read_marks(marks)) >= 2, 60)
        began_s = time.monotonic() + 0.5
        process.wait(60)
        return time.monotonic() - began_s
    finally:
        stop(process)
        for mark in read_marks(marks):
            for key in ("pid", "child"):
                if Path(f"/proc/{mark[key]}").exists():
                    os.kill(int(str(mark[key])), signal.SIGKILL)


def main(runs: int) -> None:
    with scratch() as folder:
        series = take_turns(runs, {n: lambda c=c: left_after_sigkill(c, folder) for n, c in LAUNCHERS.items()})
        show("processes left 1 s after SIGKILL of the agent", series, unit="of 4")
        series = take_turns(3, {n: lambda c=c: crash_s(c, folder) for n, c in LAUNCHERS.items()}, warmups=0)
        show("crash beside a peer that ignores SIGTERM, --shutdown-timeout 3", series)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
