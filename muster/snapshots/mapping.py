"""Memory files in a process: mappings that the system can fill with huge pages, and those pages.

A page of 4 KiB costs a fault when it is mapped, and as much work again when the process ends. For three slots of 512 MB
that is more than a copy of one, between the end of a killed worker and the start of the next. Pages of 2 MiB do not
have that cost. The system gives them to a memory file on request (`MADV_COLLAPSE`, Linux 6.1), whatever
/sys/kernel/mm/transparent_hugepage/shmem_enabled says. If it does not, everything works with small pages.
"""

import contextlib
import ctypes
import functools
import mmap
import os
import warnings
from typing import Any, Final

HUGE_BYTES: Final = 1 << 21
_PAGE: Final = mmap.PAGESIZE
_MADV_POPULATE_READ: Final = 22
_MADV_COLLAPSE: Final = 25
"""Constants that Python does not name."""
_MAP_FIXED: Final = 0x10
_FAILED: Final = ctypes.c_void_p(-1).value


class Mapping:
    """A part of a memory file. It is mapped until nothing uses it any more."""

    def __init__(self, fd: int, start: int, size: int, protection: int) -> None:
        """Map `size` bytes from `start` on, a multiple of `HUGE_BYTES`, where huge pages can be mapped as such.

        Python cannot say where, so more is mapped, and a part of that once more at a good address.

        Raises:
            OSError: it cannot be mapped.
        """
        more = HUGE_BYTES if size >= HUGE_BYTES else 0
        whole = mmap.mmap(fd, size + more, prot=protection, offset=start)
        address = view_bytes(whole).data_ptr()
        shift = -address % HUGE_BYTES if more else 0
        self._address = address + shift
        if shift:
            found = find_call("mmap")(self._address, size, protection, mmap.MAP_SHARED | _MAP_FIXED, fd, start)
            _check(found != _FAILED)
        self.memory = memoryview(whole)[shift : shift + size]
        self.bytes = view_bytes(self.memory)
        """The same as a tensor."""

    def populate(self, start: int, end: int) -> None:
        """Map all pages of a range at once, where the system can: Linux 5.14."""
        first = start // _PAGE * _PAGE
        with contextlib.suppress(OSError):
            self._advise(first, end - first, _MADV_POPULATE_READ)

    def collapse(self, start: int) -> None:
        """Put one huge page in place of the pages at `start`. Their content stays.

        Raises:
            OSError: the system cannot do that, or has no huge page.
        """
        self._advise(start, HUGE_BYTES, _MADV_COLLAPSE)

    def _advise(self, start: int, size: int, advice: int) -> None:
        _check(find_call("madvise")(self._address + start, size, advice) == 0)


def take_huge_pages(fd: int, start: int, size: int) -> None:
    """Put a part of a memory file into huge pages, if the system has them. Its content stays.

    It takes up to three times as long as a copy. The interpreter is free during it.

    Args:
        fd: the file.
        start: a multiple of `HUGE_BYTES`.
        size: its length. What is behind the last whole huge page is left as it is.
    """
    if size < HUGE_BYTES:
        return
    with contextlib.suppress(OSError):
        mapping = Mapping(fd, start, size, mmap.PROT_READ | mmap.PROT_WRITE)
        for at in range(0, size - HUGE_BYTES + 1, HUGE_BYTES):
            os.posix_fallocate(fd, start + at, 1)  # a range without pages stays
            mapping.collapse(at)


def view_bytes(buffer: "memoryview | mmap.mmap") -> Any:
    """View memory as a tensor of bytes. Nothing writes to one that cannot be written."""
    import torch

    if not len(buffer):
        return torch.empty(0, dtype=torch.uint8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.frombuffer(buffer, dtype=torch.uint8)


def _check(is_done: bool) -> None:
    if not is_done:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


_VECTOR: Final = ctypes.c_ssize_t, (ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_long)
_MMAP: Final = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long
_CALLS: Final = {
    "madvise": (ctypes.c_int, (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)),
    "mmap": (ctypes.c_void_p, _MMAP),
    "preadv": _VECTOR,
    "pwritev": _VECTOR,
}


@functools.cache
def find_call(name: str) -> Any:
    """Find a function of the system that Python has not, or not with all that it takes. It sets `ctypes.get_errno`."""
    found = getattr(ctypes.CDLL(None, use_errno=True), name)
    found.restype, found.argtypes = _CALLS[name]
    return found
