"""The gain of a warm start: one import per node at launch, none at restart, shared pages. Two and four workers, gloo.

    python benchmarks/warm.py [--count N] [import] [crash] [apart] [train] [memory] [cpu [--against FOLDER]]

The crash is `os._exit(1)` in one worker of a formed process group, timed from the call until the last rank has finished
its first all-reduce of the next attempt, 1.5 s after its first one; the agent's event records give a breakdown of it.
"bare", in turn with the others, is what no launcher can save: a fork of a process with torch, gloo's process group and
an all-reduce, beside a fork that hosts the store. torchrun gets up to twice as many turns, until five samples are good.
"apart" is the crash with ranks that reach the process group up to two seconds apart, on one node and on two, timed from
the last rank that reaches it. "train" is the crash with a first step of DistributedDataParallel and Adam, which make
torch import its compiler, in place of the all-reduce. "cpu" is the whole tree's CPU time, user and system, of a job of
eight workers and one all-reduce; FOLDER is another version of muster, unpacked, to compare with in place of torchrun.
"""

import functools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import _launching
from _launching import LAUNCHERS, MUSTER, MUSTER_COLD, TORCHRUN, Command, Job, build_standalone_flags, launched
from _sampling import SampleFailed, Samples, build_parser, sample_in_turn, show
from start import ALL_REDUCE

STOP = ("detect", "decide", "stop")
"""Parts of a restart that end the old workers."""
RECOVERY_LIMIT_S = 12.0
"""From the crash on. torchrun's ranks that meet the old store's keys would wait for half an hour."""
GOOD = 5
"""Good samples that a ratio needs; torchrun's restart fails about every second time."""
LATE_S = 0.25
"""A refused client of torch's store sleeps for so long at least."""

IMPORT = """
import json, os, time
import torch
fd = os.open(os.environ["MARKS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
os.write(fd, (json.dumps({"t": time.monotonic(), "what": "imported"}) + "\\n").encode())
if os.environ.get("STAY"):
    time.sleep(600)
"""

CRASH = """
import json, os, random, time
import torch, torch.distributed as dist
fd = os.open(os.environ["MARKS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
def mark(what):
    line = {"t": time.monotonic(), "what": what, "rank": int(os.environ["RANK"]), "attempt": attempt}
    os.write(fd, (json.dumps(line) + "\\n").encode())
mark("started")
time.sleep(random.uniform(0.0, float(os.environ.get("APART_S", "0"))))
mark("reached")
dist.init_process_group("gloo")
value = torch.ones(1)
dist.all_reduce(value)
assert value.item() == dist.get_world_size()
mark("reduced")
if attempt == 0:
    dist.barrier()
    if dist.get_rank() == 1:
        time.sleep(1.5)  # a second after the start the agent loads what describes a failure
        mark("crash")
        os._exit(1)
    time.sleep(600)
dist.destroy_process_group()  # without it gloo's threads abort the interpreter now and then, with every launcher
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

BARE = """
import os, signal, socket, time
import torch, torch.distributed as dist
listener = socket.create_server(("127.0.0.1", 0))
port = listener.getsockname()[1]
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE="2", TORCHELASTIC_USE_AGENT_STORE="True")
began = time.monotonic()
pids = []
for rank in (-1, 0, 1):
    pids.append(os.fork())
    if pids[-1]:
        continue
    if rank < 0:
        fd = listener.fileno()
        store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=fd)
        time.sleep(60)
    os.environ["RANK"] = str(rank)
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    os.write(1, b"%f\\n" % (time.monotonic() - began))  # in one piece: both write to the same pipe
    dist.destroy_process_group()
    os._exit(0)
for pid in pids[1:]:
    os.waitpid(pid, 0)
os.kill(pids[0], signal.SIGKILL)
"""


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """One crash and the recovery from it."""

    first_s: float
    """From the launcher's start until every rank has finished its first all-reduce, or step."""
    crash_s: float
    """From the crash until every rank has finished the next one."""
    parts: Mapping[str, float]
    """Where the time went; empty for a launcher without event records."""


def imported_s(launcher: Command, folder: Path, nproc: int) -> float:
    """Measure the time from the start of the launcher's process until torch is imported in the last worker."""
    with launched(launcher, folder, IMPORT, build_standalone_flags(nproc)) as job:
        return job.wait_last_s(nproc)


def tree_pss_mb(launcher: Command, folder: Path) -> float:
    """Launcher, agent, template and four workers that have imported torch."""
    with launched(launcher, folder, IMPORT, build_standalone_flags(4), STAY="1") as job:
        job.wait_marks(4)
        return _launching.pss_mb([job.process.pid, *_launching.list_descendants(job.process.pid)])


