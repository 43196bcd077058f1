"""The table of checks, applied to machines that were not read but made up; and the reading of this one."""

import os
from pathlib import Path

import pytest

from muster._shared.gpus import Device, Devices, Holder, read_devices
from muster._shared.preflight import (
    LEAST_FREE_BYTES,
    LOCAL,
    TABLE,
    Folder,
    Level,
    Machine,
    Need,
    find_problems,
    find_site_checks,
    parse_visible,
    read_machine,
    read_versions,
)
from muster._shared.records import replace

GIB = 1 << 30
SOUND = Machine(descriptors=65536, processes=None, shared_bytes=8 * GIB)


def make_devices(count: int, *, silent: int = 0, used_bytes: int = 0, holders: tuple[Holder, ...] = ()) -> Devices:
    answering = tuple(
        Device(index=index, uuid=f"GPU-{index}abc", total_bytes=80 * GIB, used_bytes=used_bytes, holders=holders)
        for index in range(count)
    )
    return Devices(driver="580", answering=answering, silent=silent)


def find(machine: Machine, need: Need) -> list[tuple[str, Level, str]]:
    return [(each.check, each.level, each.describe()) for each in find_problems(machine, need)]


def test_a_sound_machine_has_no_finding() -> None:
    machine = Machine(descriptors=65536, shared_bytes=8 * GIB, devices=make_devices(8))
    assert find(machine, Need(nproc=8, devices=8)) == []
    assert find(SOUND, Need(nproc=8, devices=8)) == []  # it is not known whether there is a driver


def test_devices_that_were_asked_for_need_a_driver() -> None:
    """A program without --devices may need no GPU."""
    machine = replace(SOUND, has_driver=False)
    [(check, level, text)] = find(machine, Need(nproc=8, devices=8))
    assert (check, level) == ("driver", Level.ERROR)
    assert "expected 8 devices (--devices)" in text
    for need in (Need(nproc=8), Need(nproc=8, devices=8, visible=()), Need(nproc=8, devices=0)):
        assert find(machine, need) == []


def test_another_vendors_driver_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for path, has_driver in (("/dev/kfd", True), ("/dev/null", False)):
        monkeypatch.setattr("muster._shared.preflight.os.path.exists", lambda asked, path=path: asked == path)
        assert read_machine({}).has_driver is has_driver
    assert read_machine({}, nvml="libmissing.so").has_driver


@pytest.mark.parametrize(
    ("count", "need", "level", "expected"),
    [
        (7, Need(nproc=8, devices=8), Level.ERROR, "7 devices answer, expected 8 (--devices)"),
        (7, Need(nproc=1, devices=8), Level.ERROR, "7 devices answer, expected 8 (--devices)"),
        (1, Need(nproc=2, visible=("0", "1")), Level.ERROR, "1 device answers, expected 2 (CUDA_VISIBLE_DEVICES)"),
        (1, Need(nproc=1, visible=("0", "1")), Level.WARNING, "1 device answers, expected 2 (CUDA_VISIBLE_DEVICES)"),
        (4, Need(nproc=1, visible=("GPU-9",)), Level.ERROR, "0 devices answer, expected 1 (CUDA_VISIBLE_DEVICES)"),
    ],
)
def test_missing_devices(count: int, need: Need, level: Level, expected: str) -> None:
    [(check, found, text)] = find(Machine(shared_bytes=8 * GIB, devices=make_devices(count)), need)
    assert (check, found) == ("devices", level)
    assert text.startswith(f"{expected}: look at `nvidia-smi`")


@pytest.mark.parametrize(
    ("count", "nproc", "expected"),
    [(7, 8, "7 devices answer, expected 8 for 8 workers"), (1, 4, "1 device answers, expected 4 for 4 workers")],
)
def test_more_workers_than_devices_do_not_put_a_sound_node_out_of_service(count, nproc, expected) -> None:
    machine = Machine(shared_bytes=8 * GIB, devices=make_devices(count))
    [(check, level, text)] = find(machine, Need(nproc=nproc))
    assert (check, level) == ("shared-devices", Level.WARNING)
    advice = "NCCL refuses two ranks on one device: start one worker for each device (--nproc-per-node gpu)"
    assert text == f"{expected}: {advice}"


