"""What the built package holds beside modules; built offline, with the setuptools that is installed."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from email import message_from_bytes

import pytest
from harness import ROOT


@pytest.fixture(scope="module")
def wheel_path(tmp_path_factory):
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "setup.py", "muster_entry.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "muster", source / "muster", ignore=shutil.ignore_patterns("__pycache__"))
    build = "from setuptools.build_meta import build_wheel; build_wheel('dist')"
    env = {**os.environ, "PYTHONWARNINGS": "default"}
    done = subprocess.run(
        [sys.executable, "-c", build], cwd=source, env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    warned = [line for line in done.stderr.splitlines() if "licen" in line.lower() and "deprecat" in line.lower()]
    assert warned == []
    (path,) = (source / "dist").glob("*.whl")
    return path


@pytest.fixture(scope="module")
def wheel(wheel_path):
    with zipfile.ZipFile(wheel_path) as opened:
        yield opened


def install(wheel_path, folder):
    """Make an environment with nothing but the wheel, and return its folder of programs."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=120)
    python = folder / "bin/python"
    command = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-index", wheel_path]
    subprocess.run(command, check=True, timeout=120)  # it depends on nothing, so it needs no index
    return folder / "bin"


@pytest.fixture(scope="module")
def alone(wheel_path, tmp_path_factory):
    """Folder of programs of an environment with nothing but the wheel."""
    return install(wheel_path, tmp_path_factory.mktemp("alone"))


@pytest.fixture(scope="module")
def installed(wheel_path, tmp_path_factory):
    """Folder of programs of an environment with the wheel; TorchX is found where the tests have it."""
    programs = install(wheel_path, tmp_path_factory.mktemp("installed"))
    (site,) = programs.parent.glob("lib/python3*/site-packages")
    (site / "beside.pth").write_text(f"{sysconfig.get_path('purelib')}\n")  # after its own packages
    return programs


def run(programs, words, tmp_path):
    env = {"PATH": f"{programs}:{os.environ['PATH']}", "HOME": str(tmp_path)}
    return subprocess.run(
        [programs / words[0], *words[1:]], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120
    )


def run_python(programs, code, tmp_path):
    done = run(programs, ["python", "-c", code], tmp_path)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_is_marked_as_typed(wheel):
    assert "muster/py.typed" in wheel.namelist()


def test_it_has_the_guide_for_coding_agents_where_the_help_says(installed, tmp_path):
    code = """
import subprocess
text = subprocess.run(["muster", "--help"], capture_output=True, text=True, check=True).stdout
print(open(text.partition("For coding agents: ")[2].split()[0]).read())
"""
    assert run_python(installed, code, tmp_path).strip() == (ROOT / "muster/SKILL.md").read_text().strip()


def test_it_has_its_license(wheel):
    (name,) = [name for name in wheel.namelist() if name.rpartition("/")[2] == "LICENSE"]
    assert wheel.read(name).decode() == (ROOT / "LICENSE").read_text()
    (metadata,) = [name for name in wheel.namelist() if re.fullmatch(r"torchx_muster-[^/]*/METADATA", name)]
    assert message_from_bytes(wheel.read(metadata))["License"] == "BSD-3-Clause"


def test_it_has_what_an_index_shows(wheel):
    (name,) = [name for name in wheel.namelist() if re.fullmatch(r"torchx_muster-[^/]*/METADATA", name)]
    metadata = message_from_bytes(wheel.read(name))
    assert metadata["Requires-Python"] == ">=3.10"
    assert "Typing :: Typed" in metadata.get_all("Classifier")
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert not metadata.get_all("Project-URL")  # there is no address yet, and none is invented
    required = dict.fromkeys(re.findall(r"extra == [\"'](\w+)", "".join(metadata.get_all("Requires-Dist"))))
    assert list(required)[:6] == ["torch", "torchx", "docker", "kubernetes", "top", "all"]
    whole = next(each for each in metadata.get_all("Requires-Dist") if each.startswith("torchx-muster["))
    assert set(re.split(r"\W+", whole[whole.index("[") + 1 : whole.index("]")])) == set(list(required)[:5])


