"""Installs the built wheel in fresh environments, one for each Python and TorchX line, and tries it there.

    python tests/check_package.py dist

`make package` runs it; it needs a package index. Pythons are looked for on PATH and in pyenv's folder. The tests of
`make test` install the wheel once, without an index: tests/process/test_wheel.py.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

VERSIONS = ("3.10", "3.11", "3.12", "3.13")
LINES = {
    "torchx": ["torchx>=0.7"],
    "torchx-nightly": ["torchx-nightly==2026.10.26"],
}
SCRIPT = "import os; print('rank', os.environ['RANK'])\n"


def main(folder):
    """The exit code: 1 when an installation failed."""
    (wheel,) = Path(folder).resolve().glob("*.whl")
    pythons = {version: path for version in VERSIONS if (path := find_python(version))}
    missing = [version for version in VERSIONS if version not in pythons]
    if missing:
        print(f"not on this machine: Python {', '.join(missing)}")
    failed = 0
    for version, python in pythons.items():
        for line, requirements in LINES.items():
            error = try_install(python, wheel, requirements)
            print(f"Python {version}, {line}: {error or 'works'}", flush=True)
            failed |= bool(error)
    return int(failed or not pythons)


def find_python(version):
    """A Python of this version; None when the machine has none."""
    if found := shutil.which(f"python{version}"):
        done = subprocess.run([found, "--version"], capture_output=True, text=True)
        if done.returncode == 0:
            return found
    folders = sorted((Path.home() / ".pyenv/versions").glob(f"{version}.*"))
    return str(folders[-1] / "bin/python") if folders else None


def try_install(python, wheel, requirements):
    """What went wrong; "" when nothing did."""
    with tempfile.TemporaryDirectory(prefix="muster-package-") as name:
        folder = Path(name)
        programs = folder / "venv/bin"
        (folder / "main.py").write_text(SCRIPT)
        install = [programs / "python", "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        # without dependencies: they name torchx, and the nightly line is another distribution of the same package
        for command, expected in (
            ([python, "-m", "venv", folder / "venv"], ""),
            ([*install, *requirements], ""),
            ([*install, "--no-deps", wheel], ""),
            ([programs / "muster-agent", "--version"], "muster"),
            ([programs / "torchx", "builtins"], "dist.torchrun"),
            ([programs / "torchx", "builtins"], "utils.echo"),
            ([programs / "torchx", "runopts"], "local_cwd"),
            ([programs / "torchx", "run", "--dryrun", "dist.ddp", "-j", "1x2", "--script", "main.py"], "muster"),
            ([programs / "torchx", "run", "-s", "local_cwd", "dist.ddp", "-j", "1x2", "--script", "main.py"], "rank 1"),
        ):
            env = {"HOME": name, "PATH": f"{programs}:/usr/bin:/bin"}
            done = subprocess.run(
                [str(word) for word in command], cwd=folder, env=env, capture_output=True, text=True, timeout=600
            )
            said = done.stdout + done.stderr
            if done.returncode != 0 or expected not in said:
                return f"{' '.join(map(str, command[:4]))} ended with {done.returncode}:\n{said[-2000:]}"
    return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
