"""What can be wrong with a node before its workers start: reads this machine, and applies the table of checks to it.

A finding is an error only if the job cannot do what was asked: some worker has no device, the nodes have different
code, MASTER_ADDR cannot be reached. Anything else may be as its user wants it, and is a warning. What cannot be read is
None: a check that does not know finds nothing.

`agent.features.preflight` carries this out on a node, and compares nodes. `muster doctor` applies the same table. All
of it is in this module because it is loaded before the first worker starts, and one module costs less than three.

An executable that a site has added writes lines: `error: TEXT` ends the attempt, `warning: TEXT` is printed, all others
are dropped. If it exits with another code than 0 and has named no error, that is an error itself, with its last line.
If it does not end in time, it is killed, and that is a warning.
"""

import os
import resource
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Final, TypeAlias

from muster._shared.contract import Env
from muster._shared.fields import Line, Name
from muster._shared.records import record

if TYPE_CHECKING:  # only for machines with a driver
    from muster._shared.gpus import Device, Devices

_MIB: Final = 1 << 20
LEAST_FREE_BYTES: Final = 256 * _MIB
"""The least free space of a folder that is written to."""
_LEAST_SHARED_BYTES: Final = 128 * _MIB
"""The least size of /dev/shm: NCCL's buffers, and the batches of one DataLoader. Docker's own default is 64 MiB."""
_SHARED_BYTES_EACH: Final = 32 * _MIB
"""And for each worker."""
_DESCRIPTORS: Final = 1024
_DESCRIPTORS_EACH: Final = 64
"""The descriptors of a worker with a DataLoader, which passes tensors as descriptors. The agent itself needs some ten.
"""
_PROCESSES_EACH: Final = 64
"""Threads count: those of torch, of NCCL and of a DataLoader."""
_USED_BYTES: Final = 512 * _MIB
_USED_SHARE: Final = 0.05
"""A device of which more is used before the start is not free."""
MOST_SKEW_S: Final = 3.0
"""Less may be the time that a message takes on a loaded machine."""

_OTHER_DRIVERS: Final = ("/dev/kfd", "/dev/nvmap", "/dev/dri/renderD128", "/dev/accel", "/dev/davinci_manager")
"""Files of the drivers of AMD, NVIDIA's Jetson, Intel, others, and Ascend. Their devices are not looked at."""
_SHARED_MEMORY: Final = "/dev/shm"  # noqa: S108  # it is what it is about
_PROBE_BYTES: Final = 4096
SITE_FOLDER: Final = "/etc/muster/preflight.d"
_MOST_SITE_CHECKS: Final = 32
_CGROUPS: Final = "/sys/fs/cgroup"
SITE_LIMITS_S: Final = {"quick": 10.0, "full": 60.0}
"""How long each may take, by --preflight."""
_MOST_SITE_FINDINGS: Final = 32
"""The most findings of each."""
_VERSION_LINE: Final = r"^(__version__|cuda|hip)\b[^=\n]*= *'([^'\n]+)'"
"""A line of torch/version.py."""
_NCCL: Final = r"nvidia_nccl_cu\d+-(.+)\.dist-info"
_NAMES: Final = {"__version__": "torch", "cuda": "CUDA", "hip": "HIP"}


# -- what was read -----------------------------------------------------------------------------------------------------


@record
class Folder:
    """A folder that the job writes to."""

    label: str
    path: str
    free_bytes: int | None = None
    free_files: int | None = None
    """None: its file system does not count them."""
    problem: str = ""
    """Why it takes no file."""


@record
class Machine:
    """What was read."""

    descriptors: int | None = None
    """How many a process may have."""
    processes: int | None = None
    """How many more may be started. None: no limit is known."""
    processes_limit: str = ""
    """Which limit says so."""
    shared_bytes: int | None = None
    """Free in /dev/shm. None: it is missing."""
    folders: tuple[Folder, ...] = ()
    devices: "Devices | None" = None
    """None: there is no driver, or it was not asked."""
    has_driver: bool = True
    """Whether there is a driver of devices of any kind, as far as is known."""


# -- the table ---------------------------------------------------------------------------------------------------------


def _format(size_bytes: int) -> str:
    from muster._shared.reports import format_size  # most nodes have no finding

    return format_size(size_bytes)


class Level(Enum):
    """What follows from a finding."""

    ERROR = "error"
    """The attempt ends."""
    WARNING = "warning"
    """The job goes on."""