def recover(launcher: Command, folder: Path, source: str) -> Recovery:
    """Measure one worker's `os._exit(1)` and the restart.

    Args:
        launcher: its command line.
        folder: for marks and logs.
        source: CRASH or TRAIN.
    """
    logs = folder / f"logs-{time.monotonic_ns()}"
    flags = ["--nproc-per-node", "2", "--max-restarts", "1", "--log-dir", str(logs)]
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--rdzv-id", "bench"]
    with launched(launcher, folder, source, [*rendezvous, *flags]) as job:
        _launching.wait_for(lambda: list_times(job, "crash", 0) or job.process.poll() is not None, _launching.LIMIT_S)
        _launching.wait_for(
            lambda: len(list_times(job, "reduced", 1)) >= 2 or job.process.poll() is not None, RECOVERY_LIMIT_S
        )
        try:
            if len(list_times(job, "reduced", 1)) < 2 or job.process.wait(60.0) != 0:
                raise SampleFailed
        except subprocess.TimeoutExpired:
            raise SampleFailed from None
    (crashed_s,) = list_times(job, "crash", 0)
    started_s, reduced_s = max(list_times(job, "started", 1)), max(list_times(job, "reduced", 1))
    return Recovery(
        first_s=max(list_times(job, "reduced", 0)) - job.began_s,
        crash_s=reduced_s - crashed_s,
        parts={} if launcher == TORCHRUN else break_down(logs, crashed_s, started_s, reduced_s),
    )


