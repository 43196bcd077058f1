"""Further runs on kept nodes: `muster run` on a hold beside Monarch's actors; eight workers, one gloo all-reduce.

    python benchmarks/kept_processes.py [--count N] [--peer REQUIREMENT]

Monarch keeps the workers themselves: a further run is a call of an endpoint that makes a process group, all-reduces and
destroys the group, from the call to the results. A run of muster's is the whole process `muster run -s held dist.ddp
-j 2x4`, whose workers are new. Monarch also says how long its first run took, from the start of its program, and its
stop. It gets an environment of its own in a temporary folder, from the package index, with this environment's torch.
"""

import json
import os
import select
import subprocess
import sysconfig
import time
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import _launching
from _sampling import SampleFailed, Samples, build_parser, sample_in_turn, show
from hold import hold, measure, prepare
from torchx_run import LIMIT_S, WORKERS, clean_env

PROGRAM = """
import json, os, sys, time
import torch, torch.distributed as dist
from monarch.actor import Actor, current_rank, endpoint, this_host

WORKERS = 8

class Trainer(Actor):
    @endpoint
    def reduce(self, port):
        method = f"tcp://127.0.0.1:{port}"
        dist.init_process_group("gloo", init_method=method, rank=current_rank().rank, world_size=WORKERS)
        value = torch.ones(1)
        dist.all_reduce(value)
        dist.destroy_process_group()
        return value.item()

def say(**facts):
    os.write(int(sys.argv[1]), (json.dumps(facts) + "\\n").encode())

def main():
    procs = this_host().spawn_procs(per_host={"gpus": WORKERS})
    trainers = procs.spawn("trainers", Trainer)
    for line in sys.stdin:
        began_s = time.monotonic()
        found = [value for _, value in trainers.reduce.call(int(line)).get().items()]
        assert found == [WORKERS] * WORKERS, found
        say(took_s=time.monotonic() - began_s)
    procs.stop().get()
    say(stopped=True)

if __name__ == "__main__":
    main()
"""
CHECK = """
import importlib.metadata as metadata, torch
import monarch.actor
print("torchmonarch", metadata.version("torchmonarch"), "with torch", torch.__version__)
"""


def make_peer(folder: Path, requirement: str) -> Path:
    """Build an environment with Monarch and this environment's packages; its interpreter.

    Raises:
        CalledProcessError: Monarch cannot be installed.
    """
    venv.create(folder, with_pip=True)
    python = folder / "bin/python"
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "torch.pth").write_text(sysconfig.get_path("purelib"))  # pip takes what is there, and leaves it alone
    subprocess.run([python, "-m", "pip", "install", "--quiet", requirement], check=True)
    found = subprocess.check_output([python, "-c", CHECK], cwd=folder, env=clean_env(python.parent), text=True)
    print(f"the peer: {found.strip()}", flush=True)
    return python


class Monarch:
    """A program of Monarch's that keeps its processes."""

    def __init__(self, python: Path, folder: Path) -> None:
        """Start it."""
        (folder / "monarch.run.py").write_text(PROGRAM)
        self._results, theirs = os.pipe()
        self._began_s = time.monotonic()
        self._process = subprocess.Popen(
            [python, "monarch.run.py", str(theirs)],
            cwd=folder,
            env=clean_env(python.parent),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[theirs],
            start_new_session=True,
            text=True,
        )
        os.close(theirs)

    def run(self) -> float:
        """Call the endpoint; the seconds until the results are back."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{_launching.find_port()}\n")
        self._process.stdin.flush()
        return float(self._read()["took_s"])

    def run_first(self) -> float:
        """Do so for the first time; the seconds since the program's start."""
        self.run()
        return time.monotonic() - self._began_s

    def stop(self) -> float:
        """End the processes; the seconds it takes."""
        began_s = time.monotonic()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._read()
        return time.monotonic() - began_s

    def kill(self) -> None:
        """End what is left."""
        _launching.stop(self._process)
        os.close(self._results)

    def _read(self) -> dict[str, float]:
        if not select.select([self._results], [], [], LIMIT_S)[0]:
            raise SampleFailed
        line = os.read(self._results, 4096)
        if not line:
            raise SampleFailed
        found: dict[str, float] = json.loads(line)
        return found


@contextmanager
def started(python: Path, folder: Path) -> Iterator[Monarch]:
    """Keep Monarch's processes for a block."""
    made = Monarch(python, folder)
    try:
        yield made
    finally:
        made.kill()


def main() -> None:
    parser = build_parser(__doc__)
    parser.add_argument("--peer", default="torchmonarch==0.7.0", metavar="REQUIREMENT", help="what pip installs")
    options = parser.parse_args()
    with _launching.scratch() as folder:
        prepare(folder)
        python = make_peer(folder / "peer", options.peer)
        with hold(folder, "2x4"), started(python, folder) as monarch:
            first = Samples(values=[monarch.run_first()])
            run = partial(measure, folder, "muster", "held")
            samplers = {"muster": lambda: run().whole_s, "Monarch": monarch.run}
            show(f"a further run, {WORKERS} workers", sample_in_turn(options.count, samplers), limit=0.6)
            show("Monarch's first run", {"Monarch": first})
            show("Monarch's stop", {"Monarch": Samples(values=[monarch.stop()])})


if __name__ == "__main__":
    main()
