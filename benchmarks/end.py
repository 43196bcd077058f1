"""How a job ends: what SIGKILL of the agent leaves, a crash beside a worker that ignores SIGTERM, the workers' own end.

python benchmarks/end.py [--count N] [left] [crash] [last]

"last" is from the last line of a script with a process group, of 8 workers, until the last of their processes has
ended: with a module of the name service in them, as nsswitch.conf may have it, and without.
"""

import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from _launching import (
    LAUNCHERS,
    MUSTER_COLD,
    TORCHRUN,
    Command,
    Mark,
    build_standalone_flags,
    launched,
    list_descendants,
    read_marks,
    scratch,
)
from _sampling import SampleFailed, build_parser, sample_in_turn, show

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


LAST = """
import ctypes, json, os, sys, time
import torch, torch.distributed as dist
ending = os.open(os.environ["ENDING"], os.O_WRONLY)  # the kernel closes it when the process ends
fd = os.open(os.environ["MARKS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
if "names" in sys.argv:
    ctypes.CDLL("libnss_compat.so.2")
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
dist.barrier()
dist.destroy_process_group()
os.write(fd, (json.dumps({"t": time.monotonic()}) + "\\n").encode())
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
    """Measure from a worker's crash to the launcher's end. The other ignores SIGTERM (`--shutdown-timeout 3`)."""
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


def measure_last(launcher: Command, folder: Path, args: list[str]) -> float:
    """Measure the time from the last line of the last of 8 workers until none of their processes is left."""
    fifo = folder / f"ending-{time.monotonic_ns()}"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    poll = select.poll()
    poll.register(reader, 0)  # only the hang-up: all that wrote have closed it
    try:
        with launched(launcher, folder, LAST, build_standalone_flags(8), args=args, ENDING=str(fifo)) as job:
            marks = job.wait_marks(8)
            if not poll.poll(60_000):
                raise SampleFailed
            ended_s = time.monotonic()
            job.process.wait(60)
            if job.process.returncode:
                raise SampleFailed
            return ended_s - float(max(mark["t"] for mark in marks))
    finally:
        os.close(reader)
        fifo.unlink()


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


def show_left(count: int, folder: Path) -> None:
    series = sample_in_turn(count, {n: lambda c=c: count_left(c, folder) for n, c in LAUNCHERS.items()})
    show("processes left 1 s after SIGKILL of the agent", series, unit="of 4")


def show_crash(count: int, folder: Path) -> None:
    series = sample_in_turn(count, {n: lambda c=c: measure_crash(c, folder) for n, c in LAUNCHERS.items()}, warmups=0)
    show("crash beside a peer that ignores SIGTERM, --shutdown-timeout 3", series)


def show_last(count: int, folder: Path) -> None:
    commands = {**LAUNCHERS, "muster cold": MUSTER_COLD}
    for args, what in (([], ""), (["names"], ", with a module of the name service")):
        samplers = {n: lambda c=c, a=args: measure_last(c, folder, a) for n, c in commands.items()}
        show(f"last script line until 8 workers have ended{what}", sample_in_turn(count, samplers))


PARTS: Mapping[str, Callable[[int, Path], None]] = {"left": show_left, "crash": show_crash, "last": show_last}


def main() -> None:
    parser = build_parser(__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help="see above; all when none is named")
    options = parser.parse_args()
    if not PARTS.keys() >= set(options.parts):
        parser.error(f"the parts are {', '.join(PARTS)}")
    with scratch() as folder:
        for name in options.parts or PARTS:
            PARTS[name](options.count, folder)


if __name__ == "__main__":
    main()
