"""What unit tests get besides: entry points are read once; libraries of devices that are built here."""

import functools
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from torchx.util import entrypoints


@pytest.fixture(autouse=True, scope="session")
def entry_points_read_once() -> Iterator[None]:
    """TorchX reads what all installed distributions declare, for each runner: 20 ms."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(entrypoints.metadata, "entry_points", functools.cache(entrypoints.metadata.entry_points))
        yield


def build_library(source: str, path: Path) -> str:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler here")
    program = Path(__file__).parents[1] / "programs" / source
    subprocess.run([compiler, "-shared", "-fPIC", "-Wall", "-Werror", "-o", path, program], check=True)
    return str(path)


@pytest.fixture(scope="session")
def nvml(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A library with NVML's interface."""
    return build_library("nvml_stand_in.c", tmp_path_factory.mktemp("nvml") / "libnvidia-ml.so.1")
