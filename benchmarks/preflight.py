"""What `--preflight quick` costs a start, in pairs with off: warm and cold, 1x2, until the last rank's first line.

    python benchmarks/preflight.py [--count N]

"warm" waits until the template's imports are done and both workers' first lines have run; "cold" is a script without
torch, so that nothing hides the checks. A pair is two starts one after the other, in an order that alternates: the
machine's noise, and what the first leaves in its caches, is in both. The median of the differences is what counts; the
interval is where the median of all pairs there could be lies with 95 %, by their order alone. "CPU" is the time that
guard and agent, with all threads, have run on a core until then: a busy machine changes it little, and on an idle one a
start cannot be later by more. A busy machine needs `chrt --fifo 50` before the command. "parts" is the look itself in
a fresh process, by the clock: the import of its module, and the reading of the machine.
"""

import math
import statistics
import subprocess
import sys
import time
from pathlib import Path

from _launching import MUSTER, build_standalone_flags, launched, scratch
from _sampling import Samples, build_parser, sample_in_turn, show

FIRST_LINE = """
import json, os, time
now_s = time.monotonic()
fd = os.open(os.environ["MARKS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
os.write(fd, (json.dumps({"t": now_s, "what": "first"}) + "\\n").encode())
time.sleep(0.3)
"""
WARM = "import torch" + FIRST_LINE
PARTS = """
import time
from muster._shared.contract import Env
import muster._shared.fields
from muster._shared.processes import find_nvml
began_s = time.perf_counter()
from muster._shared import preflight
loaded_s = time.perf_counter()
machine = preflight.read_machine({"the log folder": "/tmp/none"}, nvml=find_nvml({}))
preflight.find_problems(machine, preflight.Need(nproc=2))
preflight.find_site_checks()
print(1e3 * (loaded_s - began_s), 1e3 * (time.perf_counter() - loaded_s))
"""
GOALS = {"warm": 10.0, "cold": 5.0}
"""Milliseconds that the median of the differences may be."""


def time_start(folder, start, mode):
    """Return the seconds until the last first line, and seconds of CPU of guard and agent until then."""
    flags = [*build_standalone_flags(2), "--start", start, "--preflight", mode]
    with launched(MUSTER, folder, WARM if start == "warm" else FIRST_LINE, flags) as job:
        taken_s = job.wait_last_s(2)
        agents = [job.process.pid, *list_children(job.process.pid)]
        cpu_s = sum(read_cpu_s(pid) for pid in agents)
        job.process.wait()
    return taken_s, cpu_s


def list_children(pid):
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def read_cpu_s(pid):
    """Read the CPU time of all threads of a process, including ended ones. Source: clock_getcpuclockid(3) of glibc."""
    return time.clock_gettime((~pid << 3) | 2)


class Pairs:
    """Starts with quick and off, one after the other, in an order that alternates."""

    def __init__(self, folder, start):
        self.folder, self.start, self.count = folder, start, 0

    def time(self):
        """Return the seconds, and seconds of CPU, of quick and of off: ((s, s), (s, s))."""
        self.count += 1
        modes = ["quick", "off"] if self.count % 2 else ["off", "quick"]
        timed = {mode: time_start(self.folder, self.start, mode) for mode in modes}
        return timed["quick"], timed["off"]


def take(pairs, which, place):
    """Return one figure of one of the two starts of each pair."""
    return pairs.of(lambda pair: pair[which][place])


def find_interval(values):
    """Find where the median lies with 95 %: between these order statistics, whatever the distribution (sign test)."""
    ordered, count = sorted(values), len(values)
    outside, below = 0, 0.0
    while (below := below + math.comb(count, outside) / 2**count) <= 0.025:
        outside += 1
    return ordered[max(0, outside - 1)], ordered[min(count - 1, count - outside)]


def show_differences(figure, pairs, place, goal_ms):
    differences_ms = [1e3 * (quick[place] - off[place]) for quick, off in pairs]
    show(f"  quick - off, {figure}", {"quick": Samples(values=differences_ms)}, unit="ms", limit=goal_ms)
    least, most = find_interval(differences_ms)
    found_ms = statistics.median(differences_ms)
    verdict = "met" if found_ms <= goal_ms else "NOT met" if least > goal_ms else "too noisy to say"
    print(f"  95 % {least:.1f}..{most:.1f} ms: {verdict}")


def measure_parts():
    done = subprocess.run([sys.executable, "-c", PARTS], capture_output=True, text=True, check=True)
    return [float(word) for word in done.stdout.split()]


def main():
    arguments = build_parser(__doc__).parse_args()
    with scratch() as folder:
        for start, goal_ms in GOALS.items():
            [pairs] = sample_in_turn(arguments.count, {"pair": Pairs(folder, start).time}).values()
            for figure, place in (("first line of both workers", 0), ("CPU until then", 1)):
                series = {"quick": take(pairs, 0, place), "off": take(pairs, 1, place)}
                show(f"{figure}, {start}", series)
                show_differences(f"{figure}, {start}", pairs.values, place, goal_ms)
    parts = [measure_parts() for _ in range(arguments.count)]
    for name, place in (("import", 0), ("look", 1)):
        values = sorted(part[place] for part in parts)
        print(f"parts, {name}: median {statistics.median(values):.2f} ms ({values[0]:.2f}..{values[-1]:.2f})")


if __name__ == "__main__":
    main()