NEED_TORCHX = [
    "run dist.ddp",
    "run --help-all",
    "hold dist.ddp",
    "rehearse --faults list",
    "rerun",
    "status x",
    "log x",
]
NEED_TORCHX += [
    "top",
    "list",
    "events x",
    "timeline x",
    "stop x",
    "recover x",
    "exec x true",
    "shell x",
    "prune",
    "completion apps",
]


@pytest.mark.parametrize("line", NEED_TORCHX)
def test_a_command_that_needs_torchx_says_so_in_one_line(alone, tmp_path, line):
    words = line.split()
    done = run(alone, ["muster", *words], tmp_path)
    how = "which is not installed: pip install 'torchx-muster[torchx]', or torchx-nightly"
    assert (done.returncode, done.stdout) == (2, ""), done
    assert done.stderr == f"muster: muster {words[0]} needs TorchX, {how}\n"


@pytest.mark.parametrize("line", ["--version", "--help", "run --help", "completion bash", "doctor"])
def test_other_commands_need_nothing(alone, tmp_path, line):
    done = run(alone, ["muster", *line.split()], tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert line != "doctor" or "TorchX        absent" in done.stdout


def test_agents_and_the_python_api_need_nothing(alone, tmp_path):
    """All of this is in one program; a job on a hold is what needs TorchX."""
    (tmp_path / "main.py").write_text("import os; print('rank', os.environ['RANK'])\n")
    done = run(alone, ["muster-agent", "--standalone", "--nproc-per-node", "1", "main.py"], tmp_path)
    assert (done.returncode, done.stdout) == (0, "rank 0\n")
    code = """
import math, sys
from muster import data, elastic, launch, run, snapshots, worker
from muster.agent.errors import EnvironmentFault
print(elastic.launch(math.sqrt, (9.0,), nproc=1).values_by_rank)
try:
    elastic.launch(math.sqrt, (9.0,), nproc=1, held=True)
except EnvironmentFault as error:
    print(error)
"""
    value, line = run_python(alone, code, tmp_path).splitlines()
    assert value == "{0: 3.0}"
    assert line.startswith("held=True: holds need TorchX: pip install 'torchx-muster[torchx]'")


def test_its_entry_points_are_in_the_order_that_torchx_needs(installed, tmp_path):
    code = """
import muster, sys
from importlib.metadata import entry_points
print(muster.__file__)
print([each.name for each in entry_points(group="torchx.schedulers") if each.value.startswith("muster")][0])
from torchx.schedulers import get_default_scheduler_name
print(get_default_scheduler_name())
"""
    where, first, default = run_python(installed, code, tmp_path).split()
    assert where.startswith(str(installed.parent))
    assert first == default == "local_cwd"


AGENT, TORCHX = (
    ["muster-agent", "--version"],
    "from torchx.cli.main import main; main(['run', '-s', 'local_cwd', 'utils.echo'])",
)


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (AGENT, "muster/__init__.py"),
        (AGENT, "muster/x/y.py"),
        (["muster", "stop", "x"], "muster.py"),
        (["python", "-c", TORCHX], "muster/__init__.py"),
    ],
    ids=["muster-agent", "no package", "muster", "torchx"],
)
def test_another_package_of_its_name_is_one_line(installed, tmp_path, words, name):
    """Where a Python path names it; the interpreter would find no `muster.agent`."""
    other = tmp_path / name
    other.parent.mkdir(parents=True, exist_ok=True)
    other.write_text("")
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [installed / words[0], *words[1:]], cwd="/", env=env, capture_output=True, text=True, timeout=120
    )
    if "/x/" in name:  # a folder without __init__.py: ours is found
        assert (done.returncode, done.stdout[:6], "hides" in done.stderr) == (0, "muster", False), done
        return
    where = other if name == "muster.py" else other.parent
    line = f"muster: {where} hides the package of torchx-muster, which has the same name: rename it, or take its folder"
    assert (done.returncode, done.stderr) == (2, f"{line} off PYTHONPATH\n")
