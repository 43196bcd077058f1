"""Whole runs on a hold beside the same on local_cwd: `dist.ddp -j 2x4`, one gloo all-reduce over eight workers.

    python benchmarks/hold.py [--count N]

From the start of the command line's process to its end, `torchx run` and `muster run` each. A run begins when an agent
waits again on both nodes, as it does for whoever edits between runs.
"""

import json
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import _launching
from _sampling import SampleFailed, build_parser, sample_in_turn, show
from start import ALL_REDUCE
from torchx_run import LIMIT_S, WORKERS, clean_env

BIN = Path(sys.executable).parent


def measure(folder: Path, command: str, scheduler: str) -> float:
    """Run one whole process; every worker must have finished the all-reduce."""
    if scheduler != "local_cwd":
        _launching.wait_for(lambda: all(state == "ready" for state in read_states(folder)), LIMIT_S)
    marks = folder / "marks"
    marks.unlink(missing_ok=True)
    argv = [str(BIN / command), "run", "-s", scheduler, "dist.ddp", "-j", "2x4", "--script", "main.py"]
    began_s = time.monotonic()
    process = subprocess.Popen(
        argv, cwd=folder, env=make_env(folder), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        code = process.wait(LIMIT_S)
        took_s = time.monotonic() - began_s
    except subprocess.TimeoutExpired:
        raise SampleFailed from None
    finally:
        _launching.stop(process)
    if code != 0 or len({mark["rank"] for mark in _launching.read_marks(marks)}) != WORKERS:
        raise SampleFailed
    return took_s


def read_states(folder: Path) -> list[str]:
    """What the holders of both nodes tell."""
    return [
        str(json.loads(path.read_text())["state"]) for path in folder.glob("state/muster/logs/*/*/*/hold-*/hold.json")
    ]


def make_env(folder: Path) -> dict[str, str]:
    """The environment of all commands."""
    return {**clean_env(BIN), "MARKS": str(folder / "marks"), "XDG_STATE_HOME": str(folder / "state")}


def main() -> None:
    options = build_parser(__doc__).parse_args()
    with _launching.scratch() as folder:
        (folder / "main.py").write_text(ALL_REDUCE)
        (folder / "state").mkdir()
        subprocess.run([BIN / "muster", "hold", "dist.ddp", "-j", "2x4"], cwd=folder, env=make_env(folder), check=True)
        try:
            for command, scheduler, limit in (("torchx", "local_held", 0.45), ("muster", "held", 0.2)):
                samplers = {
                    "held": partial(measure, folder, command, scheduler),
                    "local_cwd": partial(measure, folder, command, "local_cwd"),
                }
                show(f"{command} run dist.ddp -j 2x4, whole", sample_in_turn(options.count, samplers), limit=limit)
        finally:
            subprocess.run([BIN / "muster", "release", "--now"], cwd=folder, env=make_env(folder), check=False)


if __name__ == "__main__":
    main()
