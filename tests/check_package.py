"""Installs the built wheel in fresh environments, in five ways on every Python there is, and tries it there.

    python tests/check_package.py WHEEL SBOM TORCH TORCHX TORCHX_NIGHTLY

The last three are requirements. The environment with all extras is made for one Python only, because torch is large,
and SBOM is written from it. `make package` runs this; it needs a package index. Pythons are looked for on PATH and in
pyenv's folder. What the wheel does without an index is in tests/process/test_wheel.py.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VERSIONS = re.findall(r'Python :: (3\.\d+)"', (ROOT / "pyproject.toml").read_text())
PROGRAMS = {
    "main.py": "import os; print('rank ' + os.environ['RANK'])\n",
    "program.py": """
import math
from muster import elastic
if __name__ == "__main__":
    print(dict(elastic.launch(math.sqrt, (9.0,), nproc=2).values_by_rank))
""",
    "reduce.py": """
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank()])
dist.all_reduce(total)
print(f"the ranks sum to {int(total)}")
dist.destroy_process_group()
""",
}
RUN = "torchx run -s local_cwd dist.ddp -j 1x2 --script"
WITHOUT_TORCHX = (
    ("muster-agent --standalone --nproc-per-node 2 main.py", 0, "rank 1"),
    ("python program.py", 0, "{0: 3.0, 1: 3.0}"),
    ("muster doctor", 0, "TorchX        absent"),
    ("muster completion bash", 0, "complete"),
    ("muster run dist.ddp -j 1x2 --script main.py", 2, "[torchx]"),
)
WITH_TORCHX = (
    ("muster-agent --version", 0, "muster"),
    ("torchx builtins", 0, "dist.torchrun"),
    ("torchx builtins", 0, "utils.echo"),
    ("torchx runopts", 0, "local_cwd"),
    (f"{RUN} main.py", 0, "rank 1"),
    ("muster run dist.ddp -j 1x2 --script main.py", 0, "local_cwd://"),
    ("muster status kubernetes://torchx/x", 6, "kubernetes]"),
)
SUBMIT_ONLY = (
    ("muster run --dryrun -s kubernetes dist.ddp -j 2x4 --image i --script main.py", 0, "kind: Job"),
    ("muster run --dryrun -s docker dist.ddp -j 2x4 --image i --script main.py", 0, "muster-agent"),
    ("muster run --dryrun -s slurm dist.ddp -j 2x4 --script main.py", 0, "#SBATCH"),
    ("muster status kubernetes://torchx/x", 6, "kubeconfig"),
)
ALL = (
    (f"{RUN} reduce.py", 0, "the ranks sum to 1"),
    ("muster top --once last", 0, "SUCCEEDED"),
)


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to install muster."""

    name: str
    requirements: tuple[tuple[str, ...], ...]
    """Of each call of pip."""
    absent: frozenset[str]
    """Distributions that no call may have installed."""
    checks: tuple[tuple[str, int, str], ...]
    """Command, exit code, and what it prints."""


def list_ways(wheel, torch, torchx, nightly):
    """The ways to install the wheel. That with all extras is the last."""
    both = frozenset({"torch", "kubernetes"})
    stable, nightly_alone = (both | {name} for name in ("torchx-nightly", "torchx"))
    return (
        Way(name="agent only", requirements=((wheel,),), absent=both | {"torchx"}, checks=WITHOUT_TORCHX),
        Way(name=torchx, requirements=((torchx, f"{wheel}[torchx]"),), absent=stable, checks=WITH_TORCHX),
        Way(name=nightly, requirements=((nightly,), (wheel,)), absent=nightly_alone, checks=WITH_TORCHX),
        Way(
            name="submit only",
            requirements=((f"{wheel}[torchx,docker,kubernetes]",),),
            absent=frozenset({"torch"}),
            checks=SUBMIT_ONLY,
        ),
        Way(name="all", requirements=((torch,), (f"{wheel}[all]",)), absent=frozenset(), checks=WITH_TORCHX[:-1] + ALL),
    )


def main(wheel, sbom, *requirements):
    """The exit code: 1 when an installation failed."""
    pythons = {version: path for version in VERSIONS if (path := find_python(version))}
    missing = [version for version in VERSIONS if version not in pythons]
    if missing:
        print(f"not on this machine: Python {', '.join(missing)}")
    *ways, whole = list_ways(str(Path(wheel).resolve()), *requirements)
    failed = 0
    for version, python in pythons.items():
        for way in ways:
            failed |= report(f"Python {version}, {way.name}", python, way)
    failed |= report("all extras", sys.executable, whole, Path(sbom).resolve())
    return int(failed or not pythons)


def find_python(version):
    """A Python of this version; None when the machine has none."""
    if found := shutil.which(f"python{version}"):
        done = subprocess.run([found, "--version"], capture_output=True, text=True)
        if done.returncode == 0:
            return found
    folders = sorted((Path.home() / ".pyenv/versions").glob(f"{version}.*"))
    return str(folders[-1] / "bin/python") if folders else None


def report(title, python, way, sbom=None):
    """Whether the way failed; print how it went."""
    with tempfile.TemporaryDirectory(prefix="muster-package-") as name:
        error = try_install(python, way, Path(name), sbom)
    print(f"{title}: {error or 'works'}", flush=True)
    return bool(error)


def try_install(python, way, folder, sbom):
    """What went wrong; "" when nothing did."""
    programs, work = folder / "venv/bin", folder / "work"
    work.mkdir()
    for file, text in PROGRAMS.items():
        (work / file).write_text(text)
    # its pip installs into the environment, which has nothing but what the wheel asks for
    pip = [sys.executable, "-m", "pip", "--python", programs / "python", "--disable-pip-version-check"]
    for command in (
        [python, "-m", "venv", "--without-pip", folder / "venv"],
        *([*pip, "install", "-q", *words] for words in way.requirements),
        [*pip, "check"],
    ):
        if error := run(command, work, os.environ):
            return error
    listed = subprocess.run([*pip, "list", "--format=json"], capture_output=True, text=True, check=True).stdout
    names = {each["name"] for each in json.loads(listed)}
    if names & way.absent:
        return f"has {', '.join(sorted(names))}"
    env = {"HOME": str(folder), "PATH": f"{programs}:/usr/bin:/bin", "KUBECONFIG": str(folder / "none")}
    for words, code, expected in way.checks:
        if error := run(words.split(), work, env, code, expected):
            return error
    return write_sbom(sbom, programs, work, names) if sbom else ""


def write_sbom(sbom, programs, work, names):
    """What went wrong; "" when the SBOM has the distributions of these names."""
    sbom.parent.mkdir(exist_ok=True)
    tool = Path(sys.executable).with_name("cyclonedx-py")
    command = [tool, "environment", programs / "python", "--output-reproducible", "--output-file", sbom]
    if error := run(command, work, os.environ):
        return error
    differing = names ^ {each["name"] for each in json.loads(sbom.read_text())["components"]}
    return f"the SBOM differs in {', '.join(sorted(differing))}" if differing else ""


def run(command, work, env, code=0, expected=""):
    """What went wrong; "" when nothing did."""
    words = [str(word) for word in command]
    found = shutil.which(words[0], path=env["PATH"])
    done = subprocess.run(
        [found or words[0], *words[1:]], cwd=work, env=env, capture_output=True, text=True, timeout=1200
    )
    said = done.stdout + done.stderr
    if done.returncode == code and expected in said:
        return ""
    return f"{' '.join(words)} ended with {done.returncode}, without {expected!r}:\n{said[-2000:]}"


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
