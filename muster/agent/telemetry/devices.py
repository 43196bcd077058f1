"""Reads what NVIDIA GPUs do through NVML, if its driver is there. It may block, so call it in a thread.

It uses ctypes, because nothing else is installed everywhere and the agent has no dependencies. No CUDA context is made.
What a GPU or a driver does not know is omitted: each function of NVML may be missing or report that it is not
supported.

Source: NVIDIA's NVML API reference (docs.nvidia.com/deploy/nvml-api) and nvml.h of API version 13: names, structures,
constants and return codes. No GPU was available: it was tested with a library that has these functions.
"""

import ctypes
from typing import Final

from muster._shared.fields import MOST
from muster._shared.job_view import DeviceStatus
from muster._shared.records import record

_SUCCESS: Final = 0
_LOST: Final = 15
"""NVML_ERROR_GPU_IS_LOST."""
_TEMPERATURE_GPU: Final = 0
_CLOCK_SM: Final = 1
_CORRECTED, _UNCORRECTED, _SINCE_DRIVER = 0, 1, 0
"""NVML_MEMORY_ERROR_TYPE_*, NVML_VOLATILE_ECC."""
_XID: Final = 8
"""nvmlEventTypeXidCriticalError."""
_MOST_XIDS: Final = 16
"""The most errors read at one look."""
_MOST_LINKS: Final = 36
_LINKS_EACH: Final = 10
"""Looks between two looks at the links, because each link takes a separate call."""
_REASONS: Final = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "software thermal",
    0x40: "hardware thermal",
    0x80: "power brake",
}
"""nvmlClocksEventReason*: why the clocks are lower than they could be. Idleness and a person's settings are not listed.
"""


@record
class DeviceUse:
    """The state of one GPU."""

    use: float | None
    """The part of the last moments in which a kernel ran, 0..1; None if the GPU does not report it."""
    memory_bytes: int | None
    """Memory in use by all processes; None if the GPU has fallen off the bus."""
    status: DeviceStatus


