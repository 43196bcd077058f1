"""Reads the NVIDIA GPUs of this machine through NVML, by ctypes: no CUDA context is made. It may block.

Source: NVIDIA's NVML API reference (docs.nvidia.com/deploy/nvml-api): names, structures, return codes, buffer sizes.
"""

import ctypes
import os
from typing import Final

from muster._shared.records import record

_SUCCESS: Final = 0
_TEXT_BYTES: Final = 96
"""NVML_SYSTEM_DRIVER_VERSION_BUFFER_SIZE is 80, NVML_DEVICE_UUID_V2_BUFFER_SIZE 96."""
_HOLDERS: Final = 64
_UNKNOWN: Final = (1 << 64) - 1
"""NVML_VALUE_NOT_AVAILABLE."""
_COMMAND_CHARS: Final = 60


@record
class Holder:
    """A process that holds memory of a device."""

    pid: int
    used_bytes: int | None = None
    user: str = ""
    command: str = ""

    def describe(self) -> str:
        """Return a text such as `process 812 of ada: python train.py`."""
        user, command = (f" of {self.user}" if self.user else ""), (f": {self.command}" if self.command else "")
        return f"process {self.pid}{user}{command}"


@record
class Device:
    """A GPU that answers."""

    index: int
    """As NVML counts."""
    uuid: str = ""
    total_bytes: int = 0
    used_bytes: int = 0
    holders: tuple[Holder, ...] = ()
    """The holders of its memory, as far as this process may see them."""


@record
class Devices:
    """The GPUs of a machine with a driver."""

    driver: str = ""
    """Its version."""
    answering: tuple[Device, ...] = ()
    silent: int = 0
    """How many more are in the driver's list."""


class _Memory(ctypes.Structure):
    """nvmlMemory_t."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _Process(ctypes.Structure):
    """nvmlProcessInfo_t, as of the functions whose names end in v3."""

    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


def read_devices(library: str) -> Devices | None:
    """Read all GPUs that this process may use. Return None if there is no driver. `library`: NVML's path or name."""
    try:
        nvml = ctypes.CDLL(library)
        if nvml.nvmlInit_v2() != _SUCCESS:
            return None
    except (OSError, AttributeError):  # missing, or another library
        return None
    try:
        count = ctypes.c_uint()
        if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != _SUCCESS:
            return None
        found = [_read_device(nvml, index) for index in range(count.value)]
        answering = tuple(device for device in found if device is not None)
        driver = _read_text(nvml.nvmlSystemGetDriverVersion)
        return Devices(driver=driver, answering=answering, silent=len(found) - len(answering))
    except AttributeError:  # a library from before 2012
        return None
    finally:
        nvml.nvmlShutdown()


def _read_text(read: "ctypes._NamedFuncPointer", *arguments: object) -> str:
    buffer = ctypes.create_string_buffer(_TEXT_BYTES)
    is_read = read(*arguments, buffer, ctypes.c_uint(_TEXT_BYTES)) == _SUCCESS
    return buffer.value.decode("utf-8", "replace") if is_read else ""


def _read_device(nvml: ctypes.CDLL, index: int) -> Device | None:
    """Read a device. None: it does not answer, such as one that has fallen off the bus."""
    handle, memory = ctypes.c_void_p(), _Memory()
    if nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle)) != _SUCCESS:
        return None
    if nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) != _SUCCESS:
        return None
    return Device(
        index=index,
        uuid=_read_text(nvml.nvmlDeviceGetUUID, handle),
        total_bytes=memory.total,
        used_bytes=memory.used,
        holders=_read_holders(nvml, handle),
    )


def _read_holders(nvml: ctypes.CDLL, handle: ctypes.c_void_p) -> tuple[Holder, ...]:
    """Return the processes with a context on it. With a driver before 510 none is known."""
    processes, count = (_Process * _HOLDERS)(), ctypes.c_uint(_HOLDERS)
    try:
        code = nvml.nvmlDeviceGetComputeRunningProcesses_v3(handle, ctypes.byref(count), processes)
    except AttributeError:
        return ()
    return tuple(_describe(each) for each in processes[: count.value]) if code == _SUCCESS else ()


def _describe(process: _Process) -> Holder:
    """Describe a holder. In a container of its own, another's process is known by its number only."""
    user = command = ""
    try:
        user = _name_user(os.stat(f"/proc/{process.pid}").st_uid)
        with open(f"/proc/{process.pid}/cmdline", "rb") as file:
            fields = file.read(1024).rstrip(b"\0").split(b"\0")
        command = b" ".join(fields).decode("utf-8", "replace")[:_COMMAND_CHARS]
    except OSError:
        pass
    return Holder(
        pid=process.pid, used_bytes=None if process.used == _UNKNOWN else process.used, user=user, command=command
    )


def _name_user(uid: int) -> str:
    import pwd  # only for a device in use

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"
