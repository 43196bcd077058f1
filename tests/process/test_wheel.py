"""What the built package holds beside modules; built offline, with the setuptools that is installed."""

import os
import shutil
import subprocess
import sys
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
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
    with zipfile.ZipFile(path) as opened:
        yield opened


def test_it_is_marked_as_typed(wheel):
    assert "muster/py.typed" in wheel.namelist()


def test_it_has_its_license(wheel):
    (name,) = [name for name in wheel.namelist() if name.rpartition("/")[2] == "LICENSE"]
    assert wheel.read(name).decode() == (ROOT / "LICENSE").read_text()
    (metadata,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    assert message_from_bytes(wheel.read(metadata))["License"] == "BSD-3-Clause"
