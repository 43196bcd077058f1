"""What a Kubernetes dry run costs beyond TorchX's own start. Target: under 0.5 s for the whole process.

Alternates `torchx run --dryrun` of a job on `kubernetes` (offline, with a workspace) with TorchX's own start, the dry
run of its `utils.echo` on its `slurm`, so that a busy machine slows both alike.

    python benchmarks/kubernetes_dryrun.py [ROUNDS]
"""

import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TORCHX = [sys.executable, "-m", "torchx.cli.main"]
OURS = ["run", "-s", "kubernetes", "--dryrun", "dist.ddp", "-j", "2:4x8", "--script", "main.py"]
THEIRS = ["run", "-s", "slurm", "--dryrun", "--workspace", "", "utils.echo", "--msg", "x"]


def time_command(args: list[str], folder: str) -> tuple[float, float]:
    """Seconds of one whole process: by the wall, and of CPU (which others on a busy machine do not lengthen)."""
    environ = {**os.environ, "KUBECONFIG": "/nonexistent"}
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([*TORCHX, *args], cwd=folder, env=environ, check=True, capture_output=True)
    elapsed, after = time.perf_counter() - begun, resource.getrusage(resource.RUSAGE_CHILDREN)
    return elapsed, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Prints medians and spreads, and their difference."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "main.py").write_text("print('hello')\n")
        pairs = [(time_command(OURS, folder), time_command(THEIRS, folder)) for _ in range(rounds)]
    for index, kind in enumerate(("wall", "cpu")):
        ours, theirs = [mine[index] for mine, _ in pairs], [base[index] for _, base in pairs]
        differences = [mine - base for mine, base in zip(ours, theirs, strict=True)]
        for name, times in (("kubernetes dry run", ours), ("torchx's own start", theirs), ("difference", differences)):
            median = statistics.median(times)
            print(f"{kind} {name}: n={rounds} median {median:.3f} s, {min(times):.3f} to {max(times):.3f}")


if __name__ == "__main__":
    main()
