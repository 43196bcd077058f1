"""What GPUs do, from a library with NVML's interface that is built here."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from muster._shared.job_view import DeviceStatus
from muster._shared.records import replace
from muster.agent.telemetry.devices import Devices, DeviceUse

GIB = 1 << 30


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Three: at work, idle, and one that does not say how busy it is. The C library reads the real environment."""
    os.environ["STAND_IN_GPUS"] = f"93:{61 * GIB}:{80 * GIB},0:{GIB}:{80 * GIB},-1:{GIB}:{80 * GIB}"
    yield
    del os.environ["STAND_IN_GPUS"]


NOTHING = DeviceStatus(memory_total_bytes=80 * GIB)
BUSY = DeviceUse(use=0.93, memory_bytes=61 * GIB, status=NOTHING)
IDLE = DeviceUse(use=0.0, memory_bytes=GIB, status=NOTHING)
UNKNOWN = DeviceUse(use=None, memory_bytes=GIB, status=NOTHING)
PART = DeviceUse(use=None, memory_bytes=GIB // 2, status=DeviceStatus(memory_total_bytes=40 * GIB))


@pytest.mark.parametrize(
    ("nproc", "visible", "found"),
    [
        (2, None, {0: BUSY, 1: IDLE}),
        (4, None, {0: BUSY, 1: IDLE, 2: UNKNOWN}),
        (2, "1,0", {0: IDLE, 1: BUSY}),
        (2, " 1 ", {0: IDLE}),
        (2, "GPU-1, GPU-0", {0: IDLE, 1: BUSY}),
        (2, "MIG-1,0", {0: PART, 1: BUSY}),
        (2, "MIG-77,0", {1: BUSY}),
        (2, "", {}),
        (2, "-1", {}),
        (2, "99999999999,GPU-77", {}),
    ],
)
def test_each_rank_has_its_gpu(nvml, gpus, nproc, visible, found) -> None:
    devices = Devices(nproc, visible, nvml)
    assert devices.read() == found
    assert devices.read() == found
    devices.close()
    devices.close()


def test_without_a_driver_or_a_library_there_is_nothing(nvml: str, tmp_path: Path) -> None:
    assert Devices(2, None, nvml).read() == {}, "no driver"
    assert Devices(2, None, str(tmp_path / "none.so")).read() == {}
    (tmp_path / "text.so").write_text("no library")
    assert Devices(2, None, str(tmp_path / "text.so")).read() == {}
    other = Devices(2, None, "libc.so.6")
    assert other.read() == {}
    assert other.read() == {}


@pytest.fixture
def set_env() -> Iterator[Callable[[str, str], None]]:
    """The real environment, which the C library reads."""
    names: set[str] = set()

    def set_one(name: str, value: str) -> None:
        names.add(name)
        os.environ[name] = value

    yield set_one
    for name in names:
        os.environ.pop(name, None)


def test_what_a_gpu_does(nvml: str, gpus: None, set_env: Callable[[str, str], None]) -> None:
    """Of drivers before 535, too, which know the reasons by another name. A part of a GPU has the whole one's."""
    set_env("STAND_IN_STATUS", "71:642300:700000:1980:100:5:0:18,30:70000:700000:345:1:0:0:-1,-1:-1:-1:-1:-1:-1:-1:-1")
    devices = Devices(4, "0,1,2,MIG-0", nvml)
    found = {rank: use.status for rank, use in devices.read().items()}
    assert found == {
        0: DeviceStatus(
            memory_total_bytes=80 * GIB,
            temperature_c=71,
            power_w=642,
            power_limit_w=700,
            clock_hz=1_980_000_000,
            slowed_by="power cap, software thermal, hardware thermal",
            links=18,
        ),
        1: DeviceStatus(
            memory_total_bytes=80 * GIB, temperature_c=30, power_w=70, power_limit_w=700, clock_hz=345_000_000
        ),
        2: NOTHING,
        3: replace(found[0], memory_total_bytes=40 * GIB),
    }
    devices.close()


def test_errors_count_from_the_first_look_on(nvml: str, gpus: None, set_env: Callable[[str, str], None]) -> None:
    status = "71:642300:700000:1980:0:{}:{}:-1"
    set_env("STAND_IN_STATUS", status.format(5, 2))
    devices = Devices(2, None, nvml)
    assert devices.read()[0].status.ecc_uncorrected == 0
    set_env("STAND_IN_STATUS", status.format(9, 3))
    set_env("STAND_IN_XID", "0:79")
    found = devices.read()
    assert (found[0].status.ecc_corrected, found[0].status.ecc_uncorrected) == (4, 1)
    assert (found[0].status.xids, found[0].status.last_xid) == (1, 79)
    assert (found[1].status.xids, found[1].status.last_xid) == (0, None)
    assert devices.read()[0].status.xids == 1
    devices.close()


def test_a_gpu_that_falls_off_the_bus_is_told(nvml: str, gpus: None, set_env: Callable[[str, str], None]) -> None:
    devices = Devices(2, None, nvml)
    assert devices.read() == {0: BUSY, 1: IDLE}
    set_env("STAND_IN_GONE", "1")
    assert devices.read() == {0: BUSY, 1: DeviceUse(use=None, memory_bytes=None, status=DeviceStatus(is_lost=True))}
    devices.close()


def test_a_driver_that_answers_slowly_is_read_all_the_same(nvml, gpus, set_env) -> None:
    set_env("STAND_IN_SLOW_MS", "20")
    devices = Devices(2, None, nvml)
    assert devices.read() == {0: BUSY, 1: IDLE}
    devices.close()
