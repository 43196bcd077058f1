"""What --hang-timeout auto costs a job: 10,000 small all-reduces of two ranks, with auto and with 0, in pairs.

    python benchmarks/hang_overhead.py [--count PAIRS]

The two of a pair run one after the other, in turns first and second, with two OpenMP threads a rank. A look reads the
whole recorder, 2000 entries: auto looks every five seconds, so that each job is long enough for several.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from _sampling import Samples, parse_count, show

PROGRAM = """
import time, torch, torch.distributed as dist
dist.init_process_group("gloo")
values = torch.ones(4)
for _ in range(500):
    dist.all_reduce(values)
began_s = time.monotonic()
for _ in range(10_000):
    dist.all_reduce(values)
dist.barrier()
if dist.get_rank() == 0:
    print("took", time.monotonic() - began_s, flush=True)
dist.destroy_process_group()
"""


def measure(script: Path, timeout: str) -> float:
    """Return the seconds of the all-reduces."""
    agent = [sys.executable, "-m", "muster.agent", "--standalone", "--nproc-per-node", "2", "--hang-timeout", timeout]
    command = ["env", "OMP_NUM_THREADS=2", *agent, str(script)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    return float(next(line.split("took ")[1] for line in done.stdout.splitlines() if "took " in line))


def main(pairs: int) -> None:
    """Print the times of each pair, and the median of their ratios."""
    ratios = []
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "reduce.py"
        script.write_text(PROGRAM)
        for pair in range(pairs):
            order = ("auto", "0") if pair % 2 else ("0", "auto")
            took_s = {timeout: measure(script, timeout) for timeout in order}
            ratios.append(took_s["auto"] / took_s["0"])
            print(
                f"pair {pair}: auto {took_s['auto']:.2f} s, 0 {took_s['0']:.2f} s, ratio {ratios[-1]:.3f}", flush=True
            )
    show("10,000 all-reduces with --hang-timeout auto, beside 0", {"auto": Samples(values=ratios)}, unit="", limit=1.01)


if __name__ == "__main__":
    main(parse_count(__doc__))
