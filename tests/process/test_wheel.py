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


@pytest.fixture(scope="module")
def installed(wheel_path, tmp_path_factory):
    """Folder of programs of an environment with the wheel; what muster needs is found where the tests have it."""
    folder = tmp_path_factory.mktemp("installed")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=120)
    python = folder / "bin/python"
    command = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index", wheel_path]
    subprocess.run(command, check=True, timeout=120)
    (site,) = folder.glob("lib/python3*/site-packages")
    (site / "beside.pth").write_text(f"{sysconfig.get_path('purelib')}\n")  # after its own packages
    return folder / "bin"


def run_python(installed, code, tmp_path):
    env = {"PATH": f"{installed}:{os.environ['PATH']}", "HOME": str(tmp_path)}
    done = subprocess.run(
        [installed / "python", "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120
    )
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
