"""From the loss or the join of a node to the next common all-reduce. Workers run gloo all-reduces all the time.

They ask `should_stop`, so with muster the ranks stop at one step when a node joins.

    python benchmarks/heal.py [--count N] [--skip-torchrun]

torchrun is measured where it recovers at all. Where it does not (its launcher waits for a collective to time out, or
ends the job), the sample fails after LIMIT_S or LOSS_LIMIT_S; `--skip-torchrun` omits it.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import _launching
from _launching import MUSTER, MUSTER_COLD, TORCHRUN, Command
from _sampling import build_parser, sample_in_turn, show

LIMIT_S = 40.0
LOSS_LIMIT_S = 150.0
"""After the loss of a node."""

REDUCE = """
import itertools, json, os, time
import torch, torch.distributed as dist
from pathlib import Path
from muster import worker
dist.init_process_group("gloo")
fd = os.open(os.environ["MARKS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
world = dist.get_world_size()
first = True
saved = worker.resume_path()
for i in itertools.count(int(Path(saved).name) + 1 if saved else 0):
    value = torch.ones(1)
    dist.all_reduce(value)
    assert value.item() == world
    if first or dist.get_rank() == 0:
        mark = {"t": time.monotonic(), "rank": dist.get_rank(), "world": world, "node": os.environ["NODE"]}
        os.write(fd, (json.dumps(mark) + "\\n").encode())
    first = False
    if worker.should_stop(i):
        worker.saved(i, str(i))
        break
    time.sleep(0.01)
dist.destroy_process_group()
"""

IMPORT = "import time; t = time.monotonic(); import torch; print(time.monotonic() - t)"


class Job:
    """Nodes of one elastic job on this machine, started one by one."""

    def __init__(self, launcher: Command, folder: Path, nnodes: str) -> None:
        self.marks = folder / "marks"
        self.marks.unlink(missing_ok=True)
        script = folder / "reduce.py"
        script.write_text(REDUCE)
        self.port = _launching.find_port()
        flags = ["--nnodes", nnodes, "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "bench"]
        self._argv = [
            *launcher,
            *flags,
            "--max-restarts",
            "3",
            "--rdzv-endpoint",
            f"127.0.0.1:{self.port}",
            str(script),
        ]
        self.nodes: list[subprocess.Popen[bytes]] = []

    def add_node(self) -> subprocess.Popen[bytes]:
        """Start one more agent."""
        node = _launching.start(self._argv, MARKS=str(self.marks), NODE=str(len(self.nodes)))
        self.nodes.append(node)
        return node

    def wait_reduce(self, world: int, after_s: float, limit_s: float = LIMIT_S) -> float:
        """Wait for the first all-reduce of size `world` after `after_s`; its time."""
        found: list[float] = []

        def find_marks() -> bool:
            found[:] = [
                mark["t"]
                for mark in _launching.read_marks(self.marks)
                if mark["world"] == world and mark["t"] > after_s
            ]
            return bool(found)

        _launching.wait_for(find_marks, limit_s, step_s=0.005)
        return min(found)

    def close(self) -> None:
        """End every node."""
        for node in self.nodes:
            _launching.stop(node, limit_s=5.0)


def kill_node(node: subprocess.Popen[bytes]) -> float:
    """SIGKILL the node's agent, and with torchrun its workers too (they would keep running); returns when."""
    pids = [node.pid, *_launching.list_descendants(node.pid)]
    at_s = time.monotonic()
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # the end of the agent ends others
            os.kill(pid, signal.SIGKILL)
    return at_s


def measure_loss(launcher: Command, folder: Path, victim: int, limit_s: float = LIMIT_S) -> float:
    """Kill one of two nodes (`--nnodes 1:2`); measure until the survivor's next all-reduce."""
    job = Job(launcher, folder, "1:2")
    try:
        job.add_node()
        wait_for_leader(job)
        job.add_node()
        job.wait_reduce(2, 0.0)
        at_s = kill_node(job.nodes[victim])
        return job.wait_reduce(1, at_s, limit_s) - at_s
    finally:
        job.close()


def wait_for_leader(job: Job) -> None:
    """Wait until the first node leads, as it would on another machine."""

    def listens() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", job.port)) == 0

    _launching.wait_for(listens, LIMIT_S)


def measure_join(launcher: Command, folder: Path) -> float:
    """Let a second node join a running job (`--nnodes 1:2`); measure from its start to the common all-reduce."""
    job = Job(launcher, folder, "1:2")
    try:
        job.add_node()
        job.wait_reduce(1, 0.0)
        at_s = time.monotonic()
        job.add_node()
        return job.wait_reduce(2, at_s) - at_s
    finally:
        job.close()


def measure_pause(launcher: Command, folder: Path) -> float:
    """Measure how long the running job pauses, from its last all-reduce alone to the first common one."""
    job = Job(launcher, folder, "1:2")
    try:
        job.add_node()
        job.wait_reduce(1, 0.0)
        job.add_node()
        common_s = job.wait_reduce(2, 0.0)
        return common_s - max(mark["t"] for mark in _launching.read_marks(job.marks) if mark["world"] == 1)
    finally:
        job.close()


def measure_alone(launcher: Command, folder: Path) -> float:
    """Start one node of `--nnodes 1:2`; measure until its first all-reduce."""
    job = Job(launcher, folder, "1:2")
    try:
        at_s = time.monotonic()
        job.add_node()
        return job.wait_reduce(1, at_s, 60.0) - at_s
    finally:
        job.close()


def measure_import() -> float:
    """Measure how long a cold worker needs for `import torch` on this machine now."""
    return float(subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, check=True, text=True).stdout)


def main(count: int, *, with_torchrun: bool) -> None:
    rows: dict[str, Callable[[Command, Path], float]] = {
        "a node is killed, until the survivor's next all-reduce": lambda c, f: measure_loss(c, f, 1, LOSS_LIMIT_S),
        "the leader is killed, until the survivor's next all-reduce": lambda c, f: measure_loss(c, f, 0),
        "a node joins, from its start to the common all-reduce": measure_join,
        "a node joins, how long the others stand still": measure_pause,
        "one node of 1:2 alone, from its start to its all-reduce": measure_alone,
    }
    with _launching.scratch() as folder:
        series = sample_in_turn(count, {"import torch": measure_import})
        show("import torch in a fresh process", series)
        for figure, measure in rows.items():
            samplers = {
                "muster": lambda m=measure: m(MUSTER, folder),
                "muster cold": lambda m=measure: m(MUSTER_COLD, folder),
            }
            show(figure, sample_in_turn(count, samplers))
            if with_torchrun:
                show("  torchrun", sample_in_turn(1, {"torchrun": lambda m=measure: m(TORCHRUN, folder)}, warmups=0))


if __name__ == "__main__":
    parser = build_parser(__doc__)
    parser.add_argument("--skip-torchrun", action="store_true", help="muster's rows only")
    options = parser.parse_args()
    main(options.count, with_torchrun=not options.skip_torchrun)