@record
class Finding:
    """One thing that is not as expected, on one node."""

    check: Name
    """Its row in the table."""
    level: Level
    found: Line
    expected: Line = ""
    advice: Line = ""

    def describe(self) -> str:
        """Return one line, without the node."""
        expected = f", expected {self.expected}" if self.expected else ""
        return f"{self.found}{expected}{': ' if self.advice else ''}{self.advice}"


@record
class Need:
    """What the job asks of this node."""

    nproc: int
    devices: int | None = None
    """GPUs that the job was submitted with (--devices). None: that is not known."""
    visible: tuple[str, ...] | None = None
    """The devices that CUDA_VISIBLE_DEVICES names. None: it is not set."""


Problem: TypeAlias = tuple[Level, str, str]
"""Level, what was found, what was expected."""


@record
class Check:
    """One row of the table."""

    name: str
    """What it expects is in the documentation, by this name (`docs/reference_pages.py`)."""
    advice: str
    find: Callable[[Machine, Need], Iterable[Problem]] | None = None
    """None: it takes more than this machine, see `NODES`."""
    is_shared: bool = True
    """Nodes that share a machine find the same: one of them says it."""


def find_problems(machine: Machine, need: Need) -> tuple[Finding, ...]:
    """Apply the table to one machine. Errors come first."""
    found = [
        Finding(check=row.name, level=level, found=what, expected=expected, advice=row.advice)
        for row in LOCAL
        if row.find is not None
        for level, what, expected in row.find(machine, need)
    ]
    return tuple(sorted(found, key=lambda finding: finding.level is not Level.ERROR))


def parse_visible(text: str | None) -> tuple[str, ...] | None:
    """Return the devices that CUDA_VISIBLE_DEVICES names: CUDA stops at the first word that is none, such as -1."""
    if text is None:
        return None
    names: list[str] = []
    for word in (each.strip() for each in text.split(",")):
        if not (word.isdecimal() or word.startswith(("GPU-", "MIG-"))):
            break
        names.append(word)
    return tuple(names)


def find_devices(machine: Machine, need: Need) -> "tuple[Device, ...]":
    """Return the devices of this job that answer, as far as they are known."""
    return choose_devices(machine.devices, need) if machine.devices is not None else ()


def choose_devices(devices: "Devices", need: Need) -> "tuple[Device, ...]":
    """Return those of this job, of the devices that answer."""
    if need.visible is None:
        return devices.answering
    names = list(need.visible)
    return tuple(
        device
        for device in devices.answering
        if str(device.index) in names or any(name.startswith("GPU-") and device.uuid.startswith(name) for name in names)
    )


def _find_missing_driver(machine: Machine, need: Need) -> Iterator[Problem]:
    if not machine.has_driver and need.devices and need.visible != ():
        yield Level.ERROR, "no driver of a GPU is loaded", f"{need.devices} devices (--devices)"


def _find_missing_devices(machine: Machine, need: Need) -> Iterator[Problem]:
    devices = machine.devices
    if devices is None or need.visible == () or any(name.startswith("MIG-") for name in need.visible or ()):
        return  # no driver, none wanted, or parts
    count = len(choose_devices(devices, need))
    silent = f"; {devices.silent} more of the driver's list do not answer" if devices.silent else ""
    found = f"{count} {'device answers' if count == 1 else 'devices answer'}{silent}"
    if need.visible is not None:
        if count < len(need.visible):
            level = Level.ERROR if count < min(need.nproc, len(need.visible)) else Level.WARNING
            yield level, found, f"{len(need.visible)} (CUDA_VISIBLE_DEVICES)"
    elif need.devices is not None and count < need.devices:
        yield Level.ERROR, found, f"{need.devices} (--devices)"
    elif need.devices is None and devices.silent:
        yield Level.WARNING, found, f"{max(need.nproc, count + devices.silent)} for {_count_workers(need.nproc)}"


def _find_shared_devices(machine: Machine, need: Need) -> Iterator[Problem]:
    devices = machine.devices
    if devices is None or devices.silent or need.visible is not None or need.devices is not None:
        return  # see `_find_missing_devices`
    count = len(devices.answering)
    if 0 < count < need.nproc:
        found = f"{count} {'device answers' if count == 1 else 'devices answer'}"
        yield Level.WARNING, found, f"{need.nproc} for {_count_workers(need.nproc)}"


