"""How long until the user's first line runs, how much memory the launcher uses, how long until two nodes train.

python benchmarks/start.py [--count N]
"""

import time
from pathlib import Path

import _launching
from _launching import LAUNCHERS, MUSTER_COLD, TORCHRUN, Command, build_standalone_flags, launched
from _sampling import SampleFailed, parse_count, sample_in_turn, show

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


def first_line_s(launcher: Command, folder: Path) -> float:
    """Measure the time from the start of the launcher's process to the first line of the last of two workers."""
    with launched(launcher, folder, MARK, build_standalone_flags(2)) as job:
        return job.wait_last_s(2)


def launcher_pss_mb(launcher: Command, folder: Path) -> float:
    """Guard, agent and, with a warm start, the template; workers not counted."""
    with launched(launcher, folder, MARK, build_standalone_flags(2), STAY="1") as job:
        workers = {mark["pid"] for mark in job.wait_marks(2)}
        tree = [job.process.pid, *_launching.list_descendants(job.process.pid)]
        return _launching.pss_mb([pid for pid in tree if pid not in workers])


def two_nodes_s(launcher: Command, folder: Path) -> float:
    """Measure from the start of two agents on one machine, one worker each, to the end of the first all-reduce."""
    marks, script = folder / "marks", folder / "reduce.py"
    marks.unlink(missing_ok=True)
    script.write_text(ALL_REDUCE)
    flags = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "bench"]
    argv = [*launcher, *flags, "--rdzv-endpoint", f"127.0.0.1:{_launching.find_port()}", str(script)]
    began_s = time.monotonic()
    nodes = [_launching.start(argv, MARKS=str(marks)) for _ in range(2)]
    try:
        _launching.wait_for(lambda: len(_launching.read_marks(marks)) >= 2, _launching.LIMIT_S)
        if any(node.wait(30) != 0 for node in nodes):
            raise SampleFailed
    finally:
        for node in nodes:
            _launching.stop(node)
    return float(max(mark["t"] for mark in _launching.read_marks(marks))) - began_s


def main(count: int) -> None:
    cold = {"muster": MUSTER_COLD, "torchrun": TORCHRUN}
    with _launching.scratch() as folder:
        series = sample_in_turn(count, {n: lambda c=c: first_line_s(c, folder) for n, c in LAUNCHERS.items()})
        show("first script line, 2 workers", series, limit=0.15)
        series = sample_in_turn(count, {n: lambda c=c: launcher_pss_mb(c, folder) for n, c in cold.items()}, warmups=0)
        show("guard and agent (PSS)", series, unit="MB")
        series = sample_in_turn(count, {n: lambda c=c: two_nodes_s(c, folder) for n, c in LAUNCHERS.items()})
        show("two nodes until the first all-reduce", series, limit=0.55)
        series = sample_in_turn(count, {n: lambda c=c: two_nodes_s(c, folder) for n, c in cold.items()})
        show("the same, cold workers", series)


if __name__ == "__main__":
    main(parse_count(__doc__))