class _Utilization(ctypes.Structure):
    """nvmlUtilization_t, in per cent."""

    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Memory(ctypes.Structure):
    """nvmlMemory_t."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _Event(ctypes.Structure):
    """nvmlEventData_t."""

    _fields_ = (
        ("device", ctypes.c_void_p),
        ("type", ctypes.c_ulonglong),
        ("data", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


class _Device:
    """One GPU, or a part of one, with its counts at the first look."""

    def __init__(self, handle: ctypes.c_void_p, whole: ctypes.c_void_p) -> None:
        self.handle = handle
        self.whole = whole
        """The whole GPU: this one, or the one that it is a part of."""
        self.first_ecc: dict[int, int] = {}
        self.xids = 0
        self.last_xid: int | None = None
        self.links: int | None = None
        self.looks = 0


class Devices:
    """The GPUs of a node's workers. Only one thread may use it at a time."""

    def __init__(self, nproc: int, visible: str | None, library: str) -> None:
        """Open nothing yet.

        Args:
            nproc: number of workers; local rank n uses the n-th visible GPU.
            visible: the workers' CUDA_VISIBLE_DEVICES; None if it is not set. Numbers are in NVML's order, which is
                CUDA's if all GPUs of the node are equal.
            library: NVML's.
        """
        self._nproc = nproc
        self._visible = None if visible is None else [word.strip() for word in visible.split(",")]
        self._name = library
        self._library: ctypes.CDLL | None = None
        self._devices: dict[int, _Device] = {}
        """The devices by local rank."""
        self._events: ctypes.c_void_p | None = None
        self._has_failed = False

    def read(self) -> dict[int, DeviceUse]:
        """Read all available values by local rank; empty if there is no GPU, library or driver."""
        if self._library is None and not self._has_failed:
            self._has_failed = not self._open()
        if self._library is None:
            return {}
        self._read_xids()
        found = {rank: self._read_device(device) for rank, device in self._devices.items()}
        return {rank: use for rank, use in found.items() if use is not None}

    def _open(self) -> bool:
        try:
            library = ctypes.CDLL(self._name)
            if library.nvmlInit_v2() != _SUCCESS:
                return False
            self._library = library
            for local_rank in range(self._nproc):
                handle = self._find_handle(library, local_rank)
                if handle is not None:
                    self._devices[local_rank] = _Device(handle, self._find_whole(handle))
        except (OSError, AttributeError):  # none, or another library
            self._library = None
            return False
        if not self._devices:
            self.close()
            return False
        self._register()
        return True

    def _find_handle(self, library: ctypes.CDLL, local_rank: int) -> ctypes.c_void_p | None:
        word = str(local_rank)
        if self._visible is not None:
            word = self._visible[local_rank] if local_rank < len(self._visible) else ""
        handle = ctypes.c_void_p()
        if word.isdigit():
            code = library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(int(word) & 0xFFFF), ctypes.byref(handle))
        elif word.startswith(("GPU-", "MIG-")):
            code = library.nvmlDeviceGetHandleByUUID(word.encode(), ctypes.byref(handle))
        else:
            return None
        return handle if code == _SUCCESS else None

    def _find_whole(self, handle: ctypes.c_void_p) -> ctypes.c_void_p:
        """Return the whole GPU of a part (MIG), which has the temperature, power and errors."""
        whole = ctypes.c_void_p()
        code = self._call("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", handle, ctypes.byref(whole))
        return whole if code == _SUCCESS else handle

    def _call(self, name: str, *arguments: object) -> int | None:
        """Call a function of NVML; return None if this driver does not have it."""
        try:
            function = getattr(self._library, name)
        except AttributeError:
            return None
        code: int = function(*arguments)
        return code

    def _read_number(self, name: str, *arguments: object, kind: type = ctypes.c_uint) -> int | None:
        """Return what a function writes to its last argument; None if it reports nothing."""
        found = kind()
        return min(MOST, found.value) if self._call(name, *arguments, ctypes.byref(found)) == _SUCCESS else None

    def _register(self) -> None:
        """Have the driver keep the errors (Xid) of the GPUs from now on."""
        events = ctypes.c_void_p()
        if self._call("nvmlEventSetCreate", ctypes.byref(events)) != _SUCCESS:
            return
        self._events = events
        for device in self._devices.values():
            self._call("nvmlDeviceRegisterEvents", device.whole, ctypes.c_ulonglong(_XID), events)

    def _read_xids(self) -> None:
        if self._events is None:
            return
        event = _Event()
        for _ in range(_MOST_XIDS):
            if self._call("nvmlEventSetWait_v2", self._events, ctypes.byref(event), ctypes.c_uint(0)) != _SUCCESS:
                return
            for device in self._devices.values():
                if device.whole.value == event.device and event.type & _XID:
                    device.xids += 1
                    device.last_xid = min(MOST, event.data)

    def _read_device(self, device: _Device) -> DeviceUse | None:
        memory, use = _Memory(), _Utilization()
        code = self._call("nvmlDeviceGetMemoryInfo", device.handle, ctypes.byref(memory))
        if code == _LOST:
            lost = DeviceStatus(is_lost=True, xids=device.xids, last_xid=device.last_xid)
            return DeviceUse(use=None, memory_bytes=None, status=lost)
        if code != _SUCCESS:
            return None
        is_known = self._call("nvmlDeviceGetUtilizationRates", device.handle, ctypes.byref(use)) == _SUCCESS
        return DeviceUse(
            use=min(100, use.gpu) / 100 if is_known else None,
            memory_bytes=min(MOST, memory.used),
            status=self._read_status(device, min(MOST, memory.total)),
        )

    def _read_status(self, device: _Device, total_bytes: int) -> DeviceStatus:
        whole = device.whole
        power_mw = self._read_number("nvmlDeviceGetPowerUsage", whole)
        limit_mw = self._read_number("nvmlDeviceGetEnforcedPowerLimit", whole)
        clock_mhz = self._read_number("nvmlDeviceGetClockInfo", whole, ctypes.c_uint(_CLOCK_SM))
        if device.looks % _LINKS_EACH == 0:
            device.links = self._count_links(whole)
        device.looks += 1
        return DeviceStatus(
            memory_total_bytes=total_bytes,
            temperature_c=self._read_number("nvmlDeviceGetTemperature", whole, ctypes.c_uint(_TEMPERATURE_GPU)),
            power_w=None if power_mw is None else power_mw // 1000,
            power_limit_w=None if limit_mw is None else limit_mw // 1000,
            clock_hz=None if clock_mhz is None else clock_mhz * 1_000_000,
            slowed_by=self._read_reasons(whole),
            xids=device.xids,
            last_xid=device.last_xid,
            ecc_corrected=self._count_ecc(device, _CORRECTED),
            ecc_uncorrected=self._count_ecc(device, _UNCORRECTED),
            links=device.links,
        )

    def _read_reasons(self, whole: ctypes.c_void_p) -> str:
        for name in ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"):
            found = self._read_number(name, whole, kind=ctypes.c_ulonglong)
            if found is not None:  # the only name before 535
                return ", ".join(text for bit, text in _REASONS.items() if found & bit)
        return ""

    def _count_ecc(self, device: _Device, kind: int) -> int:
        """Count memory errors since the first look."""
        arguments = device.whole, ctypes.c_uint(kind), ctypes.c_uint(_SINCE_DRIVER)
        found = self._read_number("nvmlDeviceGetTotalEccErrors", *arguments, kind=ctypes.c_ulonglong)
        return 0 if found is None else max(0, found - device.first_ecc.setdefault(kind, found))

    def _count_links(self, whole: ctypes.c_void_p) -> int | None:
        """Count active NVLinks; None if the GPU has none."""
        states = []
        for link in range(_MOST_LINKS):
            state = self._read_number("nvmlDeviceGetNvLinkState", whole, ctypes.c_uint(link))
            if state is None:
                break
            states.append(state)
        return sum(map(bool, states)) if states else None

    def close(self) -> None:
        """Release the library. Idempotent."""
        if self._library is not None:
            if self._events is not None:
                self._call("nvmlEventSetFree", self._events)
            self._call("nvmlShutdown")
        self._library, self._events, self._devices = None, None, {}