def _find_used_memory(machine: Machine, need: Need) -> Iterator[Problem]:
    for device in find_devices(machine, need):
        if not is_free(device):
            yield Level.WARNING, describe_use(device), "a free device"


def is_free(device: "Device") -> bool:
    """Return whether no more of its memory is in use than the driver's own, and small processes of others."""
    return device.used_bytes <= max(_USED_BYTES, int(device.total_bytes * _USED_SHARE))


def describe_use(device: "Device") -> str:
    """Return a text such as `61 GiB of 80 GiB of device 0 are in use (held by process 812 of ada: python train.py)`."""
    holders = ", ".join(holder.describe() for holder in device.holders[:4])
    held = f" (held by {holders})" if holders else ""
    return f"{_format(device.used_bytes)} of {_format(device.total_bytes)} of device {device.index} are in use{held}"


def _find_full_folders(machine: Machine, _need: Need) -> Iterator[Problem]:
    for folder in machine.folders:
        if folder.problem:
            yield Level.WARNING, f"{folder.label} {folder.path} takes no file ({folder.problem})", ""
        elif folder.free_bytes is not None and folder.free_bytes < LEAST_FREE_BYTES:
            free = f"{folder.label} {folder.path} has {_format(folder.free_bytes)} free"
            yield Level.WARNING, free, f"at least {_format(LEAST_FREE_BYTES)}"
        elif folder.free_files == 0:
            yield Level.WARNING, f"the file system of {folder.label} {folder.path} has no free inode", "free inodes"


def _count_workers(count: int) -> str:
    return "1 worker" if count == 1 else f"{count} workers"


def _find_small_shared_memory(machine: Machine, need: Need) -> Iterator[Problem]:
    free, least = machine.shared_bytes, _LEAST_SHARED_BYTES + need.nproc * _SHARED_BYTES_EACH
    if free is None:
        yield Level.WARNING, "there is no /dev/shm", "shared memory"
    elif free < least:
        found = f"/dev/shm has {_format(free)} free"  # noqa: S108
        yield Level.WARNING, found, f"at least {_format(least)} for {_count_workers(need.nproc)}"


def _find_few_descriptors(machine: Machine, need: Need) -> Iterator[Problem]:
    least = min(_DESCRIPTORS, _DESCRIPTORS_EACH * (need.nproc + 1))
    if machine.descriptors is not None and machine.descriptors < least:
        yield Level.WARNING, f"a process may have {machine.descriptors} open files", f"at least {least}"


def _find_few_processes(machine: Machine, need: Need) -> Iterator[Problem]:
    least = _PROCESSES_EACH * need.nproc
    if machine.processes is not None and machine.processes < least:
        found = f"{machine.processes} more processes or threads may be started ({machine.processes_limit})"
        yield Level.WARNING, found, f"at least {least} for {_count_workers(need.nproc)}"


LOCAL: Final = (
    Check(
        name="driver",
        advice="load a driver, give the container its GPUs, or submit the job without GPUs",
        find=_find_missing_driver,
    ),
    Check(
        name="devices",
        advice="look at `nvidia-smi` and `dmesg` (Xid), and take the node out of service",
        find=_find_missing_devices,
        is_shared=False,
    ),
    Check(
        name="shared-devices",
        advice="NCCL refuses two ranks on one device: start one worker for each device (--nproc-per-node gpu)",
        find=_find_shared_devices,
        is_shared=False,
    ),
    Check(
        name="device-memory",
        advice="end the process that holds it, or choose other devices with CUDA_VISIBLE_DEVICES",
        find=_find_used_memory,
        is_shared=False,
    ),
    Check(
        name="folders",
        advice="free space there, or name another folder (--log-dir)",
        find=_find_full_folders,
    ),
    Check(
        name="shared-memory",
        advice="NCCL and DataLoader workers need it: give the container more (-cfg shm_size=4g)",
        find=_find_small_shared_memory,
    ),
    Check(
        name="descriptors",
        advice="raise the limit with `ulimit -n`",
        find=_find_few_descriptors,
    ),
    Check(
        name="processes",
        advice="raise the limit with `ulimit -u`, or the container's pids limit",
        find=_find_few_processes,
    ),
)
"""What a node finds out alone, in some milliseconds."""

