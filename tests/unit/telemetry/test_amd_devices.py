"""What AMD GPUs do, from a library with amdsmi's interface that is built here."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from muster._shared.job_view import DeviceStatus
from muster.agent.telemetry.amd_devices import AmdDevices
from muster.agent.telemetry.devices import DeviceUse

SOURCE = Path(__file__).parents[2] / "programs/amdsmi_stand_in.c"
FIRST = DeviceUse(
    use=0.93,
    memory_bytes=1000,
    status=DeviceStatus(memory_total_bytes=9000, temperature_c=71, clock_hz=2_100_000_000),
)
SECOND = DeviceUse(use=None, memory_bytes=5, status=DeviceStatus(memory_total_bytes=9000, temperature_c=40))


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler here")
    path = tmp_path_factory.mktemp("amdsmi") / "libamd_smi.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-Wall", "-Werror", "-o", path, SOURCE], check=True)
    return str(path)


@pytest.fixture
def gpus() -> Iterator[None]:
    """The second does not say how busy it is, and has no clock. The C library reads the real environment."""
    os.environ["STAND_IN_AMD"] = "93:1000:9000:71:2100:7:1,65535:5:9000:40:4294967295:0:0"
    yield
    del os.environ["STAND_IN_AMD"]


@pytest.mark.parametrize(
    ("nproc", "visible", "found"),
    [
        (2, None, {0: FIRST, 1: SECOND}),
        (4, None, {0: FIRST, 1: SECOND}),
        (2, "1,0", {0: SECOND, 1: FIRST}),
        (1, "1,0", {0: SECOND}),
        (2, "GPU-7,1", {1: SECOND}),
        (2, "", {}),
    ],
)
def test_each_rank_has_its_gpu(
    library: str, gpus: None, nproc: int, visible: str | None, found: dict[int, DeviceUse]
) -> None:
    devices = AmdDevices(nproc, visible, library)
    assert devices.read() == found
    assert devices.read() == found
    devices.close()
    devices.close()


def test_errors_count_from_the_first_look_on(library: str, gpus: None) -> None:
    devices = AmdDevices(1, None, library)
    devices.read()
    os.environ["STAND_IN_AMD"] = "93:1000:9000:71:2100:9:4,0:0:0:0:0:0:0"
    status = devices.read()[0].status
    assert (status.ecc_corrected, status.ecc_uncorrected) == (2, 3)
    devices.close()


def test_without_a_driver_or_a_library_there_is_nothing(library: str, tmp_path: Path) -> None:
    assert AmdDevices(2, None, library).read() == {}, "no driver"
    assert AmdDevices(2, None, str(tmp_path / "none.so")).read() == {}
    assert AmdDevices(2, None, "libc.so.6").read() == {}