def recover_apart(folder: Path, nodes: int) -> float:
    """Measure a crash and the recovery if ranks reach the process group up to 2 s apart.

    Args:
        folder: for marks.
        nodes: 1 with two workers, or 2 with one each.

    Returns:
        Seconds from the last rank that reaches the process group of the next attempt to the end of its all-reduce.
    """
    endpoint = f"127.0.0.1:{_launching.find_port()}"
    flags = ["--nnodes", str(nodes), "--nproc-per-node", str(2 // nodes), "--max-restarts", "1"]
    flags += ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", "bench"]
    with ExitStack() as stack:
        job = stack.enter_context(launched(MUSTER, folder, CRASH, flags, APART_S="2"))
        if nodes > 1:
            other = _launching.start([*MUSTER, *flags, str(folder / "script.py")], MARKS=str(job.marks), APART_S="2")
            stack.callback(_launching.stop, other)
        _launching.wait_for(lambda: len(list_times(job, "reduced", 1)) >= 2 or job.process.poll() is not None, 60.0)
        if len(list_times(job, "reduced", 1)) < 2:
            raise SampleFailed
    return max(list_times(job, "reduced", 1)) - max(list_times(job, "reached", 1))


def bare_s() -> float:
    """Measure the fork, gloo and all-reduce of two ranks without a launcher."""
    run = subprocess.run([sys.executable, "-c", BARE], check=True, capture_output=True, text=True, timeout=60.0)
    return max(map(float, run.stdout.split()))


def tree_cpu_s(command: Command, folder: Path, **env: str) -> float:
    """CPU seconds of the whole tree: each process of it is waited for by its parent, the launcher by us."""
    marks, script = folder / "marks", folder / "script.py"
    marks.unlink(missing_ok=True)
    script.write_text(ALL_REDUCE)
    process = _launching.start([*command, *build_standalone_flags(8), str(script)], cwd=folder, MARKS=str(marks), **env)
    try:
        _launching.wait_for(
            lambda: os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None, 60.0
        )
        _pid, status, usage = os.wait4(process.pid, 0)
    except SampleFailed:
        _launching.stop(process)
        raise
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0 or len(_launching.read_marks(marks)) != 8:
        raise SampleFailed
    return usage.ru_utime + usage.ru_stime


def list_times(job: Job, what: str, attempt: int) -> list[float]:
    """Times of this mark by the ranks of an attempt."""
    return [m["t"] for m in _launching.read_marks(job.marks) if (m["what"], m["attempt"]) == (what, attempt)]


def break_down(logs: Path, crashed_s: float, started_s: float, reduced_s: float) -> Mapping[str, float]:
    """Return where the time went, from the agent's records, all on one machine's monotonic clock."""
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


def show_imports(count: int, folder: Path) -> None:
    """Launch: one import per node instead of one per worker."""
    for nproc, limit in ((2, 0.60), (4, 0.40)):
        series = sample_in_turn(count, {n: lambda c=c, k=nproc: imported_s(c, folder, k) for n, c in LAUNCHERS.items()})
        show(f"start until torch is imported in {nproc} workers", series, limit=limit)


def sample_recoveries(
    count: int, folder: Path, source: str, commands: Mapping[str, Command]
) -> dict[str, Samples[Recovery]]:
    return sample_in_turn(
        count, {name: lambda c=command: recover(c, folder, source) for name, command in commands.items()}
    )


def show_crash(count: int, folder: Path) -> None:
    """Restart: no import at all."""
    commands = {**LAUNCHERS, "muster cold": MUSTER_COLD}
    samplers = {name: lambda c=command: recover(c, folder, CRASH) for name, command in commands.items()}
    samplers["bare"] = lambda: Recovery(first_s=0.0, crash_s=bare_s(), parts={})
    sampled = sample_in_turn(count, samplers, at_least=GOOD)
    series = {name: samples.of(lambda sample: sample.crash_s) for name, samples in sampled.items()}
    bare = series.pop("bare")
    show("crash of one of 2 workers until the next all-reduce", series, limit=0.02)
    parts: dict[str, list[float]] = {}
    for sample in sampled["muster"].values:
        for name, value in sample.parts.items():
            parts.setdefault(name, []).append(value)
    stops = Samples(values=[sum(sample.parts[name] for name in STOP) for sample in sampled["muster"].values])
    limit_s = statistics.median(stops.values) + statistics.median(bare.values)
    show("    bare fork, process group and all-reduce", {"bare": bare})
    print(f"    muster / (stop + bare): {statistics.median(series['muster'].values) / limit_s:.3f} (goal 1.15)")
    for name, values in parts.items():
        print(f"    {name}: {statistics.median(values) * 1000:.1f} ms (at most {max(values) * 1000:.1f})")


def show_apart(count: int, folder: Path) -> None:
    """Show that no rank waits for a store: none comes before it listens."""
    for nodes in (1, 2):
        samples = sample_in_turn(count, {"muster": lambda n=nodes: recover_apart(folder, n)})["muster"]
        late = sum(value > LATE_S for value in samples.values)
        show(f"ranks up to 2 s apart, {nodes} node(s): last rank there until the all-reduce", {"muster": samples})
        print(f"    over {LATE_S} s: {late} of {len(samples.values)} (goal 0)")


def show_train(count: int, folder: Path) -> None:
    """Gain at restart, and cost at launch, of importing torch's compiler in the template."""
    commands = {**LAUNCHERS, "muster without the compiler": (*MUSTER, "--preload", "torch")}
    sampled = sample_recoveries(count, folder, TRAIN, commands)
    for figure, read in (
        ("crash of one of 2 workers until the next step is done", lambda sample: sample.crash_s),
        ("start until the first step is done", lambda sample: sample.first_s),
    ):
        show(figure, {name: samples.of(read) for name, samples in sampled.items()})


def show_memory(count: int, folder: Path) -> None:
    """Pages that workers share with the template."""
    series = sample_in_turn(count, {n: lambda c=c: tree_pss_mb(c, folder) for n, c in LAUNCHERS.items()}, warmups=0)
    show("memory of the whole tree, 4 workers (PSS)", series, unit="MB", limit=0.7)


def show_cpu(count: int, folder: Path, against: Path | None) -> None:
    """Gain of one import, and of an end that does not tear down what the template had imported."""
    samplers = {"muster": lambda: tree_cpu_s(MUSTER, folder)}
    if against is None:
        samplers["torchrun"] = lambda: tree_cpu_s(TORCHRUN, folder)
    else:
        samplers["muster there"] = lambda: tree_cpu_s(MUSTER, folder, PYTHONPATH=str(against))
    show("CPU of the whole tree, 8 workers, one all-reduce", sample_in_turn(count, samplers), limit=0.6)


def main() -> None:
    parser = build_parser(__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help="see above; all when none is named")
    parser.add_argument("--against", type=Path, metavar="FOLDER", help="a folder with another version's package muster")
    options = parser.parse_args()
    parts: Mapping[str, Callable[[int, Path], None]] = {
        "import": show_imports,
        "crash": show_crash,
        "apart": show_apart,
        "train": show_train,
        "memory": show_memory,
        "cpu": functools.partial(show_cpu, against=options.against),
    }
    if not parts.keys() >= set(options.parts):
        parser.error(f"the parts are {', '.join(parts)}")
    with _launching.scratch() as folder:
        for name, part in parts.items():
            if name in options.parts or not options.parts:
                part(options.count, folder)


if __name__ == "__main__":
    main()
