"""How many workers and threads: files and fake interpreters instead of machines."""

import os
from pathlib import Path

import pytest

from muster._shared.processes import count_allowed_cores, count_usable_cores
from muster.agent.errors import UsageError
from muster.agent.placement.device_count import count_workers


def count(text: str, python: str = "/no/python") -> int:
    return count_workers(text, origin="--nproc-per-node", env=os.environ, python=python)


@pytest.fixture
def fake_python(tmp_path: Path) -> Path:
    return tmp_path / "python"


def make(path: Path, body: str) -> str:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def test_a_number_and_cpu_start_no_process() -> None:
    assert count("3") == 3
    assert count("cpu") == count_allowed_cores() >= 1


def test_devices_are_counted_by_another_process(fake_python: Path) -> None:
    python = make(fake_python, 'echo some banner; test "$3" = gpu && echo 8 || echo 2')
    assert count("gpu", python) == 8
    assert count("npu", python) == 2


def test_auto_without_an_accelerator_counts_cores(fake_python: Path) -> None:
    assert count("auto", make(fake_python, "echo -1")) == count_allowed_cores()
    assert count("auto", make(fake_python, "echo 4")) == 4


@pytest.mark.parametrize("kind", ["gpu", "auto", "banana"])
def test_a_count_that_fails_gives_the_reason(fake_python: Path, kind: str) -> None:
    with pytest.raises(UsageError, match=rf"--nproc-per-node '{kind}': .*\(no such device\)"):
        count(kind, make(fake_python, "echo Traceback >&2; echo no such device >&2; exit 1"))
    with pytest.raises(UsageError, match="SIGKILL"):
        count(kind, make(fake_python, "kill -9 $$"))
    with pytest.raises(UsageError, match="exited with code 3"):
        count(kind, make(fake_python, "exit 3"))
    with pytest.raises(UsageError, match="count the devices"):
        count(kind)


def test_no_gpu_says_what_to_write(fake_python: Path) -> None:
    """The whole list named gpu as allowed."""
    line = "torch finds no GPU on this machine: use cpu or a number, as in -j 1xcpu"
    with pytest.raises(UsageError) as caught:
        count("gpu", make(fake_python, f"echo '{line}' >&2; exit 1"))
    assert str(caught.value) == f"--nproc-per-node 'gpu': {line}"


@pytest.mark.parametrize("text", ["0", "-2"])
def test_fewer_than_one(text: str) -> None:
    with pytest.raises(UsageError, match="must be 1 to 16384"):
        count(text)


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 16),
        ({"cpu.max": "max 100000"}, 16),
        ({"cpu.max": "400000 100000"}, 4),
        ({"cpu.max": "50000 100000"}, 1),
        ({"cpu.max": "9900000 100000"}, 16),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 16),
        ({"cpu/cpu.cfs_quota_us": "250000", "cpu/cpu.cfs_period_us": "100000"}, 2),
    ],
)
def test_a_cgroups_limit_counts(tmp_path: Path, files: dict[str, str], cores: int) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert count_usable_cores(cgroup=tmp_path, count_allowed=lambda: 16) == cores
