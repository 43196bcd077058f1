"""What is in a slot (a head, sums of blocks, the data of tensors, the layout, and the skeleton), and how it is read.

The data is verified as it is read: each block of 256 KiB has the sum of its 8-byte words, layout and skeleton have a
CRC. A sum costs a third of a copy, a CRC two to three times as much. The file is written by one worker and read by its
successor on the same node, or, copied by the agents, on another.

A page of 4 KiB costs a fault when it is mapped, and as much work again when the process ends. For three slots of 512 MB
that is more than a copy of one, between the end of a killed worker and the start of the next. Pages of 2 MiB do not
have that cost. The system gives them to a memory file on request (`MADV_COLLAPSE`, Linux 6.1), whatever
/sys/kernel/mm/transparent_hugepage/shmem_enabled says. If it does not, everything works with small pages.
"""

import contextlib
import ctypes
import functools
import itertools
import math
import mmap
import os
import struct
import sys
import warnings
import weakref
import zlib
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple

from muster._shared.snapshot_file import SLOT_SPACE, RemoteReader
from muster.snapshots.devices import Pin
from muster.snapshots.layout import MOST_IN_RUN, Location, Plan, Typed, Vector, make_contiguous, parse_layout, round_up

HUGE_BYTES: Final = 1 << 21
_MAP_PAGE: Final = mmap.PAGESIZE
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
        first = start // _MAP_PAGE * _MAP_PAGE
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


_MAGIC: Final = b"mustsnp1"
_HEAD: Final = struct.Struct("@8s10q")
BLOCK_BYTES: Final = 1 << 18
_PAGE: Final = 4096
_WINDOW_BYTES: Final = 16 * BLOCK_BYTES
"""How much of another node's memory is asked for at once, at least."""


class Damaged(RuntimeError):
    """What was read is not what was saved."""


class Head(NamedTuple):
    """The beginning of a slot: where the parts are, in bytes from there."""

    layout_bytes: int
    data_start: int
    data_bytes: int
    """A multiple of `BLOCK_BYTES`."""
    skeleton_bytes: int
    crc: int
    """The CRC of layout and skeleton."""
    global_rank: int
    world_size: int
    keeper: int
    """Global rank of the rank of the node that keeps the tensors."""
    is_replicated: int
    is_sharded: int

    @property
    def sums_start(self) -> int:
        """Where the sums are: one native 8-byte integer for each block of data."""
        return self.data_start - self.data_bytes // BLOCK_BYTES * 8

    @property
    def layout_start(self) -> int:
        """Where the layout is: behind the data."""
        return self.data_start + self.data_bytes

    @property
    def skeleton_start(self) -> int:
        """Where the skeleton is."""
        return self.layout_start + self.layout_bytes

    @property
    def end(self) -> int:
        """Length of the whole."""
        return self.skeleton_start + self.skeleton_bytes


class Origin(NamedTuple):
    """Whose state it is: the last fields of `Head`."""

    global_rank: int
    world_size: int
    keeper: int
    is_replicated: bool
    is_sharded: bool


