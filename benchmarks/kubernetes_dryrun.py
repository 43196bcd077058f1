"""What a Kubernetes dry run costs beyond TorchX's own start. Target: under 0.5 s for the whole process.

Alternates `torchx run --dryrun` of a job on `kubernetes` (offline, with a workspace) with TorchX's own start, the dry
run of its `utils.echo` on its `slurm`, so that a busy machine slows both alike.

    python benchmarks/kubernetes_dryrun.py [--count N]
"""

import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from _sampling import median, parse_count, sample_in_turn, show

TORCHX = [sys.executable, "-m", "torchx.cli.main"]
OURS = ["run", "-s", "kubernetes", "--dryrun", "dist.ddp", "-j", "2:4x8", "--script", "main.py"]
THEIRS = ["run", "-s", "slurm", "--dryrun", "--workspace", "", "utils.echo", "--msg", "x"]


def time_command(args: list[str], folder: str) -> tuple[float, float]:
    """Return the seconds of one process: wall, and CPU (which others on a busy machine do not lengthen)."""
    environ = {**os.environ, "KUBECONFIG": "/nonexistent"}
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([*TORCHX, *args], cwd=folder, env=environ, check=True, capture_output=True)
    elapsed, after = time.perf_counter() - begun, resource.getrusage(resource.RUSAGE_CHILDREN)
    return elapsed, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main(count: int) -> None:
    """Print medians and spreads, and their difference."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "main.py").write_text("print('hello')\n")
        samplers = {
            "kubernetes dry run": lambda: time_command(OURS, folder),
            "torchx's own start": lambda: time_command(THEIRS, folder),
        }
        sampled = sample_in_turn(count, samplers)
    for index, kind in enumerate(("wall", "cpu")):
        series = {name: samples.of(lambda times, i=index: times[i]) for name, samples in sampled.items()}
        show(kind, series)
        ours, theirs = map(median, series.values())
        print(f"    difference of the medians: {ours - theirs:.3f} s", flush=True)


if __name__ == "__main__":
    main(parse_count(__doc__))
