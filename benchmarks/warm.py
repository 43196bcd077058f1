"""What warm start buys: imports at launch, none at restart, pages shared. Two and four workers, gloo.

    python benchmarks/warm.py [RUNS] [import] [crash] [train] [memory]

The crash is `os._exit(1)` in one worker of a formed group, timed from the call until the last rank has finished its
first all-reduce of the next attempt; a breakdown of it is taken from the agent's event records. "train" is the same
with a first step of DistributedDataParallel and Adam, which make torch import its compiler, in place of the all-reduce.
"""

import json
import statistics
import sys
import time
from collections.abc import Mapping
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

IMPORT = """
import json, os, time
import torch
fd = os.open(os.environ["MARKS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
os.write(fd, (json.dumps({"t": time.monotonic(), "what": "imported"}) + "\\n").encode())
if os.environ.get("STAY"):
    time.sleep(600)
"""

CRASH = """
import json, os, time
import torch, torch.distributed as dist
fd = os.open(os.environ["MARKS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
def mark(what):
    line = {"t": time.monotonic(), "what": what, "rank": int(os.environ["RANK"]), "attempt": attempt}
    os.write(fd, (json.dumps(line) + "\\n").encode())
mark("started")
dist.init_process_group("gloo")
value = torch.ones(1)
dist.all_reduce(value)
assert value.item() == dist.get_world_size()
mark("reduced")
if attempt == 0:
    dist.barrier()
    if dist.get_rank() == 1:
        mark("crash")
        os._exit(1)
    time.sleep(600)
dist.destroy_process_group()  # without it gloo's threads abort the interpreter now and then, whoever launched it
"""

TRAIN = CRASH.replace(
    """value = torch.ones(1)
dist.all_reduce(value)
assert value.item() == dist.get_world_size()
""",
    """model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.Adam(model.parameters())
model(torch.ones(2, 4)).sum().backward()
optimizer.step()
""",
)

LIMIT_S = 60.0


def imported_s(launcher: tuple[str, ...], folder: Path, nproc: int) -> float:
    """From the start of the launcher's process until torch is imported in the last worker."""
    marks, script = folder / "marks", folder / "import.py"
    marks.unlink(missing_ok=True)
    script.write_text(IMPORT)
    began_s = time.monotonic()
    process = start([*launcher, "--standalone", "--nproc-per-node", str(nproc), str(script)], MARKS=str(marks))
    try:
        wait_for(lambda: len(read_marks(marks)) >= nproc, LIMIT_S)
    finally:
        stop(process)
    return max(float(str(mark["t"])) for mark in read_marks(marks)) - began_s


def tree_pss_mb(launcher: tuple[str, ...], folder: Path) -> float:
    """Launcher, agent, template and four workers that have imported torch."""
    marks, script = folder / "marks", folder / "import.py"
    marks.unlink(missing_ok=True)
    script.write_text(IMPORT)
    process = start([*launcher, "--standalone", "--nproc-per-node", "4", str(script)], MARKS=str(marks), STAY="1")
    try:
        wait_for(lambda: len(read_marks(marks)) >= 4, LIMIT_S)
        return pss_mb([process.pid, *list_descendants(process.pid)])
    finally:
        stop(process)


def recovered_s(
    launcher: tuple[str, ...],
    folder: Path,
    parts: dict[str, list[float]] | None = None,
    *,
    source: str = CRASH,
    first_s: list[float] | None = None,
) -> float:
    """From one worker's `os._exit(1)` until every rank has finished the next all-reduce, or step.

    Args:
        launcher: its command line.
        folder: for marks and logs.
        parts: gets the breakdown.
        source: CRASH or TRAIN.
        first_s: gets the time from the launcher's start until the same point of the first attempt.
    """
    marks, script = folder / "marks", folder / "crash.py"
    marks.unlink(missing_ok=True)
    script.write_text(source)
    began_s = time.monotonic()
    logs = folder / f"logs-{time.monotonic_ns()}"
    flags = ["--nproc-per-node", "2", "--max-restarts", "1", "--log-dir", str(logs)]
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--rdzv-id", "bench"]
    process = start([*launcher, *rendezvous, *flags, str(script)], MARKS=str(marks))

    def list_reduced() -> list[float]:
        return [float(str(m["t"])) for m in read_marks(marks) if (m["what"], m["attempt"]) == ("reduced", 1)]

    try:
        wait_for(lambda: len(list_reduced()) >= 2 or process.poll() is not None, LIMIT_S)
        if len(list_reduced()) < 2 or process.wait(LIMIT_S) != 0:
            raise SampleFailed
    finally:
        stop(process)
    if first_s is not None:
        first = [float(str(m["t"])) for m in read_marks(marks) if (m["what"], m["attempt"]) == ("reduced", 0)]
        first_s.append(max(first) - began_s)
    crashed_s = next(float(str(mark["t"])) for mark in read_marks(marks) if mark["what"] == "crash")
    reduced_s = max(list_reduced())
    if parts is not None:
        started_s = [float(str(m["t"])) for m in read_marks(marks) if (m["what"], m["attempt"]) == ("started", 1)]
        for name, value in break_down(logs, crashed_s, max(started_s), reduced_s).items():
            parts.setdefault(name, []).append(value)
    return reduced_s - crashed_s