class Area:
    """A slot, to write to it.

    The first time, the data is written through the file, which takes memory from the system and fills it at once.
    Through a mapping, each page would be emptied, mapped and then filled. `finish` maps it for the next time.
    """

    def __init__(self, fd: int, slot: int) -> None:
        """Remember where the slot is in a content file. Nothing is done yet."""
        self._fd = fd
        self._start = slot * SLOT_SPACE
        self.size = 0
        """How much of it is mapped."""
        self.bytes: Any = None
        """What is mapped, as a tensor of bytes."""
        self._memory: Any = None
        self._pin: Pin | None = None
        self._targets: tuple[Plan | None, list[Any]] = None, []
        self._written: Plan | None = None
        """The plan whose layout is in the slot."""

    def map(self, size: int) -> None:
        """Map at least `size` bytes. Memory is taken now, not at the first copy, and in huge pages if possible.

        Raises:
            OSError: there is not that much.
        """
        import torch

        if self._pin is not None:
            self._pin.release()
            self._pin = None
        size = round_up(size, 1 << 20)
        take_huge_pages(self._fd, self._start, size)
        os.posix_fallocate(self._fd, self._start, size)
        mapping = Mapping(self._fd, self._start, size, mmap.PROT_READ | mmap.PROT_WRITE)
        self._memory, self.bytes = mapping.memory, mapping.bytes
        words = self.bytes.view(torch.int64)
        words[:: 2 * _PAGE].sum()  # a read maps 16 written pages
        words[:: _PAGE // 8].bitwise_or_(0)  # promised ones need a write, which takes and empties them
        self.size, self._targets = size, (None, [])

    def copy(
        self, plan: Plan, tensors: Sequence[Any], end: int, start_copies: Callable[..., Callable[[], bool]]
    ) -> Callable[[], bool]:
        """Copy tensors.

        Args:
            plan: where they go.
            tensors: the plan's.
            end: how much memory the whole will take, about.
            start_copies: begins copies from devices, as `devices.DeviceCopies.start`.

        Returns:
            A function, to be called once before the slot is used, because copies from devices have only begun. It
                returns whether they are whole.

        Raises:
            OSError: there is not that much memory.
        """
        import torch

        if plan.on_devices and self.size < end:
            self.map(end)
        data_start = self._start + find_data(plan)[0]
        for vector in plan.list_vectors(tensors):
            transfer("pwritev", self._fd, data_start, vector)
        if self.size < end:
            write_buffers(self._fd, data_start, plan.list_buffers(tensors))
            return lambda: True
        targets, sources = self.find_targets(plan), plan.list_sources(tensors)
        if plan.on_devices:
            self._pin = self._pin or Pin(self.bytes)
            return start_copies(targets, sources)
        if sources:
            torch._foreach_copy_(targets, sources)  # a loop of copy_, in C++
        return lambda: True

    def find_targets(self, plan: Plan) -> list[Any]:
        """Return where tensors of a plan are copied to, kept for the next time. The slot is mapped."""
        if self._targets[0] is not plan:
            start, size = find_data(plan)
            self._targets = plan, plan.list_targets(self.bytes[start : start + size])
        return self._targets[1]

    def finish(self, plan: Plan, skeleton: bytes, origin: Origin, end: int) -> int:
        """Write sums, layout, skeleton and head, when the data is there.

        Args:
            plan: as `copy` got it.
            skeleton: the plain values.
            origin: whose they are.
            end: as `copy` got it.

        Returns:
            The length of the whole.

        Raises:
            OSError: there is not that much memory.
        """
        import torch

        start, size = find_data(plan)
        if self.size < end:  # without the interpreter, beside the script
            self.map(end)
        sums = self.bytes[start - size // BLOCK_BYTES * 8 : start].view(torch.int64)
        torch.sum(_view_blocks(self.bytes[start : start + size]), 1, out=sums)
        crc = zlib.crc32(skeleton, plan.layout_crc)
        head = Head(len(plan.written), start, size, len(skeleton), crc, *(int(fact) for fact in origin))
        if self.size < head.end:
            self.map(head.end)
        if self._written is not plan:
            self._memory[head.layout_start : head.skeleton_start] = plan.written
            self._written = plan
            self.find_targets(plan)
        self._memory[head.skeleton_start : head.end] = skeleton
        self._memory[: _HEAD.size] = _HEAD.pack(_MAGIC, *head)
        return head.end


def find_data(plan: Plan) -> tuple[int, int]:
    """Return where the data begins in a slot, and its length, a multiple of `BLOCK_BYTES`."""
    size = round_up(plan.data_bytes, BLOCK_BYTES)
    return round_up(_PAGE + size // BLOCK_BYTES * 8, _PAGE), size


def write_buffers(fd: int, at: int, buffers: Iterable[memoryview]) -> None:
    """Write one after the other to a file.

    Raises:
        OSError: there is no room.
    """
    waiting: list[memoryview] = []
    for buffer in itertools.chain(buffers, (None,)):
        if buffer is not None:
            waiting.append(buffer)
        while waiting and (buffer is None or len(waiting) == MOST_IN_RUN):
            written = os.pwritev(fd, waiting, at)
            at += written
            while waiting and written >= len(waiting[0]):
                written -= len(waiting.pop(0))
            if waiting:
                waiting[0] = waiting[0][written:]


def transfer(call: str, fd: int, data_start: int, vector: Vector) -> None:
    """Copy many small pieces of memory to a file (`pwritev`) or from it (`preadv`).

    That is quicker than to view and copy each tensor, and Python's own functions need an object for each piece.

    Raises:
        OSError: there is no room, or no such memory.
    """
    run = vector.run
    sizes = array("L", run.sizes)
    pairs = array("L", bytes(2 * len(run.sizes)))
    pairs[::2], pairs[1::2] = array("L", vector.pointers), sizes
    first, at, left = 0, data_start + run.start, sum(sizes)
    while left:
        done = find_call(call)(fd, pairs.buffer_info()[0] + first * 2 * pairs.itemsize, len(pairs) // 2 - first, at)
        if done <= 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()) if done else "the file is too short")
        at, left = at + done, left - done
        while left and done:  # continue where it ended
            step = min(done, pairs[2 * first + 1])
            done -= step
            pairs[2 * first] += step
            pairs[2 * first + 1] -= step
            first += not pairs[2 * first + 1]


class Content:
    """What one rank has saved, verified when it is read."""

    def __init__(self, fetch: Callable[[int, int], memoryview], file: tuple[int, int] | None = None) -> None:
        """Read head, layout and skeleton.

        Args:
            fetch: gives the bytes from one position to another.
            file: a content file of this node with the bytes, and where they begin: fetching costs nothing, and tensors
                share memory with the slot. None: they are on another node.

        Raises:
            Damaged: it is not what was saved.
            OSError: it cannot be read.
        """
        self._fetch = fetch
        self._file = file
        self.is_near = file is not None
        magic, *numbers = _HEAD.unpack(self._fetch(0, _HEAD.size))
        if magic != _MAGIC:
            raise Damaged("it is not a snapshot of this version of muster")
        self.head = head = Head(*numbers)
        layout = self._fetch(head.layout_start, head.skeleton_start)
        self.skeleton = self._fetch(head.skeleton_start, head.end)
        if zlib.crc32(self.skeleton, zlib.crc32(layout)) != head.crc:
            raise Damaged("the sum of its plain values is wrong")
        self.layout = parse_layout(layout)
        self._sums: Any = None
        self._window: Any = None
        self._ends = (0, -1)
        self._typed: Typed | None = None

    def read_unit(self, location: Location) -> Any:
        """Read the unit of a tensor, as a tensor of bytes that nothing else uses.

        Raises:
            Damaged: it is not what was saved.
            OSError: it cannot be read.
        """
        return self._read(location.unit_start, location.unit_start + location.unit_bytes).clone()

    def copy_run(self, vector: Vector) -> None:
        """Copy a run of what is near to memory.

        Raises:
            Damaged: it is not what was saved.
            OSError: it cannot be read.
        """
        self._read(0, self.head.data_bytes)
        fd, start = self._file or (-1, 0)
        transfer("preadv", fd, start + self.head.data_start, vector)

    def view(self, location: Location, first: int = 0, rows: int | None = None) -> Any:
        """View a tensor to copy it at once, or `rows` of it from `first` on.

        Raises:
            Damaged: it is not what was saved.
            OSError: it cannot be read.
        """
        if self.is_near:
            if self._typed is None:
                self._typed = Typed(self._read(0, self.head.data_bytes))
            whole = self._typed.view(location)
            return whole if rows is None else whole[first : first + rows]
        if rows is None or location.stride != make_contiguous(location.shape):
            whole = Typed(self.read_unit(location)).view(location, location.start - location.unit_start)
            return whole if rows is None else whole[first : first + rows]
        row_bytes = location.dtype.itemsize * math.prod(location.shape[1:])
        start = location.start + first * row_bytes
        data = self._read(start, start + rows * row_bytes).clone()
        return data.view(location.dtype).view(rows, *location.shape[1:])

    def _read(self, start: int, end: int) -> Any:
        """Read bytes of the data, verified, as a view."""
        first, last = self._ends
        if not first <= start <= end <= last:
            first = start // BLOCK_BYTES * BLOCK_BYTES
            # Near data: one call for all is faster.
            last = max(round_up(end, BLOCK_BYTES), first + _WINDOW_BYTES)
            first, last = (0, self.head.data_bytes) if self.is_near else (first, min(last, self.head.data_bytes))
            self._window = self._fetch_tensor(self.head.data_start + first, self.head.data_start + last)
            self._verify(self._window, first // BLOCK_BYTES)
            self._ends = first, last
        return self._window[start - first : end - first]

    def _verify(self, data: Any, first_block: int) -> None:
        import torch

        if self._sums is None:
            self._sums = self._fetch_tensor(self.head.sums_start, self.head.data_start).view(torch.int64)
        sums = _view_blocks(data).sum(1)
        wrong = torch.nonzero(sums != self._sums[first_block : first_block + len(sums)])
        if len(wrong):
            raise Damaged(f"the sum of block {first_block + int(wrong[0])} is wrong")

    def _fetch_tensor(self, start: int, end: int) -> Any:
        return view_bytes(self._fetch(start, end))


def open_near(fd: int, slot: int, size: int) -> Content:
    """Read a slot of a content file of this node.

    Args:
        fd: the file. It may be closed afterwards.
        slot: number of the slot.
        size: length of what is in it.
    """
    mapping = Mapping(fd, slot * SLOT_SPACE, max(size, 1), mmap.PROT_READ)

    def fetch(start: int, end: int) -> memoryview:
        if not 0 <= start <= end <= size:
            raise Damaged(f"it has {size} bytes: there is no byte {end}")
        if end - start > BLOCK_BYTES:
            mapping.populate(start, end)
        return mapping.memory[start:end]

    file = os.dup(fd)
    content = Content(fetch, (file, slot * SLOT_SPACE))
    weakref.finalize(content, os.close, file)
    return content


def open_far(reader: RemoteReader, global_rank: int) -> Content:
    """Read what another node keeps of a rank, through the agent."""
    size = reader.find_bytes(global_rank)

    def fetch(start: int, end: int) -> memoryview:
        if not 0 <= start <= end <= size:
            raise Damaged(f"it has {size} bytes: there is no byte {end}")
        buffer = memoryview(bytearray(end - start))
        if buffer:
            reader.read(global_rank, start, buffer)
        return buffer

    return Content(fetch)


def _view_blocks(data: Any) -> Any:
    import torch

    return data.view(torch.int64).view(-1, BLOCK_BYTES // 8)


def say(line: str) -> None:
    """Print one line about snapshots, where standard error is."""
    with contextlib.suppress(OSError, ValueError):
        if sys.stderr is not None:
            sys.stderr.write(f"muster.snapshots: {line}\n")
