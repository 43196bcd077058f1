"""Reads what AMD GPUs do through amdsmi, if AMD's driver is there: as `devices`, but less. It may block.

Power is omitted, because its structure differs between releases.

Source: amdsmi.h of AMD SMI 24.7 (ROCm 6.3): names, structures and constants. No GPU was available: it was tested with a
library that has these functions.
"""

import ctypes
from typing import Final

from muster._shared.fields import MOST
from muster._shared.job_view import DeviceStatus
from muster.agent.telemetry.devices import DeviceUse

LIBRARY: Final = "libamd_smi.so"
DRIVER: Final = "/dev/kfd"
_SUCCESS: Final = 0
_GPUS: Final = 2
"""AMDSMI_INIT_AMD_GPUS."""
_VRAM: Final = 0
_HOTSPOT, _CURRENT = 1, 0
_GRAPHICS_CLOCK: Final = 0
_MOST: Final = 64
"""The most sockets, and the most GPUs of one."""
_NO_VALUE: Final = 0xFFFF
"""Values of 16 or 32 bits: what a GPU does not report has all bits set."""


class _Numbers(ctypes.Structure):
    """The first fields of amdsmi_engine_usage_t and amdsmi_clk_info_t; the rest is reserved space."""

    _fields_ = (("first", ctypes.c_uint32), ("rest", ctypes.c_uint32 * 63))


class _Errors(ctypes.Structure):
    """amdsmi_error_count_t."""

    _fields_ = (("corrected", ctypes.c_uint64), ("uncorrected", ctypes.c_uint64), ("rest", ctypes.c_uint64 * 14))


class AmdDevices:
    """The GPUs of a node's workers. Only one thread may use it at a time."""

    def __init__(self, nproc: int, visible: str | None, library: str = LIBRARY) -> None:
        """Open nothing yet.

        Args:
            nproc: number of workers; local rank n uses the n-th visible GPU.
            visible: the workers' HIP_VISIBLE_DEVICES, numbers only; None if it is not set.
            library: amdsmi's.
        """
        words = [str(rank) for rank in range(nproc)] if visible is None else visible.split(",")
        self._wanted = {rank: int(word) for rank, word in enumerate(words[:nproc]) if word.strip().isdecimal()}
        self._name = library
        self._library: ctypes.CDLL | None = None
        self._handles: dict[int, ctypes.c_void_p] = {}
        """The handles by local rank."""
        self._first: dict[int, tuple[int, int]] = {}
        """Memory errors at the first look, by local rank."""
        self._has_failed = False

    def read(self) -> dict[int, DeviceUse]:
        """Read all available values by local rank; empty if there is no GPU, library or driver."""
        if self._library is None and not self._has_failed:
            self._has_failed = not self._open()
        if self._library is None:
            return {}
        found = {rank: self._read_device(self._library, rank, handle) for rank, handle in self._handles.items()}
        return {rank: use for rank, use in found.items() if use is not None}

    def _open(self) -> bool:
        try:
            library = ctypes.CDLL(self._name)
            if library.amdsmi_init(ctypes.c_uint64(_GPUS)) != _SUCCESS:
                return False
            handles = _list_handles(library)
        except (OSError, AttributeError):  # none, or another library
            return False
        self._handles = {rank: handles[index] for rank, index in self._wanted.items() if index < len(handles)}
        self._library = library
        return bool(self._handles)

    def _read_device(self, library: ctypes.CDLL, rank: int, handle: ctypes.c_void_p) -> DeviceUse | None:
        used, total, temperature = ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_int64()
        usage, clock, errors = _Numbers(), _Numbers(), _Errors()
        if library.amdsmi_get_gpu_memory_usage(handle, _VRAM, ctypes.byref(used)) != _SUCCESS:
            return None
        has_total = library.amdsmi_get_gpu_memory_total(handle, _VRAM, ctypes.byref(total)) == _SUCCESS
        has_use = library.amdsmi_get_gpu_activity(handle, ctypes.byref(usage)) == _SUCCESS
        has_clock = library.amdsmi_get_clk_info(handle, _GRAPHICS_CLOCK, ctypes.byref(clock)) == _SUCCESS
        code = library.amdsmi_get_temp_metric(handle, _HOTSPOT, _CURRENT, ctypes.byref(temperature))
        corrected = uncorrected = 0
        if library.amdsmi_get_gpu_total_ecc_count(handle, ctypes.byref(errors)) == _SUCCESS:
            first = self._first.setdefault(rank, (errors.corrected, errors.uncorrected))
            corrected, uncorrected = max(0, errors.corrected - first[0]), max(0, errors.uncorrected - first[1])
        return DeviceUse(
            use=usage.first / 100 if has_use and usage.first <= 100 else None,
            memory_bytes=min(MOST, used.value),
            status=DeviceStatus(
                memory_total_bytes=min(MOST, total.value) if has_total else None,
                temperature_c=max(0, temperature.value) if code == _SUCCESS else None,
                clock_hz=clock.first * 1_000_000 if has_clock and clock.first < _NO_VALUE else None,
                ecc_corrected=min(MOST, corrected),
                ecc_uncorrected=min(MOST, uncorrected),
            ),
        )

    def close(self) -> None:
        """Release the library. Idempotent."""
        library, self._library = self._library, None
        self._handles = {}
        if library is not None:
            library.amdsmi_shut_down()


def _list_handles(library: ctypes.CDLL) -> list[ctypes.c_void_p]:
    """List the handles of all GPUs in the order of amdsmi, which is HIP's unless it was changed."""
    sockets, count = (ctypes.c_void_p * _MOST)(), ctypes.c_uint32(_MOST)
    if library.amdsmi_get_socket_handles(ctypes.byref(count), sockets) != _SUCCESS:
        return []
    found: list[ctypes.c_void_p] = []
    for socket in sockets[: min(count.value, _MOST)]:
        handles, number = (ctypes.c_void_p * _MOST)(), ctypes.c_uint32(_MOST)
        code = library.amdsmi_get_processor_handles(ctypes.c_void_p(socket), ctypes.byref(number), handles)
        if code == _SUCCESS:
            found += [ctypes.c_void_p(each) for each in handles[: min(number.value, _MOST)]]
    return found
