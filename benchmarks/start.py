"""How long until the user's first line runs, what the launcher weighs, how long until two nodes have met.

python benchmarks/start.py [RUNS]
"""

import socket
import sys
import time
from pathlib import Path

from _measure import (
    LAUNCHERS,
    MUSTER,
    SampleFailed,
    list_descendants,
    pss_mb,
    read_marks,
    scratch,
    show,
    start,
    stop,
    take_turns,
    wait_for,
)

MARK = """
import json, os, time
line = json.dumps({"t": time.monotonic(), "rank": os.environ["RANK"], "pid": os.getpid()}) + "\\n"
fd = os.open(os.environ["MARKS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
os.write(fd, line.encode())
if os.environ.get("STAY"):
    time.sleep(600)
"""

ALL_REDUCE = """
import json, os, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
value = torch.ones(1)
dist.all_reduce(value)
assert value.item() == dist.get_world_size()
fd = os.open(os.environ["MARKS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
os.write(fd, (json.dumps({"t": time.monotonic(), "rank": os.environ["RANK"]}) + "\\n").encode())
dist.destroy_process_group()
"""


def first_line_s(launcher: tuple[str, ...], folder: Path) -> float:
    """From the start of the launcher's process to the first line of the last of two workers."""
    marks, script = folder / "marks", folder / "mark.py"
    marks.unlink(missing_ok=True)
    script.write_text(MARK)
    began_s = time.monotonic()
    process = start([*launcher, "--standalone", "--nproc-per-node", "2", str(script)], MARKS=str(marks))
    try:
        wait_for(lambda: len(read_marks(marks)) >= 2, 30)
    finally:
        stop(process)
    return max(float(str(mark["t"])) for mark in read_marks(marks)) - began_s


def launcher_pss_mb(launcher: tuple[str, ...], folder: Path) -> float:
    """Guard, agent and, with a warm start, the template; workers not counted."""
    marks, script = folder / "marks", folder / "stay.py"
    marks.unlink(missing_ok=True)
    script.write_text(MARK)
    process = start([*launcher, "--standalone", "--nproc-per-node", "2", str(script)], MARKS=str(marks), STAY="1")
    try:
        wait_for(lambda: len(read_marks(marks)) >= 2, 30)
        workers = {int(str(mark["pid"])) for mark in read_marks(marks)}
        return pss_mb([pid for pid in (process.pid, *list_descendants(process.pid)) if pid not in workers])
    finally:
        stop(process)


def two_nodes_s(launcher: tuple[str, ...], folder: Path) -> float:
    """From the start of two agents on one machine, one worker each, to the end of the first all-reduce."""
    marks, script = folder / "marks", folder / "reduce.py"
    marks.unlink(missing_ok=True)
    script.write_text(ALL_REDUCE)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "bench"]
    argv = [*launcher, *flags, "--rdzv-endpoint", f"127.0.0.1:{port}", str(script)]
    began_s = time.monotonic()
    nodes = [start(argv, MARKS=str(marks)) for _ in range(2)]
    try:
        wait_for(lambda: len(read_marks(marks)) >= 2, 60)
        if any(node.wait(30) != 0 for node in nodes):
            raise SampleFailed
    finally:
        for node in nodes:
            stop(node)
    return max(float(str(mark["t"])) for mark in read_marks(marks)) - began_s


def main(runs: int) -> None:
    cold = {"muster": (*MUSTER, "--start", "cold"), "torchrun": LAUNCHERS["torchrun"]}
    with scratch() as folder:
        series = take_turns(runs, {n: lambda c=c: first_line_s(c, folder) for n, c in LAUNCHERS.items()})
        show("first script line, 2 workers", series, limit=0.15)
        series = take_turns(runs, {n: lambda c=c: launcher_pss_mb(c, folder) for n, c in cold.items()}, warmups=0)
        show("guard and agent (PSS)", series, unit="MB")
        series = take_turns(runs, {n: lambda c=c: two_nodes_s(c, folder) for n, c in LAUNCHERS.items()})
        show("two nodes until the first all-reduce", series, limit=0.55)
        series = take_turns(runs, {n: lambda c=c: two_nodes_s(c, folder) for n, c in cold.items()})
        show("the same, cold workers", series)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 9)
