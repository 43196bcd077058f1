"""From a node's loss, or its coming, to the next common all-reduce. Workers run gloo all-reduces all the time.

    python benchmarks/heal.py [RUNS]

torchrun is measured where it recovers at all. Where it does not (its launcher waits for a collective to time out, or
ends the job), it gets LIMIT_S and the row says so; `--skip-torchrun` leaves those out.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from _measure import (
    MUSTER,
    TORCHRUN,
    SampleFailed,
    list_descendants,
    read_marks,
    scratch,
    show,
    start,
    stop,
    take_turns,
    wait_for,
)

LIMIT_S = 40.0

REDUCE = """
import json, os, time
import torch, torch.distributed as dist
imported = time.monotonic()
dist.init_process_group("gloo")
fd = os.open(os.environ["MARKS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
world = dist.get_world_size()
first = True
while True:
    value = torch.ones(1)
    dist.all_reduce(value)
    assert value.item() == world
    if first or dist.get_rank() == 0:
        mark = {"t": time.monotonic(), "rank": dist.get_rank(), "world": world, "node": os.environ["NODE"]}
        os.write(fd, (json.dumps(mark) + "\\n").encode())
    first = False
    time.sleep(0.01)
"""

IMPORT = "import time; t = time.monotonic(); import torch; print(time.monotonic() - t)"


class Job:
    """Nodes of one elastic job on this machine, started one by one."""

    def __init__(self, launcher: tuple[str, ...], folder: Path, nnodes: str) -> None:
        self.marks = folder / "marks"
        self.marks.unlink(missing_ok=True)
        script = folder / "reduce.py"
        script.write_text(REDUCE)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        flags = ["--nnodes", nnodes, "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "bench"]
        self._argv = [*launcher, *flags, "--max-restarts", "3", "--rdzv-endpoint", f"127.0.0.1:{port}", str(script)]
        self.nodes: list[subprocess.Popen[bytes]] = []

    def add_node(self) -> subprocess.Popen[bytes]:
        """Start one more agent."""
        node = start(self._argv, MARKS=str(self.marks), NODE=str(len(self.nodes)))
        self.nodes.append(node)
        return node

    def wait_reduce(self, world: int, after_s: float, limit_s: float = LIMIT_S) -> float:
        """Time of the first all-reduce of that size after a time."""
        found: list[float] = []

        def look() -> bool:
            found[:] = [
                float(str(mark["t"]))
                for mark in read_marks(self.marks)
                if mark["world"] == world and float(str(mark["t"])) > after_s
            ]
            return bool(found)

        wait_for(look, limit_s, step_s=0.005)
        return min(found)

    def close(self) -> None:
        """End every node."""
        for node in self.nodes:
            stop(node, limit_s=5.0)


def kill_node(node: subprocess.Popen[bytes]) -> float:
    """SIGKILL the node's agent, and with torchrun its workers too (they would live on); returns when."""
    pids = [node.pid, *list_descendants(node.pid)]
    at_s = time.monotonic()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    return at_s


def lose(launcher: tuple[str, ...], folder: Path, victim: int) -> float:
    """`--nnodes 1:2`: one of two nodes is killed; until the survivor's next all-reduce."""
    job = Job(launcher, folder, "1:2")
    try:
        job.add_node()
        wait_for_leader(job)
        job.add_node()
        job.wait_reduce(2, 0.0)
        at_s = kill_node(job.nodes[victim])
        return job.wait_reduce(1, at_s) - at_s
    finally:
        job.close()


def wait_for_leader(job: Job) -> None:
    """The first node leads: give it the start it would have on another machine."""
    argv = job._argv  # noqa: SLF001
    port = int(argv[argv.index("--rdzv-endpoint") + 1].rpartition(":")[2])

    def listens() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    wait_for(listens, LIMIT_S)


def join(launcher: tuple[str, ...], folder: Path) -> float:
    """`--nnodes 1:2`: a second node joins a running job; from its start to the common all-reduce."""
    job = Job(launcher, folder, "1:2")
    try:
        job.add_node()
        job.wait_reduce(1, 0.0)
        at_s = time.monotonic()
        job.add_node()
        return job.wait_reduce(2, at_s) - at_s
    finally:
        job.close()


def alone(launcher: tuple[str, ...], folder: Path) -> float:
    """`--nnodes 1:2` with one node present; until its first all-reduce."""
    job = Job(launcher, folder, "1:2")
    try:
        at_s = time.monotonic()
        job.add_node()
        return job.wait_reduce(1, at_s, 60.0) - at_s
    finally:
        job.close()


def import_torch_s() -> float:
    """What a cold worker pays for `import torch` on this machine, now."""
    return float(subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, check=True, text=True).stdout)


def main(runs: int, *, with_torchrun: bool) -> None:
    cold = (*MUSTER, "--start", "cold")
    rows: dict[str, Callable[[tuple[str, ...], Path], float]] = {
        "a node is killed, until the survivor's next all-reduce": lambda c, f: lose(c, f, 1),
        "the leader is killed, until the survivor's next all-reduce": lambda c, f: lose(c, f, 0),
        "a node joins, from its start to the common all-reduce": join,
        "one node of 1:2 alone, from its start to its all-reduce": alone,
    }
    with scratch() as folder:
        series = take_turns(runs, {"import torch": import_torch_s})
        show("import torch in a fresh process", series)
        for figure, measure in rows.items():
            samplers = {
                "muster": lambda m=measure: m(MUSTER, folder),
                "muster cold": lambda m=measure: m(cold, folder),
            }
            show(figure, take_turns(runs, samplers))
            if with_torchrun:
                show("  torchrun", take_turns(1, {"torchrun": lambda m=measure: m(TORCHRUN, folder)}, warmups=0))


if __name__ == "__main__":
    words = sys.argv[1:]
    counts = [int(word) for word in words if word.isdigit()]
    try:
        main(counts[0] if counts else 9, with_torchrun="--skip-torchrun" not in words)
    except SampleFailed:
        sys.exit("a measurement did not complete")
