"""Logs, side by side with torchrun in one run: throughput of `--tee 3`, and a line's latency from worker to console.

    python benchmarks/logs.py [--count N] [--check]

Two workers write 200,000 lines of 88 bytes each; every line must arrive on the console and in the files. Wall and CPU
seconds are those of the whole job: launcher, workers, and what the launcher does to start them. Latency is measured
with one line every 20 ms from each worker. What collapsing costs is the CPU time of a console that gets the lines of
eight ranks, as they are and collapsed, in one process: alike ones, and such that no rank shares with another.
"""

import os
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from _launching import LAUNCHERS, build_standalone_flags, scratch
from _sampling import SampleFailed, Samples, Series, build_parser, median, sample_in_turn, show

from muster.agent.config import Std
from muster.agent.logs.console import Console

LINES = 200_000
LINE_BYTES = 88
STAMPS = 100
MOST_SHARE = 0.6
MOST_LATENCY_MS = 10.0

FLOOD = f"""
import os
rank = os.environ["RANK"]
for number in range({LINES}):
    print(f"rank {{rank}} line {{number:07d}} ".ljust({LINE_BYTES - 1}, "."))
"""
STAMP = f"""
import time
time.sleep(0.5)
for _ in range({STAMPS}):
    print("stamp", time.monotonic_ns())
    time.sleep(0.02)
"""


RANKS = 8
RANK_LINES = 25_000
CHUNK_LINES = 100


@dataclass(frozen=True, kw_only=True)
class Job:
    """One finished launch."""

    wall_s: float
    cpu_s: float
    latencies_ms: list[float]
    """Of the lines that carry a stamp."""


def launch(command: Sequence[str], lines: int) -> Job:
    """Run one job with its console on a pipe; every line must arrive."""
    began_s = time.monotonic()
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert child.stdout is not None
    latencies_ms, seen = [], 0
    while chunk := os.read(child.stdout.fileno(), 1 << 20):
        now_ns = time.monotonic_ns()
        seen += chunk.count(b"\n")
        if b"stamp" in chunk:
            latencies_ms += [(now_ns - int(line.split()[-1])) / 1e6 for line in chunk.splitlines() if b"stamp" in line]
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    child.stdout.close()
    if child.returncode != 0 or seen != lines:
        raise SampleFailed
    wall_s = time.monotonic() - began_s
    return Job(wall_s=wall_s, cpu_s=usage.ru_utime + usage.ru_stime, latencies_ms=latencies_ms)


def check_files(log_dir: Path) -> None:
    """Check that every line is in the files too.

    Raises:
        SampleFailed: lines are missing.
    """
    if any(path.stat().st_size != LINES * LINE_BYTES for path in log_dir.rglob("stdout.log")):
        raise SampleFailed


def measure(name: str, source: str, lines: int) -> Job:
    """Run one job of a launcher, in folders of its own."""
    with scratch() as folder:
        script, log_dir = folder / "worker.py", folder / "logs"
        script.write_text(source)
        flags = [*build_standalone_flags(2), "--tee", "3", "--log-dir", str(log_dir)]
        job = launch([*LAUNCHERS[name], *flags, str(script)], lines)
        if source is FLOOD:
            check_files(log_dir)
        return job


def sample_launchers(count: int, source: str, lines: int) -> dict[str, Samples[Job]]:
    return sample_in_turn(count, {name: lambda n=name: measure(n, source, lines) for name in LAUNCHERS})


def flatten(drops: Samples[Job]) -> Series:
    """Return the latencies of all samples together."""
    latencies_ms = [latency for job in drops.values for latency in job.latencies_ms]
    return Samples(values=latencies_ms, failures=drops.failures, loads=drops.loads)


def collapse(*, merges_lines: bool, is_alike: bool) -> float:
    """CPU seconds in which a console prints the lines of eight ranks, which write in turn."""
    names = [b"%d" % rank if is_alike else bytes([97 + rank]) for rank in range(RANKS)]
    rows = [
        [(b"rank %s line %07d " % (name, number)).ljust(LINE_BYTES - 1, b".") for number in range(RANK_LINES)]
        for name in names
    ]
    chunks = [
        (rank, b"\n".join(rows[rank][at : at + CHUNK_LINES]) + b"\n")
        for at in range(0, RANK_LINES, CHUNK_LINES)
        for rank in range(RANKS)
    ]
    null_fd = os.open(os.devnull, os.O_WRONLY)
    console = Console(stdout_fd=null_fd, stderr_fd=null_fd, backlog_bytes=1 << 30, merges_lines=merges_lines)
    feeds = [console.open_feed(Std.OUT, b"[main%d]:" % rank, rank, lambda _: b"[main0-7]:") for rank in range(RANKS)]
    began_s = time.process_time()
    for rank, chunk in chunks:
        feeds[rank].offer(chunk)
    for feed in feeds:
        feed.end()
    if not console.close(limit_s=60.0, cap_s=600.0):
        raise SampleFailed
    os.close(null_fd)
    return time.process_time() - began_s


def compare_consoles(count: int) -> None:
    """Show the cost of collapsing, as a ratio to lines as they are."""
    for is_alike, kind in ((True, "alike"), (False, "of which no two are alike")):
        samplers = {
            name: lambda merges=merges, alike=is_alike: collapse(merges_lines=merges, is_alike=alike)
            for name, merges in (("collapsed", True), ("as they are", False))
        }
        show(f"{RANKS} x {RANK_LINES} lines {kind}, CPU of the console", sample_in_turn(count, samplers))


def main() -> int:
    parser = build_parser(__doc__)
    parser.add_argument("--check", action="store_true", help="exit 1 when a figure of the design is not met")
    options = parser.parse_args()
    flood = sample_launchers(options.count, FLOOD, 2 * LINES)
    shares = []
    for figure, read in (("wall", lambda job: job.wall_s), ("CPU", lambda job: job.cpu_s)):
        series = {name: samples.of(read) for name, samples in flood.items()}
        show(f"2 x {LINES} lines, {figure}", series, limit=MOST_SHARE)
        shares.append(median(series["muster"]) / median(series["torchrun"]))
    drops = {name: flatten(samples) for name, samples in sample_launchers(options.count, STAMP, 2 * STAMPS).items()}
    show("a line until it is on the console", drops, unit="ms")
    compare_consoles(options.count)
    met = max(shares) <= MOST_SHARE and median(drops["muster"]) <= MOST_LATENCY_MS
    failed = sum(samples.failures for samples in flood.values())
    print(f"every line arrived in all but {failed} samples; figures {'met' if met else 'NOT MET'}")
    return 1 if options.check and not met else 0


if __name__ == "__main__":
    raise SystemExit(main())