def break_down(logs: Path, crashed_s: float, started_s: float, reduced_s: float) -> Mapping[str, float]:
    """Where the time went, from the agent's records; all on one machine's monotonic clock."""
    (events,) = logs.glob("*/events.jsonl")
    seen: dict[str, float] = {}
    for line in events.read_text().splitlines():
        record = json.loads(line)
        if record["monotonic_s"] > crashed_s:
            first = record["what"] not in ("worker_released", "workers_started")
            if not (first and record["what"] in seen):
                seen[record["what"]] = record["monotonic_s"]
    points = {
        "detect": seen["worker_exited"],
        "decide": seen["round_broken"],
        "stop": seen["workers_stopped"],
        "round": seen["round_formed"],
        "release": seen["workers_started"],
        "run": started_s,
        "process group and all-reduce": reduced_s,
    }
    parts, before_s = {}, crashed_s
    for name, at_s in points.items():
        parts[name], before_s = at_s - before_s, at_s
    if "workers_parked" in seen:
        parts["(fork, while stopping)"] = seen["workers_parked"] - seen["round_broken"]
    return parts


def show_imports(runs: int, folder: Path) -> None:
    """Launch: one import per node instead of one per worker."""
    for nproc, limit in ((2, 0.60), (4, 0.40)):
        series = take_turns(runs, {n: lambda c=c, k=nproc: imported_s(c, folder, k) for n, c in LAUNCHERS.items()})
        show(f"start until torch is imported in {nproc} workers", series, limit=limit)


def show_crash(runs: int, folder: Path) -> None:
    """Restart: no import at all."""
    parts: dict[str, list[float]] = {}
    cold = (*MUSTER, "--start", "cold")
    samplers = {
        "muster": lambda: recovered_s(LAUNCHERS["muster"], folder, parts),
        "torchrun": lambda: recovered_s(LAUNCHERS["torchrun"], folder),
        "muster cold": lambda: recovered_s(cold, folder),
    }
    show("crash of one of 2 workers until the next all-reduce", take_turns(runs, samplers), limit=0.06)
    for name, values in parts.items():
        print(f"    {name}: {statistics.median(values) * 1000:.1f} ms (at most {max(values) * 1000:.1f})")


def show_train(runs: int, folder: Path) -> None:
    """What it saves, and costs at launch, that the template imports torch's compiler too."""
    commands = {
        "muster": MUSTER,
        "torchrun": LAUNCHERS["torchrun"],
        "muster without the compiler": (*MUSTER, "--preload", "torch"),
    }
    firsts: dict[str, list[float]] = {name: [] for name in commands}
    samplers = {
        name: lambda c=command, f=firsts[name]: recovered_s(c, folder, source=TRAIN, first_s=f)
        for name, command in commands.items()
    }
    show("crash of one of 2 workers until the next step is done", take_turns(runs, samplers))
    for name, values in firsts.items():
        print(f"    start until the first step is done, {name}: {statistics.median(values[1:]):.3g} s", flush=True)


def show_memory(runs: int, folder: Path) -> None:
    """Pages that workers share with the template."""
    series = take_turns(runs, {n: lambda c=c: tree_pss_mb(c, folder) for n, c in LAUNCHERS.items()}, warmups=0)
    show("memory of the whole tree, 4 workers (PSS)", series, unit="MB", limit=0.7)


PARTS = {"import": show_imports, "crash": show_crash, "train": show_train, "memory": show_memory}


def main(words: list[str]) -> None:
    runs = next((int(word) for word in words if word.isdigit()), 9)
    with scratch() as folder:
        for name, part in PARTS.items():
            if name in words or not PARTS.keys() & set(words):
                part(runs, folder)


if __name__ == "__main__":
    main(sys.argv[1:])
