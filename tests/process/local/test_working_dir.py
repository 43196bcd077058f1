"""Users' files with the names of standard library modules: no process of ours imports them.

The agent's interpreter has nothing in its site-packages that imports such modules when Python starts.
"""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from harness import ROOT, Outcome, run_tree

from muster.schedulers.agent_command import AGENT_ENTRY

LINES = {"stable": Path(sys.executable).parent, "nightly": ROOT / ".venv-nightly" / "bin"}
NAMES = ("types", "operator", "collections", "functools", "contextlib", "warnings", "keyword")
MAIN = """\
import os, sys
print(f"path {sys.path[0]} safe {os.environ.get('PYTHONSAFEPATH')} program {sys.argv[0]}")
"""


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment that finds muster, and nothing else beside the standard library."""
    folder = tmp_path_factory.mktemp("bare") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    packages = sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)})
    Path(packages, "muster.pth").write_text(f"{ROOT}\n")
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working directory with a program and all those files; importing one of them ends the process."""
    made = tmp_path / "work"
    made.mkdir()
    (made / "main.py").write_text(MAIN)
    for name in NAMES:
        (made / f"{name}.py").write_text(f"raise SystemExit('imported {name} of the working directory')\n")
    return made


def run_torchx(line: str, folder: Path, bare: Path | None, *words: str, **env: str) -> Outcome:
    torchx = LINES[line] / "torchx"
    if not torchx.exists():
        pytest.skip(f"{torchx} is not there: `make environments` makes it")
    environment = {name: value for name, value in os.environ.items() if name != "CONDA_PREFIX"} | env
    environment |= {"VIRTUAL_ENV": str(bare), "XDG_STATE_HOME": str(folder.parent / "state")}
    command = [str(torchx), "run", "-s", "local_cwd", "dist.ddp", "-j", "1x2", *words]
    return run_tree(command, env=environment, cwd=folder)


@pytest.mark.parametrize(
    ("line", "start"), [("stable", "warm"), ("stable", "cold"), pytest.param("nightly", "warm", marks=pytest.mark.long)]
)
def test_a_job_in_such_a_folder(folder: Path, bare: Path, line: str, start: str) -> None:
    outcome = run_torchx(line, folder, bare, "--start", start, "--script", "main.py").check()
    assert outcome.stderr.count(f"path {folder} safe None program main.py\n") == 2, outcome.explain()


@pytest.mark.parametrize("start", ["warm", "cold"])
def test_a_program_that_means_its_own_files_gets_them(tmp_path: Path, bare: Path, start: str) -> None:
    """As with `python main.py`, and also by way of another module of the program's."""
    names = ", ".join(NAMES)
    (tmp_path / "main.py").write_text("def main():\n    import part\n    print(part.FOUND)\nmain()\n")
    (tmp_path / "part.py").write_text(f"import {names}\nFOUND = [each.MINE for each in ({names})]\n")
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text(f"MINE = '{name} is mine'\n")
    python = str(bare / "bin" / "python")
    outcome = run_tree([python, AGENT_ENTRY, "--start", start, "--standalone", "main.py"], cwd=tmp_path)
    plain = subprocess.run([python, "main.py"], cwd=tmp_path, capture_output=True, text=True)
    assert (outcome.exit_code, outcome.stdout) == (plain.returncode, plain.stdout), outcome.explain()
    assert plain.stdout == f"{[f'{name} is mine' for name in NAMES]}\n"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="PYTHONSAFEPATH is Python 3.11's")
@pytest.mark.parametrize("start", ["warm", pytest.param("cold", marks=pytest.mark.long)])
def test_a_safe_path_of_the_users_reaches_the_workers(folder: Path, bare: Path, start: str) -> None:
    outcome = run_torchx("stable", folder, bare, "--start", start, "--script", "main.py", PYTHONSAFEPATH="1").check()
    lines = [line for line in outcome.stderr.splitlines() if "safe 1 program main.py" in line]
    assert len(lines) == 2, outcome.explain()
    assert not any(f"path {folder} " in line for line in lines), outcome.explain()


@pytest.mark.parametrize("method", ["spawn", pytest.param("forkserver", marks=pytest.mark.long)])
def test_functions_as_workers(folder: Path, bare: Path, method: str) -> None:
    program = folder.parent / "launches.py"
    program.write_text(
        "import os\n"
        "from muster.elastic.launcher import run_program\n"
        "def rank(): return int(os.environ['RANK'])\n"
        "if __name__ == '__main__':\n"
        "    flags = ['--standalone', '--nproc-per-node', '2']\n"
        f"    call = dict(nproc=2, start_method={method!r}, environ=os.environ)\n"
        "    print(sorted(run_program(flags, rank, (), **call)[1].items()))\n"
    )
    outcome = run_tree([str(bare / "bin" / "python"), str(program)], cwd=folder).check()
    assert "[(0, 0), (1, 1)]" in outcome.stdout, outcome.explain()
