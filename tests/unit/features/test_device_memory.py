"""The wait for devices' memory before a restart, with a library that has NVML's interface and is built here."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from muster.agent.features.device_memory.node import DeviceMemory

GIB = 1 << 30


class World:
    """Two devices, whose use changes at given moments."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.now_s = 0.0
        self.later: dict[float, tuple[int, int]] = {}
        self.set(0, 0)

    def set(self, *used: int) -> None:
        self.path.write_text(",".join(f"0:{each * GIB}:{80 * GIB}" for each in used))

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        for at_s in [each for each in self.later if each <= self.now_s]:
            self.set(*self.later.pop(at_s))

    def make(self, nvml: str, nproc: int = 2, visible: str | None = None) -> DeviceMemory:
        return DeviceMemory(nvml, nproc, visible, sleep=self.sleep, now_s=lambda: self.now_s)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """The C library reads the real environment."""
    os.environ["STAND_IN_FILE"] = str(tmp_path / "gpus")
    os.environ["STAND_IN_HOLDER"] = str(os.getpid())
    yield World(tmp_path / "gpus")
    del os.environ["STAND_IN_FILE"], os.environ["STAND_IN_HOLDER"]


def never() -> bool:
    return False


def test_memory_that_is_free_is_not_waited_for(nvml: str, world: World) -> None:
    assert world.make(nvml).wait(never) == ()
    assert world.now_s == 0.0


@pytest.mark.parametrize(("free_s", "lines"), [(2.0, ()), (12.0, ("the memory of device 0 was free after 12 s",))])
def test_a_start_waits_until_it_is_free(free_s: float, lines: tuple[str, ...], nvml: str, world: World) -> None:
    world.set(61, 0)
    world.later[free_s] = (0, 0)
    assert world.make(nvml).wait(never) == lines
    assert world.now_s == free_s


def test_after_the_limit_the_holder_is_named(nvml: str, world: World) -> None:
    world.set(61, 0)
    (line,) = world.make(nvml).wait(never)
    assert all(fact in line for fact in ("61.0 GiB of 80.0 GiB", "device 0 ", " 50 s ", "python"))


def test_what_was_in_use_before_the_job_is_not_waited_for(nvml: str, world: World) -> None:
    world.set(20, 0)
    memory = world.make(nvml)
    memory.remember()
    world.set(61, 0)
    memory.remember()
    world.later[3.0] = (20, 0)
    assert memory.wait(never) == ()
    assert world.now_s == 3.0


@pytest.mark.parametrize(
    ("nproc", "visible", "waits"),
    [
        (1, None, False),
        (2, None, True),
        (1, "1", True),
        (1, "0", False),
        (1, "GPU-1", True),
        (1, "", False),
        (1, "MIG-0", False),
    ],
)
def test_only_the_jobs_own_devices_count(nproc: int, visible: str | None, waits: bool, nvml: str, world: World) -> None:
    world.set(0, 61)
    assert bool(world.make(nvml, nproc, visible).wait(never)) == waits


def test_a_wait_ends_with_its_start(nvml: str, world: World) -> None:
    world.set(61, 0)
    is_cancelled: Callable[[], bool] = lambda: world.now_s >= 1.0  # noqa: E731
    assert world.make(nvml).wait(is_cancelled) == ()
    assert world.now_s == 1.0


def test_without_a_driver_or_a_library_nothing_is_waited_for(nvml: str, world: World, tmp_path: Path) -> None:
    del os.environ["STAND_IN_FILE"]
    try:
        assert world.make(nvml).wait(never) == ()
        assert world.make(str(tmp_path / "none.so")).wait(never) == ()
    finally:
        os.environ["STAND_IN_FILE"] = ""


def test_a_driver_that_does_not_answer_does_not_keep_workers_from_starting(nvml: str, world: World) -> None:
    world.set(61, 0)
    os.environ["STAND_IN_SLOW_MS"] = "1500"
    try:
        memory = DeviceMemory(nvml, 2, None, answer_s=0.05, sleep=world.sleep, now_s=lambda: world.now_s)
        (line,) = memory.wait(never)
        why = "the NVIDIA driver has not answered within 0.05 s"
        assert f"{why}: workers start" in line
        memory.remember()
    finally:
        del os.environ["STAND_IN_SLOW_MS"]