@pytest.mark.parametrize(
    "need",
    [
        Need(nproc=4, visible=()),
        Need(nproc=4, devices=8, visible=("0", "1", "2", "GPU-3")),
        Need(nproc=2, visible=("MIG-7",)),
        Need(nproc=1),
    ],
)
def test_devices_that_are_not_wanted_are_not_missing(need: Need) -> None:
    assert find(Machine(shared_bytes=8 * GIB, devices=make_devices(4)), need) == []


def test_devices_that_the_driver_lists_but_that_do_not_answer_are_named() -> None:
    [(_, level, text)] = find(Machine(shared_bytes=8 * GIB, devices=make_devices(7, silent=1)), Need(nproc=7))
    assert level is Level.WARNING
    assert "expected 8 for 7 workers" in text
    [(check, _, text)] = find(Machine(shared_bytes=8 * GIB, devices=make_devices(7, silent=1)), Need(nproc=8))
    assert (check, "`nvidia-smi` and `dmesg`" in text.rpartition(": ")[2]) == ("devices", True)


def test_used_memory_names_its_holder() -> None:
    holder = Holder(pid=812, used_bytes=70 * GIB, user="ada", command="python train.py")
    devices = make_devices(2, used_bytes=70 * GIB, holders=(holder,))
    [(check, level, text)] = find(Machine(shared_bytes=8 * GIB, devices=devices), Need(nproc=1, visible=("1",)))
    assert (check, level) == ("device-memory", Level.WARNING)
    assert ("device 1 " in text, "process 812 " in text) == (True, True)


@pytest.mark.parametrize(
    ("folder", "text"),
    [
        (
            Folder(label="the log folder", path="/l", problem="Read-only file system"),
            "the log folder /l takes no file (Read-only file system): free space there, or name another folder",
        ),
        (Folder(label="the log folder", path="/l", free_bytes=1 << 20), "the log folder /l has 1 MiB free, expected"),
        (Folder(label="the log folder", path="/l", free_bytes=GIB, free_files=0), "the file system of the log folder"),
    ],
)
def test_full_folders(folder: Folder, text: str) -> None:
    [(check, level, found)] = find(Machine(shared_bytes=8 * GIB, folders=(folder,)), Need(nproc=1))
    assert (check, level) == ("folders", Level.WARNING)
    assert found.startswith(text)


@pytest.mark.parametrize(
    ("machine", "check", "text"),
    [
        (Machine(shared_bytes=64 << 20), "shared-memory", "/dev/shm has 64 MiB free, expected at least 192 MiB for 2"),
        (Machine(), "shared-memory", "there is no /dev/shm, expected shared memory"),
        (
            Machine(shared_bytes=8 * GIB, descriptors=64),
            "descriptors",
            "a process may have 64 open files, expected at least 192",
        ),
        (
            Machine(shared_bytes=8 * GIB, processes=100, processes_limit="the cgroup's pids.max"),
            "processes",
            "100 more processes or threads may be started (the cgroup's pids.max), expected at least 128 for 2 workers",
        ),
    ],
)
def test_low_limits(machine: Machine, check: str, text: str) -> None:
    [(found, level, line)] = find(machine, Need(nproc=2))
    assert (found, level) == (check, Level.WARNING)
    assert line.startswith(text)


def test_one_worker_is_named_in_the_singular() -> None:
    [(_, _, line)] = find(Machine(shared_bytes=8 * GIB, processes=10, processes_limit="x"), Need(nproc=1))
    assert "64 for 1 worker:" in line


