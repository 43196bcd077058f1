"""Logs, side by side with torchrun in one run: throughput of `--tee 3`, and a line's way from worker to console.

    python benchmarks/logs.py [--runs 5] [--check]

Two workers write 200,000 lines of 88 bytes each; every line must arrive on the console and in the files. Wall and CPU
seconds are those of the whole job: launcher, workers, and what the launcher does to start them. Latency is measured
with one line every 20 ms from each worker.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

LINES = 200_000
LINE_BYTES = 88
STAMPS = 100
MOST_SHARE = 0.6
MOST_LATENCY_MS = 10.0

SPEW = f"""
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


@dataclass(frozen=True, kw_only=True)
class Job:
    """One finished launch."""

    wall_s: float
    cpu_s: float
    latencies_ms: list[float]
    """Of the lines that carry a stamp."""


def build_commands(log_dir: str, script: Path) -> dict[str, list[str]]:
    flags = ["--nproc-per-node", "2", "--tee", "3", "--log-dir", log_dir, str(script)]
    torchrun = Path(sys.executable).with_name("torchrun")
    return {
        "torchrun": [str(torchrun), "--standalone", *flags],
        "muster": [sys.executable, "-m", "muster.agent", "--standalone", *flags],
    }


def launch(command: Sequence[str], lines: int) -> Job:
    """Run one job with its console on a pipe; every line must come."""
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
        raise SystemExit(f"{command[0]}: exit code {child.returncode}, {seen} of {lines} lines")
    wall_s = time.monotonic() - began_s
    return Job(wall_s=wall_s, cpu_s=usage.ru_utime + usage.ru_stime, latencies_ms=latencies_ms)


@contextmanager
def script_of(source: str) -> Iterator[tuple[str, Path]]:
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "worker.py")
        script.write_text(source)
        yield str(Path(folder, "logs")), script


def check_files(log_dir: str) -> None:
    """Every line is in the files too."""
    for path in Path(log_dir).rglob("stdout.log"):
        if path.stat().st_size != LINES * LINE_BYTES:
            raise SystemExit(f"{path} has {path.stat().st_size} bytes, not {LINES * LINE_BYTES}")


def measure(source: str, lines: int, runs: int) -> dict[str, list[Job]]:
    """The launchers in turn, so that a busy machine is unkind to both."""
    jobs: dict[str, list[Job]] = {"torchrun": [], "muster": []}
    for _ in range(runs):
        for name, done in jobs.items():
            with script_of(source) as (log_dir, script):
                done.append(launch(build_commands(log_dir, script)[name], lines))
                if source is SPEW:
                    check_files(log_dir)
    return jobs


def describe(values: list[float], unit: str) -> str:
    return f"median {statistics.median(values):8.2f} {unit}   ({min(values):.2f} to {max(values):.2f}, n={len(values)})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--check", action="store_true", help="exit 1 when a figure of the design is not held")
    options = parser.parse_args()
    flood = measure(SPEW, 2 * LINES, options.runs)
    drops = measure(STAMP, 2 * STAMPS, max(1, options.runs // 2))
    medians: dict[str, dict[str, float]] = {}
    for name in flood:
        latencies_ms = [latency for job in drops[name] for latency in job.latencies_ms]
        figures = {
            "wall s": [job.wall_s for job in flood[name]],
            "cpu s": [job.cpu_s for job in flood[name]],
            "line ms": latencies_ms,
        }
        medians[name] = {what: statistics.median(values) for what, values in figures.items()}
        for what, values in figures.items():
            print(f"{name:9} {what:8} {describe(values, what.split()[1])}")
    shares = {what: medians["muster"][what] / medians["torchrun"][what] for what in ("wall s", "cpu s")}
    held = max(shares.values()) <= MOST_SHARE and medians["muster"]["line ms"] <= MOST_LATENCY_MS
    print(f"muster / torchrun: wall {shares['wall s']:.2f}, cpu {shares['cpu s']:.2f} (at most {MOST_SHARE})")
    print(f"every line kept; figures {'held' if held else 'NOT HELD'}")
    return 1 if options.check and not held else 0


if __name__ == "__main__":
    raise SystemExit(main())
