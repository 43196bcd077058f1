"""A rank is killed: until the first step that was not done before, from memory and from `torch.save` to a tmpfs.

Two ranks of 512 MB each, gloo. Every step changes the state and saves it: muster by `muster.snapshots`, torchrun by
`torch.save` to a file in /dev/shm, which is as fast as files are. After a step that all ranks have saved, rank 1 kills
itself (SIGKILL); the time ends when the last rank has done the next step. A launcher that has not done it within the
limit has failed. "no state" is the same job under muster, which keeps nothing and begins anew; in it each rank also
measures a plain copy of the 512 MB: a continuation must not take longer than that job and two copies.

    python benchmarks/snapshot_crash.py [--count N] [--megabytes 512]
"""

import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from _launching import MUSTER, TORCHRUN, Command, Mark, build_standalone_flags, launched, read_marks, scratch, wait_for
from _sampling import build_parser, sample_in_turn, show

LIMIT_S = 30.0
"""From the crash on. torchrun's ranks that meet the old store's keys would wait for half an hour."""
TENSORS = 32
CRASH_STEP = 6

SCRIPT = """
import json, os, signal, sys, time
from pathlib import Path
import torch, torch.distributed as dist
how, folder, size, crash_step = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
if how == "memory":
    from muster import snapshots
fd = os.open(os.environ["MARKS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
def mark(what, **more):
    line = {"t": time.monotonic(), "what": what, "rank": rank, "attempt": attempt, **more}
    os.write(fd, (json.dumps(line) + "\\n").encode())
torch.set_num_threads(1)
state = {f"layer{n}": torch.ones(size // 32 // 4) for n in range(32)}
for tensor in state.values():
    tensor[-1] = 0
file, step = folder / f"{rank}.pt", 0
if how == "memory":
    if snapshot := snapshots.load(into=state):
        step = snapshot.step
elif how == "file" and file.exists():
    found = torch.load(file, mmap=False)
    for name, tensor in state.items():
        tensor.copy_(found["state"][name])
    step = found["step"]
mark("loaded", step=step)
dist.init_process_group("gloo")
one = torch.ones(1)
while True:
    step += 1
    dist.all_reduce(one.fill_(1.0))
    for tensor in state.values():
        assert tensor[-1] == step - 1 if how != "none" else True
        tensor[-1] = step
    mark("done", step=step)
    if how == "memory":
        snapshots.save(step, state)
    elif how == "file":
        torch.save({"state": state, "step": step}, file.with_suffix(".new"))
        file.with_suffix(".new").replace(file)
    if attempt == 0 and step == crash_step:
        if how == "none":
            copies = [torch.empty_like(tensor) for tensor in state.values()]
            for _ in range(2):
                began = time.monotonic()
                for copy, tensor in zip(copies, state.values()):
                    copy.copy_(tensor)
            mark("copied", seconds=time.monotonic() - began)
            del copies, copy  # the end of this process frees the state alone
        dist.barrier()
        if rank == 1:
            time.sleep(1.5)  # a second after the start the agent loads what describes a failure
            mark("crash")
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)
    if attempt and step > crash_step + 2 or how == "none" and attempt:
        time.sleep(600)
"""


@dataclass(frozen=True, kw_only=True)
class Crash:
    """One crash."""

    seconds: float
    """From the kill until the last rank has done the first step that was not done before."""
    loaded_s: float
    """From the kill until the last rank has its state."""
    copy_s: float
    """A plain copy of the state, where it was measured."""


def crash(launcher: Command, how: str, size: int, folder: Path) -> Crash:
    """Run a job until a rank was killed and the job has gone on.

    Raises:
        SampleFailed: it did not within the limit.
    """
    flags = [*build_standalone_flags(2), "--max-restarts", "3"]
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="muster-bench-") as files:
        words = [how, files, str(size), str(CRASH_STEP)]
        with launched(launcher, folder, SCRIPT, flags, args=words, OMP_NUM_THREADS="1") as job:
            wait_for(lambda: bool(find(read_marks(job.marks), "crash")), 2 * LIMIT_S)
            (killed,) = find(read_marks(job.marks), "crash")
            first = 1 if how == "none" else CRASH_STEP + 1

            def list_done() -> Sequence[Mark]:
                return [mark for mark in find(read_marks(job.marks), "done", step=first) if mark["attempt"]]

            wait_for(lambda: len({mark["rank"] for mark in list_done()}) == 2, LIMIT_S)
            marks = read_marks(job.marks)
            attempt = max(mark["attempt"] for mark in list_done())
            loaded = [mark["t"] for mark in find(marks, "loaded", attempt=attempt)]
            copies = [mark["seconds"] for mark in find(marks, "copied")]
            return Crash(
                seconds=max(mark["t"] for mark in list_done()) - killed["t"],
                loaded_s=max(loaded) - killed["t"],
                copy_s=max(copies, default=0.0),
            )


def find(marks: Sequence[Mark], what: str, **words: object) -> list[Mark]:
    return [mark for mark in marks if mark["what"] == what and all(mark.get(key) == words[key] for key in words)]


def main(count: int, megabytes: int) -> None:
    """Print seconds: median and spread, and what must hold."""
    size = megabytes * 1_000_000 // (TENSORS * 4) * (TENSORS * 4)
    with scratch() as folder:
        sampled = sample_in_turn(
            count,
            {
                "muster": lambda: crash(MUSTER, "memory", size, folder),
                "torchrun": lambda: crash(TORCHRUN, "file", size, folder),
                "no state": lambda: crash(MUSTER, "none", size, folder),
            },
            warmups=0,
        )
    times = {name: samples.of(lambda each: each.seconds) for name, samples in sampled.items()}
    show(f"kill of one of 2 ranks of {megabytes} MB until a new step", {n: times[n] for n in ("muster", "torchrun")})
    show("the same, until the state is loaded", {"muster": sampled["muster"].of(lambda each: each.loaded_s)})
    show("the same job without state", {"no state": times["no state"]})
    copies = sampled["no state"].of(lambda each: each.copy_s)
    show("a plain copy of the state", {"copy_": copies})
    if not all(samples.values for samples in sampled.values()):
        return
    muster, torchrun = times["muster"], times["torchrun"]
    counted = [*torchrun.values, *[LIMIT_S] * torchrun.failures]
    mine = statistics.median(muster.values)
    bound = statistics.median(times["no state"].values) + 2 * statistics.median(copies.values)
    print(f"  failed: muster {muster.failures} of {count} (goal 0), torchrun {torchrun.failures} of {count}")
    print(f"  of torchrun's best: {mine / min(torchrun.values):.3f} (goal 0.4)")
    print(f"  of torchrun's median, failures at {LIMIT_S:.0f} s: {mine / statistics.median(counted):.3f} (goal 0.2)")
    print(f"  of no state and two copies, {bound:.3f} s: {mine / bound:.3f} (goal 1)")


parser = build_parser(__doc__)
parser.add_argument("--megabytes", type=int, default=512, help="the state of one rank; default 512")
options = parser.parse_args()
main(options.count, options.megabytes)
