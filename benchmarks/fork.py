"""`elastic_launch` with fork, two workers: muster and torch's own, in turn.

From a caller that has imported torch, from one with 4 GiB of arrays, and the restart of a worker that crashes. A fork
copies the page tables of the caller, so each kind of caller pays for the copies that a launcher makes.

python benchmarks/fork.py [--count N]
"""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

from _launching import clean_env, scratch
from _sampling import SampleFailed, parse_count, sample_in_turn, show

CALLER = """
import json, os, signal, sys, time
import torch
api, what = sys.argv[1:]
if api == "muster":
    from muster.elastic import LaunchConfig, elastic_launch
    more = {}
else:
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch
    more = {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0"}
if what == "arrays":
    import numpy
    arrays = [numpy.zeros(1 << 29, dtype=numpy.uint8) for _ in range(8)]
    for array in arrays:
        array[::4096] = 1

def work():
    now_s = time.monotonic()
    if what == "crash" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        if os.environ["RANK"] == "1":
            with open(sys.argv[0] + ".crashed", "w") as file:
                file.write(str(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
    return now_s

config = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=2, start_method="fork", max_restarts=1, **more)
began_s = time.monotonic()
started = elastic_launch(config, work)()
wall_s = time.monotonic() - began_s
crashed_s = float(open(sys.argv[0] + ".crashed").read()) if what == "crash" else 0.0
print(json.dumps({"wall_s": wall_s, "restart_s": max(started.values()) - crashed_s}))
"""


def launch(api: str, what: str, program: Path) -> dict[str, float]:
    """Run the caller once; what it printed."""
    done = subprocess.run(
        [sys.executable, str(program), api, what], env=clean_env(), capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise SampleFailed(done.stderr)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    count = parse_count(__doc__)
    with scratch() as folder:
        program = folder / "caller.py"
        program.write_text(CALLER)
        found = {
            what: sample_in_turn(count, {api: partial(launch, api, what, program) for api in ("muster", "torch")})
            for what in ("torch", "arrays", "crash")
        }
    for what, title in {"torch": "torch imported", "arrays": "4 GiB of arrays"}.items():
        walls = {api: samples.of(lambda one: one["wall_s"]) for api, samples in found[what].items()}
        show(f"elastic_launch until the results are back, fork, 2 workers, {title}", walls, limit=0.8)
    restarts = {api: samples.of(lambda one: one["restart_s"]) for api, samples in found["crash"].items()}
    show("from a worker's crash until all workers run again, fork", restarts, limit=0.05)


if __name__ == "__main__":
    main()