def test_errors_come_first() -> None:
    machine = Machine(shared_bytes=0, descriptors=10, devices=make_devices(1, used_bytes=80 * GIB))
    levels = [level for _, level, _ in find(machine, Need(nproc=2, devices=2))]
    assert levels == sorted(levels, key=lambda level: level is not Level.ERROR)
    assert levels[0] is Level.ERROR


def test_every_row_of_the_table_says_what_it_asks() -> None:
    assert len({row.name for row in TABLE}) == len(TABLE)
    assert all(row.find and row.advice for row in LOCAL)


@pytest.mark.parametrize(
    ("text", "devices"),
    [(None, None), ("", ()), ("-1", ()), ("0, 2", ("0", "2")), ("1,-1,2", ("1",)), ("GPU-7,MIG-a", ("GPU-7", "MIG-a"))],
)
def test_visible_devices_are_read_as_cuda_does(text: str | None, devices: tuple[str, ...] | None) -> None:
    assert parse_visible(text) == devices


# -- reading -----------------------------------------------------------------------------------------------------------


def test_this_machine_is_read(tmp_path: Path) -> None:
    machine = read_machine({"the log folder": str(tmp_path / "not" / "yet")})
    [folder] = machine.folders
    assert folder.problem == ""
    assert folder.free_bytes
    assert list(tmp_path.iterdir()) == []  # what was tried is removed
    assert machine.devices is None


def test_a_full_disk_is_read_as_the_system_says_it(tmp_path: Path) -> None:
    def statvfs(path: str) -> os.statvfs_result:
        real = os.statvfs(path)
        return os.statvfs_result((4096, 4096, 1000, 10, 10, *real[5:]))

    machine = read_machine({"the log folder": str(tmp_path)}, statvfs=statvfs)
    assert machine.folders[0].free_bytes == 40960 < LEAST_FREE_BYTES
    assert machine.shared_bytes == 40960
    assert {each.check for each in find_problems(machine, Need(nproc=1))} >= {"folders", "shared-memory"}


def test_site_checks_are_the_executable_files_by_name(tmp_path: Path) -> None:
    for name, mode in (("20-b", 0o755), ("10-a", 0o755), (".hidden", 0o755), ("notes", 0o644)):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(mode)
    (tmp_path / "folder").mkdir()
    assert [Path(path).name for path in find_site_checks(str(tmp_path))] == ["10-a", "20-b"]
    assert find_site_checks(str(tmp_path / "none")) == ()


def test_versions_are_read_without_an_import(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    lines = [
        "__version__ = '2.13.0+cu128'",
        "debug = False",
        "cuda: Optional[str] = '12.8'",
        "hip: Optional[str] = None",
    ]
    (tmp_path / "torch" / "version.py").write_text("\n".join(lines))
    (tmp_path / "nvidia_nccl_cu12-2.27.7.dist-info").mkdir()
    _, *found = read_versions([str(tmp_path / "other"), str(tmp_path)])
    assert found == [("torch", "2.13.0+cu128"), ("CUDA", "12.8"), ("NCCL", "2.27.7")]


def test_devices_are_read_through_nvml(nvml: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAND_IN_GPUS", "7:4096:8192,0:0:8192,0:0:8192")
    monkeypatch.setenv("STAND_IN_LOST", "1")
    monkeypatch.setenv("STAND_IN_HOLDER", str(os.getpid()))
    devices = read_devices(nvml)
    assert (devices.driver, devices.silent) == ("580.95.05", 1)
    first, third = devices.answering
    assert (first.index, first.uuid, first.used_bytes, first.total_bytes) == (0, "GPU-0", 4096, 8192)
    [holder] = first.holders
    assert (holder.pid, holder.used_bytes) == (os.getpid(), 4096)
    assert "python" in holder.command
    assert holder.user
    assert (third.index, third.holders) == (2, ())


def test_a_driver_that_is_not_loaded_has_no_devices(nvml: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STAND_IN_GPUS", raising=False)
    assert read_devices(nvml) is None
    assert read_devices("/nowhere/libnvidia-ml.so.1") is None
