"""`elastic_launch` of functions from Python, spawn, two workers, a `__main__` that imports torch: muster and torch.

python benchmarks/elastic_launch.py [--count N]
"""

import json
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from _launching import scratch
from _sampling import SampleFailed, parse_count, sample_in_turn, show

CALLER = """
import json, os, sys, time
import torch
given = {"held": True} if sys.argv[1] == "held" else {}
if sys.argv[1] != "torch":
    from muster.elastic import LaunchConfig, elastic_launch
    more = {}
else:
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch
    more = {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0"}

def read_pss(pid):
    with open(f"/proc/{pid}/smaps_rollup") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("Pss:"))

def read_parents():
    agent = os.getppid()
    with open(f"/proc/{agent}/stat") as file:
        guard = int(file.read().rpartition(")")[2].split()[1])
    return read_pss(agent), read_pss(guard)

if __name__ == "__main__":
    config = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=2, start_method="spawn", **more)
    began_s = time.monotonic()
    results = elastic_launch(config, read_parents, **given)()
    print(json.dumps({"wall_s": time.monotonic() - began_s, "agent": results[0][0], "guard": results[0][1]}))
"""


def launch(api: str, program: Path, env: Mapping[str, str] | None = None) -> dict[str, float]:
    """Run the caller once; what it printed.

    Args:
        api: `muster`, `torch`, or `held`: muster's on the only hold.
        program: with the caller's text.
        env: None: this process's.
    """
    command = [sys.executable, str(program), api]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SampleFailed(done.stderr)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    count = parse_count(__doc__)
    with scratch() as folder:
        program = folder / "caller.py"
        program.write_text(CALLER)
        sampled = sample_in_turn(count, {api: partial(launch, api, program) for api in ("muster", "torch")})
    walls = {api: samples.of(lambda found: found["wall_s"]) for api, samples in sampled.items()}
    show("elastic_launch until the results are back, spawn, 2 workers", walls, limit=0.5)
    megabytes = sampled["muster"].of(lambda found: (found["agent"] + found["guard"]) / 1e6)
    show("agent and guard of a function job, PSS", {"muster": megabytes}, unit="MB", limit=35)


if __name__ == "__main__":
    main()