SITE: Final = Check(
    name="site",
    advice="",
    is_shared=False,
)
REACH: Final = Check(
    name="reach",
    advice="name an address that all nodes reach with --local-addr on that node, or open its firewall",
)
CODE: Final = Check(
    name="code",
    advice="submit the job again, or copy the same files to all nodes",
)
VERSIONS: Final = Check(
    name="versions",
    advice="use the same image or environment on all nodes",
)
CLOCK: Final = Check(
    name="clock",
    advice="start the node's time service (chrony, systemd-timesyncd)",
)
UNLIKE: Final = Check(
    name="unlike-devices",
    advice="look at `nvidia-smi` and `dmesg` (Xid) on that node",
)
BANDWIDTH: Final = Check(
    name="bandwidth",
    advice="look at the node's links (`nvidia-smi topo -m`, `nvidia-smi nvlink -s`, `ibstat`)",
)
NODES: Final = (SITE, REACH, CODE, VERSIONS, UNLIKE, CLOCK, BANDWIDTH)
"""What takes other nodes, or a program."""
TABLE: Final = (*LOCAL, *NODES)


# -- reading, which may block: a disk may hang -----------------------------------------------------------------------


def read_machine(
    folders: Mapping[str, str],
    *,
    nvml: str | None = None,
    statvfs: Callable[[str], os.statvfs_result] = os.statvfs,
) -> Machine:
    """Read all of it.

    Args:
        folders: path by label ("the log folder"). One that does not exist yet is made by the job.
        nvml: the path of the driver's library for its GPUs, see `processes.find_nvml`. None: they are not read.
        statvfs: `os.statvfs`, or a stand-in for it.
    """
    processes, limit = _read_processes()
    shared = _stat(_SHARED_MEMORY, statvfs)
    devices = None
    if nvml is not None:
        from muster._shared.gpus import read_devices  # only for machines with a driver

        devices = read_devices(nvml)
    return Machine(
        descriptors=_limit_or_none(resource.RLIMIT_NOFILE),
        processes=processes,
        processes_limit=limit,
        shared_bytes=None if shared is None else shared.f_bavail * shared.f_frsize,
        folders=tuple(_read_folder(label, path, statvfs) for label, path in folders.items()),
        devices=devices,
        has_driver=nvml is not None or any(map(os.path.exists, _OTHER_DRIVERS)),
    )


def find_site_checks(folder: str | None = None) -> tuple[str, ...]:
    """Return the executable files of a site's folder, by name. Hidden ones are left out. None: `SITE_FOLDER`."""
    folder = folder or SITE_FOLDER
    try:
        names = sorted(name for name in os.listdir(folder) if not name.startswith("."))
    except OSError:
        return ()
    paths = (os.path.join(os.path.abspath(folder), name) for name in names)
    return tuple(path for path in paths if os.path.isfile(path) and os.access(path, os.X_OK))[:_MOST_SITE_CHECKS]


def find_unused_folder(folder: str | None, site_checks: Sequence[str]) -> tuple[Finding, ...]:
    """Say that a folder which was named gives no check. That of the site may be absent."""
    if not folder or site_checks:
        return ()
    what = "has no executable file" if os.path.isdir(folder) else "is not here"
    text = f"the folder of the site's checks {folder} ({Env.PREFLIGHT_DIR}) {what}"
    return (Finding(check=SITE.name, level=Level.WARNING, found=text),)


def _limit_or_none(kind: int) -> int | None:
    soft, _ = resource.getrlimit(kind)
    return None if soft == resource.RLIM_INFINITY else soft


def _stat(path: str, statvfs: Callable[[str], os.statvfs_result]) -> os.statvfs_result | None:
    try:
        return statvfs(path)
    except OSError:
        return None


def _read_folder(label: str, path: str, statvfs: Callable[[str], os.statvfs_result]) -> Folder:
    """Read a folder, or the one in which it will be made if it does not exist yet."""
    path = existing = os.path.abspath(path)
    while not os.path.isdir(existing) and existing != os.path.dirname(existing):
        existing = os.path.dirname(existing)
    found, problem = _stat(existing, statvfs), _try_write(existing)
    if found is None:
        return Folder(label=label, path=path, problem=problem)
    free_files = found.f_favail if found.f_files else None
    free_bytes = found.f_bavail * found.f_frsize
    return Folder(label=label, path=path, free_bytes=free_bytes, free_files=free_files, problem=problem)


