"""The whole process `torchx run -s local_cwd dist.ddp -j 2x4 --script main.py`, muster's beside TorchX's own.

    python benchmarks/torchx_run.py [--count N] [--peer REQUIREMENT | --no-peer]

From the start of the command line's process to its end; the script is one gloo all-reduce over the eight workers. The
peer gets an environment of its own in a temporary folder, because muster's entry points replace TorchX's
components and schedulers wherever muster is installed: TorchX from the package index, torch and what torch needs linked
to the very files muster's workers import. TorchX's own runs the two nodes as two torchrun agents on this machine. Each
sample has a port of its own: TorchX's default, 29500, may be in use.

Before it, without a peer: `muster run` beside `torchx run` of the same environment, to the first line of the script.
"""

import importlib.metadata
import os
import re
import subprocess
import sys
import time
import venv
from functools import partial
from pathlib import Path

import _launching
from _sampling import SampleFailed, build_parser, sample_in_turn, show
from start import ALL_REDUCE, MARK

RUN = ("run", "-s", "local_cwd", "dist.ddp", "-j", "2x4", "--script", "main.py")
WORKERS = 8
LIMIT_S = 120.0

CHECK = """
import importlib.metadata, importlib.util, torch
every = list(importlib.metadata.distributions())
replaced = [point.value for d in every for point in d.entry_points if point.value.startswith("muster")]
assert not replaced and importlib.util.find_spec("muster") is None, replaced
found = [d for d in every if d.name.startswith("torchx")]
print(*[f"{d.name} {d.version}" for d in found], "with torch", torch.__version__)
"""

TORCHRUN = "#!{python}\nimport sys\nfrom torch.distributed.run import main\nsys.exit(main())\n"


def make_peer(folder: Path, requirement: str) -> Path:
    """Build an environment with TorchX and torch and without muster; its folder of commands.

    Raises:
        CalledProcessError: TorchX cannot be installed, or muster is importable there.
    """
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", requirement], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    for place in list_places(["torch", "numpy"]):
        if not (packages / place.name).exists():
            (packages / place.name).symlink_to(place)
    command = folder / "bin" / "torchrun"
    command.write_text(TORCHRUN.format(python=python))
    command.chmod(0o755)
    found = subprocess.check_output([python, "-c", CHECK], cwd=folder, env=clean_env(python.parent), text=True)
    print(f"the peer: {found.strip()}", flush=True)
    return python.parent


def list_places(names: list[str]) -> set[Path]:
    """List what this environment's site-packages have for these distributions and their requirements."""
    todo, seen, places = list(names), set[str](), set[Path]()
    while todo:
        name = re.sub(r"[-_.]+", "-", todo.pop()).lower()
        if name in seen:
            continue
        seen.add(name)
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # for another platform, or an extra
        heads = {file.parts[0] for file in distribution.files or () if file.parts[0] not in ("..", "__pycache__")}
        places |= {Path(str(distribution.locate_file(head))) for head in heads}
        todo += [re.split(r"[^\w.-]", line, maxsplit=1)[0] for line in distribution.requires or ()]
    return places


def clean_env(commands: Path) -> dict[str, str]:
    """Return an environment in which this folder's `torchx`, `torchrun` and `python3` are the first."""
    env = _launching.clean_env(PATH=f"{commands}{os.pathsep}{os.environ['PATH']}")
    return {key: value for key, value in env.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME")}


def measure_first_line(command: str, folder: Path) -> float:
    """Measure from the start of the process of `muster` or `torchx` to the first line of the first worker."""
    commands = Path(sys.executable).parent
    began_s, process, marks = _start_run(commands / command, folder, MARK)
    try:
        _launching.wait_for(lambda: bool(_launching.read_marks(marks)) or process.poll() is not None, LIMIT_S)
        found = _launching.read_marks(marks)
    finally:
        _launching.stop(process)
    if not found:
        raise SampleFailed
    return min(mark["t"] for mark in found) - began_s


def measure_run(commands: Path, folder: Path) -> float:
    """Run one whole process; every worker must have finished the all-reduce."""
    began_s, process, marks = _start_run(commands / "torchx", folder, ALL_REDUCE)
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


def _start_run(command: Path, folder: Path, script: str) -> "tuple[float, subprocess.Popen[bytes], Path]":
    """Start a command line on a script; when that was, its process, and where the script's marks come."""
    folder.mkdir(exist_ok=True)
    marks = folder / "marks"
    marks.unlink(missing_ok=True)
    (folder / "main.py").write_text(script)
    for name in ("state", "tmp"):
        (folder / name).mkdir(exist_ok=True)
    env = {**clean_env(command.parent), "MARKS": str(marks), "XDG_STATE_HOME": str(folder / "state")}
    argv = [str(command), *RUN, "--rdzv_port", str(_launching.find_port())]
    began_s = time.monotonic()
    process = subprocess.Popen(
        argv,
        cwd=folder,
        env={**env, "TMPDIR": str(folder / "tmp")},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    return began_s, process, marks


def main() -> None:
    parser = build_parser(__doc__)
    parser.add_argument("--peer", default="torchx-nightly", metavar="REQUIREMENT", help="what pip installs")
    parser.add_argument("--no-peer", action="store_true", help="only what needs no peer, and no package index")
    options = parser.parse_args()
    with _launching.scratch() as folder:
        first = {
            f"{name} run": partial(measure_first_line, name, folder / f"{name}-first") for name in ("muster", "torchx")
        }
        show("to the script's first line, dist.ddp -j 2x4", sample_in_turn(options.count, first))
        if options.no_peer:
            return
        peer = make_peer(folder / "peer", options.peer)
        samplers = {
            "muster": lambda: measure_run(Path(sys.executable).parent, folder / "muster-job"),
            "torchx": lambda: measure_run(peer, folder / "torchx-job"),
        }
        show("torchx run -s local_cwd dist.ddp -j 2x4, whole", sample_in_turn(options.count, samplers), limit=0.40)


if __name__ == "__main__":
    main()
