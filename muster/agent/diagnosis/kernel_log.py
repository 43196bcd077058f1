"""Reads what the kernel's log says of failures: a lost device, or a process that was killed for memory.

`/dev/kmsg` needs a right that containers seldom have; if it cannot be read, nothing is known. Loaded at a failure.

Source: Documentation/ABI/testing/dev-kmsg: one record per read, "priority,number,microseconds,flags;text".
"""

import os
import re
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Final

from muster._shared.causes import DEVICE, HOST_OOM
from muster._shared.records import record

_RECORD_BYTES: Final = 8192
_MOST_RECORDS: Final = 20_000
"""In most kernels a log has a megabyte or less."""

_MOST_KEPT: Final = 64

_XID: Final = re.compile(r"NVRM: Xid \(([^)]*)\): (\d+)")
_PROGRAM_XIDS: Final = frozenset({13, 31, 43, 45, 68, 69})
"""Faults of the program (an illegal address, an exception of a kernel), and what follows from a program's end. Source:
NVIDIA's catalogue of Xid errors."""
_DEVICE: Final = re.compile(
    r"NVRM: .*fallen off the bus|NVRM: .*GPU .* lost|nvidia-nvswitch.*SXid|Uncorrected hardware error|"
    r"amdgpu.*(?:GPU reset begin|uncorrectable)|mlx5_core.*(?:health|fatal|Link down)|AER: Uncorrected"
)
_KILLED: Final = re.compile(r"(?:Out of memory|Memory cgroup out of memory|OOM)\S* Killed process (\d+)")


@record
class KernelLine:
    """One line of the log about a failure."""

    cause: str
    """`causes.DEVICE` or `causes.HOST_OOM`."""
    text: str
    pid: int | None = None
    """The process that was killed for memory, by its number on the machine."""


def find_kernel_lines(records: Iterable[bytes]) -> Iterator[tuple[float, KernelLine]]:
    """Find the lines about failures, each with its time (CLOCK_MONOTONIC), in records as the device gives them."""
    for each in records:
        head, _, body = each.partition(b";")
        fields = head.split(b",")
        if len(fields) < 3 or not fields[2].isdigit():
            continue
        line = parse_kernel_text(body.split(b"\n", 1)[0].decode(errors="replace"))
        if line is not None:
            yield int(fields[2]) / 1e6, line


def parse_kernel_text(text: str) -> KernelLine | None:
    """Return what one line says; None if it says nothing about a failure."""
    text = text.strip()[:400]
    killed = _KILLED.search(text)
    if killed:
        return KernelLine(cause=HOST_OOM, text=f"kernel: {text}", pid=int(killed[1]))
    xid = _XID.search(text)
    if xid:
        return None if int(xid[2]) in _PROGRAM_XIDS else KernelLine(cause=DEVICE, text=f"kernel: {text}")
    return KernelLine(cause=DEVICE, text=f"kernel: {text}") if _DEVICE.search(text) else None


class KernelLog:
    """Reads the log. What was there before `skip` is not read, because the log of a machine may take some 10 ms.

    Args:
        path: the device's.
    """

    def __init__(self, path: str = "/dev/kmsg") -> None:
        self._path = path
        self._opened: int | None = None
        self._found: deque[tuple[float, KernelLine]] = deque(maxlen=_MOST_KEPT)
        """The last lines, because several workers may fail because of one."""

    def skip(self) -> None:
        """Read only what comes from now on."""
        opened = self._open()
        if opened is not None:
            os.lseek(opened, 0, os.SEEK_END)

    def read(self, since_s: float) -> tuple[KernelLine, ...]:
        """Return what the log has said since then (CLOCK_MONOTONIC); nothing if it cannot be read."""
        opened = self._open()
        if opened is not None:
            self._found.extend(find_kernel_lines(_read_records(opened)))
        return tuple(line for at_s, line in self._found if at_s >= since_s)

    def _open(self) -> int | None:
        if self._opened is None:
            try:
                self._opened = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            except OSError:
                return None
        return self._opened


def _read_records(opened: int) -> Iterator[bytes]:
    for _ in range(_MOST_RECORDS):
        try:
            data = os.read(opened, _RECORD_BYTES)
        except BrokenPipeError:  # overwritten before the read
            continue
        except OSError:  # BlockingIOError: no more
            return
        if not data:
            return
        yield data