def _try_write(folder: str) -> str:
    """Write a file and remove it: a quota, or a file system that is mounted read-only, does not show otherwise."""
    path = os.path.join(folder, f".muster-preflight-{os.getpid()}-{os.urandom(4).hex()}")
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        return error.strerror or str(error)
    try:
        try:
            written = os.write(fd, bytes(_PROBE_BYTES))
        finally:
            os.close(fd)  # a network file system reports a full disk here
    except OSError as error:
        return error.strerror or str(error)
    finally:
        os.unlink(path)
    return "" if written == _PROBE_BYTES else "No space left on device"


def _read_processes() -> tuple[int | None, str]:
    """Return how many more may be started, and which limit says so.

    Source: pids controller of cgroup v2 and v1, setrlimit(2).

    RLIMIT_NPROC counts all processes of the user, which is too much to count here: it stands for itself.
    """
    rooms = [(room, "the cgroup's pids.max") for room in _list_cgroup_rooms()]
    limit = _limit_or_none(resource.RLIMIT_NPROC)
    if limit is not None and os.geteuid() != 0:
        rooms.append((limit, "RLIMIT_NPROC"))
    return min(rooms, default=(None, ""))


def _list_cgroup_rooms() -> Iterable[int]:
    try:
        with open("/proc/self/cgroup", encoding="utf-8") as file:
            lines = [line.rstrip("\n").split(":", 2) for line in file]
    except (OSError, ValueError):
        return
    for parts in lines:
        is_v2 = parts[:2] == ["0", ""]
        if len(parts) != 3 or not (is_v2 or parts[1] == "pids"):  # hierarchy, controllers, path
            continue
        root = _CGROUPS if is_v2 else f"{_CGROUPS}/pids"
        for folder in (f"{root}{parts[2]}", root):  # a container's own is at the root
            most, current = _read_number(f"{folder}/pids.max"), _read_number(f"{folder}/pids.current")
            if most is not None and current is not None:
                yield max(0, most - current)
                break


def _read_number(path: str) -> int | None:
    try:
        with open(path, encoding="utf-8") as file:
            return int(file.read())
    except (OSError, ValueError):  # "max"
        return None


# -- what an executable of the site says ------------------------------------------------------------------------------


def read_site_check(name: str, lines: Iterable[str], trouble: str, *, is_killed: bool = False) -> tuple[Finding, ...]:
    """Return the findings of one that has ended.

    Args:
        name: of its file.
        lines: what it has written.
        trouble: how it has ended, in one clause. "": with 0.
        is_killed: because it took too long.
    """
    found: list[Finding] = []
    last = ""
    for line in lines:
        last = line.strip() or last
        word, colon, text = line.partition(":")
        if colon and word in ("error", "warning") and len(found) < _MOST_SITE_FINDINGS:
            found.append(Finding(check=SITE.name, level=Level(word), found=f"{name}: {text.strip()}"))
    if is_killed:
        found.append(Finding(check=SITE.name, level=Level.WARNING, found=trouble))
    elif trouble and not any(finding.level is Level.ERROR for finding in found):
        text = f"{trouble}{': ' if last else ''}{last}"
        found.append(Finding(check=SITE.name, level=Level.ERROR, found=text))
    return tuple(found)


# -- what the workers will load ---------------------------------------------------------------------------------------


def read_versions(paths: Sequence[str] | None = None) -> tuple[tuple[str, str], ...]:
    """Name and version of Python, torch, its CUDA or HIP, and NCCL, as far as they are found.

    Args:
        paths: where modules are imported from. None: `sys.path`.
    """
    import re  # the start needs none

    found = [("Python", sys.version.split()[0])]
    for path in sys.path if paths is None else paths:
        folder = path or os.getcwd()
        try:
            with open(os.path.join(folder, "torch", "version.py"), encoding="utf-8") as file:
                text = file.read(4096)
        except (OSError, ValueError):
            continue
        found += [(_NAMES[name], version) for name, version in re.findall(_VERSION_LINE, text, re.MULTILINE)]
        found += _read_nccl(folder) if any(name == "CUDA" for name, _ in found) else []
        break
    return tuple(found)


def _read_nccl(folder: str) -> list[tuple[str, str]]:
    """Read the version of the NCCL that is installed beside torch. One that torch was built with has torch's."""
    import re

    try:
        names = os.listdir(folder)
    except OSError:
        return []
    return [("NCCL", match[1]) for name in names if (match := re.fullmatch(_NCCL, name))][:1]
