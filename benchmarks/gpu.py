"""muster beside torchrun on a GPU: start, crash, loop with NCCL, and what a snapshot of 2 GB costs.

    python benchmarks/gpu.py [--count N] [--ranks N ...]

All ranks share device 0, and NCCL takes each rank for one of another host. Without a GPU nothing is measured, unless
`--cpu` asks for gloo and the CPU.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from _launching import (
    LAUNCHERS,
    MUSTER,
    Command,
    Mark,
    build_standalone_flags,
    clean_env,
    launched,
    read_marks,
    scratch,
    wait_for,
)
from _sampling import build_parser, sample_in_turn, show

LIMIT_S = 60.0
LOOP = 1500
"""All-reduces of the loop, each with a matrix product."""
SAVE = Path(__file__).with_name("_gpu_snapshot.py")

SCRIPT = """
import json, os, sys, time
rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
os.environ["NCCL_HOSTID"] = f"host{rank}"
fd = os.open(os.environ["MARKS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
def mark(what, **more):
    line = {"t": time.monotonic(), "what": what, "rank": rank, "attempt": attempt, "pid": os.getpid(), **more}
    os.write(fd, (json.dumps(line) + "\\n").encode())
import torch, torch.distributed as dist
mark("imported")
has_gpu = torch.cuda.is_available()
device = torch.device("cuda", 0) if has_gpu else torch.device("cpu")
dist.init_process_group("nccl" if has_gpu else "gloo", device_id=device if has_gpu else None)
values = torch.ones(1024, device=device)
def reduce():
    dist.all_reduce(values.fill_(1.0))
    assert values[0].item() == dist.get_world_size()
reduce()
mark("reduced")
how = sys.argv[1]
if how == "loop":
    matrix = torch.ones(2048, 2048, device=device) if has_gpu else torch.ones(64, 64)
    begun = time.monotonic()
    for i in range(int(sys.argv[2])):
        matrix @ matrix
        dist.all_reduce(values)
    reduce()
    mark("looped", seconds=time.monotonic() - begun)
while how == "stay":
    reduce()
    mark("step")
    time.sleep(0.01)
dist.destroy_process_group()
"""


def find(marks: list[Mark], what: str, *, restarted: bool = False) -> list[Mark]:
    return [mark for mark in marks if mark["what"] == what and bool(mark["attempt"]) == restarted]


def measure_start(launcher: Command, folder: Path, ranks: int) -> float:
    """Measure from the start of the launcher to the end of the first all-reduce."""
    with launched(launcher, folder, SCRIPT, build_standalone_flags(ranks), args=["end"]) as job:
        wait_for(lambda: len(find(read_marks(job.marks), "reduced")) == ranks, LIMIT_S)
        return float(max(mark["t"] for mark in find(read_marks(job.marks), "reduced"))) - job.began_s


def measure_loop(launcher: Command, folder: Path, ranks: int) -> float:
    """Measure a loop of matrix products and small all-reduces."""
    with launched(launcher, folder, SCRIPT, build_standalone_flags(ranks), args=["loop", str(LOOP)]) as job:
        wait_for(lambda: len(find(read_marks(job.marks), "looped")) == ranks, LIMIT_S)
        return float(max(mark["seconds"] for mark in find(read_marks(job.marks), "looped")))


def measure_crash(launcher: Command, folder: Path, ranks: int) -> float:
    """Kill the last rank; measure until all ranks of the next attempt have done an all-reduce."""
    flags = [*build_standalone_flags(ranks), "--max-restarts", "3"]
    with launched(launcher, folder, SCRIPT, flags, args=["stay"]) as job:
        wait_for(lambda: len(find(read_marks(job.marks), "step")) > 50 * ranks, LIMIT_S)
        time.sleep(1.5)  # a second after the start the agent loads what describes a failure
        marks = read_marks(job.marks)
        victim = next(mark["pid"] for mark in find(marks, "imported") if mark["rank"] == ranks - 1)
        at_s = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        wait_for(lambda: len(find(read_marks(job.marks), "reduced", restarted=True)) >= ranks, LIMIT_S)
        return float(max(mark["t"] for mark in find(read_marks(job.marks), "reduced", restarted=True))) - at_s


def print_snapshot_cost() -> None:
    """Run a job that saves each step, is killed and loads; print what it says."""
    flags = ["--standalone", "--max-restarts", "1", "--restart-backoff", "0", "--snapshot-memory", "30G"]
    done = subprocess.run(
        [*MUSTER, *flags, str(SAVE)], env=clean_env(), capture_output=True, text=True, timeout=300, check=False
    )
    if done.returncode != 0:
        raise SystemExit(done.stdout + done.stderr)
    print(*(line for line in done.stdout.splitlines() if line.startswith("snapshot: ")), sep="\n", flush=True)


def main(count: int, ranks: list[int]) -> None:
    figures: Mapping[str, Callable[[Command, Path, int], float]] = {
        "start to the first all-reduce": measure_start,
        "SIGKILL of a rank to the next all-reduce": measure_crash,
        f"{LOOP} matrix products and all-reduces": measure_loop,
    }
    with scratch() as folder:
        for number in ranks:
            for figure, measure in figures.items():
                samplers = {
                    name: lambda m=measure, c=command, n=number: m(c, folder, n) for name, command in LAUNCHERS.items()
                }
                show(f"{figure}, {number} rank(s)", sample_in_turn(count, samplers))
    print_snapshot_cost()


if __name__ == "__main__":
    parser = build_parser(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="numbers of ranks; default 1 2")
    parser.add_argument("--cpu", action="store_true", help="run without a GPU, to try this file")
    options = parser.parse_args()
    if not (options.cpu or Path("/dev/nvidiactl").exists()):
        raise SystemExit("no NVIDIA GPU is here: nothing is measured (--cpu tries this file without one)")
    main(options.count, options.ranks)
