"""Where each tensor of a state lies in the data of a slot, and what to copy there.

What torch calls one storage is copied once: tensors that overlap become one *unit*, and are views of one piece of
memory again after `load`. A tensor alone is a unit of its own, with its strides if it has no holes. Units begin at
multiples of 64 bytes.

With `replicated`, tensors are kept by one rank of the node. RNG states, NumPy arrays and positions are tensors of
integers in the memory of the processor. They count as plain values, which each rank keeps itself.
"""

import ctypes
import functools
import itertools
import math
import operator
import zlib
from array import array
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

from muster.snapshots.plain import dtype, dump_simple, load_simple

ALIGNMENT: Final = 64
ELSEWHERE: Final = -1
_SMALL_BYTES: Final = 2048
"""Up to here, a view of the memory and a copy take longer than a place in a call that copies many."""
MOST_IN_RUN: Final = 1024
"""How many pieces the system takes in one call."""


class Location(NamedTuple):
    """Where a tensor is."""

    dtype: Any
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    start: int
    """Byte in the data. `ELSEWHERE`: another rank of the node keeps it."""
    unit_start: int
    unit_bytes: int


class Run(NamedTuple):
    """Small contiguous tensors of one type that lie one behind the other without gaps."""

    numbers: Sequence[int]
    start: int
    sizes: bytes
    """The size of each in bytes, as native unsigned longs."""

    def pick(self, column: Any) -> Any:
        """Give what a list has for these tensors."""
        if isinstance(self.numbers, range):
            return column[self.numbers.start : self.numbers.stop]
        return list(map(column.__getitem__, self.numbers))


class Layout(NamedTuple):
    """Where the tensors of a state are. In columns, by their numbers: there may be thousands."""

    dtypes: list[Any]
    shapes: list[tuple[int, ...]]
    starts: Sequence[int]
    """As `Place.start`."""
    strides: dict[int, tuple[int, ...]]
    """The strides of tensors that are not contiguous."""
    units: dict[int, tuple[int, int]]
    """Start and bytes of each unit that several tensors share."""
    runs: list[Run]

    def find(self, number: int) -> Location:
        """Return where one tensor is."""
        dtype, shape, start = self.dtypes[number], self.shapes[number], self.starts[number]
        unit = self.units.get(number) or (start, dtype.itemsize * math.prod(shape))
        return Location(dtype, shape, self.strides.get(number) or make_contiguous(shape), start, *unit)

    def write(self) -> bytes:
        """Write it for `parse_layout`, in a form that is read in few calls."""
        kinds = list(set(self.dtypes))
        names = [str(kind).removeprefix("torch.") for kind in kinds]
        codes = bytes(map({kind: code for code, kind in enumerate(kinds)}.__getitem__, self.dtypes))
        known: dict[tuple[int, ...], tuple[int, ...]] = {}
        shapes = list(map(known.setdefault, self.shapes, self.shapes))  # pickle writes each once
        runs = list(map(tuple, self.runs))
        return dump_simple((names, codes, shapes, array("q", self.starts).tobytes(), self.strides, self.units, runs))


def parse_layout(data: bytes | memoryview) -> Layout:
    """Read what `Layout.write` wrote."""
    names, codes, shapes, starts, strides, units, runs = load_simple(data)
    dtypes = list(map(list(map(dtype, names)).__getitem__, codes))
    return Layout(dtypes, shapes, memoryview(starts).cast("q"), strides, units, [Run(*run) for run in runs])


class _Group(NamedTuple):
    """Tensors that overlap in memory."""

    numbers: tuple[int, ...]
    facts: tuple[tuple[object, ...], ...]
    """For each, how far it is behind the first one, its strides, its place in the storage, and whether it is lazy."""


class Span(NamedTuple):
    """The bytes of a storage that tensors share which are not the same."""

    number: int
    """The number of one of them."""
    first: int
    """Byte in the storage."""
    start: int
    """Byte in the data."""
    bytes: int


class Vector(NamedTuple):
    """Where the tensors of a run are in memory."""

    run: Run
    pointers: Sequence[int]
    owners: object
    """What the memory belongs to."""


class Plan:
    """How the tensors of one state are copied. It is made again when their shapes, types or sharing change.

    What `save` needs is made at once, and `layout`, which the reader needs, when it is asked for.
    """

    def __init__(self, tensors: Sequence[Any], pointers: list[int], *, keeps_tensors: bool) -> None:
        """Plan for these tensors.

        Args:
            tensors: as `plain.encode` gives them.
            pointers: those of the tensors, also from there.
            keeps_tensors: whether the tensors are kept here. False: all but plain values lie elsewhere.
        """
        self.keeps_tensors = keeps_tensors
        self._facts = list(map(_get_shape, tensors)), list(map(_get_dtype, tensors))
        self._pointers = pointers
        self._are_cpu = _list_are_cpu(tensors)
        self._groups = _find_groups(tensors, self._pointers)
        self._sizes = list(map(_get_nbytes, tensors))
        self.singles: list[tuple[int, Location]] = []
        self.spans: list[Span] = []
        self._runs: list[Run] = []
        self._aliases: dict[int, list[int]] = {}
        """By the number of the first one: those that are the same tensor."""
        self._in_spans: dict[int, tuple[Span, Location]] = {}
        self._end = 0
        alone = range(len(tensors)) if not self._groups else self._place_groups(tensors)
        if not keeps_tensors:
            alone = [number for number in alone if is_plain(tensors[number])]
        small = self._place_large(tensors, alone)
        for kind in dict.fromkeys(map(self._facts[1].__getitem__, small)):
            numbers = [number for number in small if self._facts[1][number] is kind]
            for at in range(0, len(numbers), MOST_IN_RUN):
                run = numbers[at : at + MOST_IN_RUN]
                sizes = array("L", map(self._sizes.__getitem__, run))
                whole = range(run[0], run[-1] + 1)
                self._runs.append(Run(whole if len(whole) == len(run) else run, self._end, sizes.tobytes()))
                self._end += round_up(sum(sizes), ALIGNMENT)
        self.on_devices = not all(
            self._are_cpu[n] for n in (*(n for n, _ in self.singles), *(s[0] for s in self.spans))
        )
        self.data_bytes = self._end

    def _place_groups(self, tensors: Sequence[Any]) -> list[int]:
        """Decide where tensors that overlap are. Return what is left, with one of each group of equal ones."""
        alone = set(range(len(tensors)))
        for group in self._groups:
            first, *others = group.numbers
            if not (self.keeps_tensors or is_plain(tensors[first])):
                continue
            if all(_is_same(tensors[first], tensors[number]) for number in others):
                self._aliases[first] = others
                alone.difference_update(others)
            else:
                self._place_span(tensors, group.numbers)
                alone.difference_update(group.numbers)
        return sorted(alone)

    def _place_span(self, tensors: Sequence[Any], numbers: Sequence[int]) -> None:
        ends = [_find_ends(tensors[number]) for number in numbers]
        first = min(start for start, _ in ends) // ALIGNMENT * ALIGNMENT
        span = Span(numbers[0], first, self._end, max(end for _, end in ends) - first)
        self.spans.append(span)
        for number, (start, _) in zip(numbers, ends, strict=True):
            one = tensors[number]
            location = Location(one.dtype, tuple(one.shape), tuple(one.stride()), span.start + start - first, *span[2:])
            self._in_spans[number] = span, location
        self._end += round_up(span.bytes, ALIGNMENT)

    def _place_large(self, tensors: Sequence[Any], numbers: Sequence[int]) -> list[int]:
        """Decide where each of these tensors is that is copied by itself. The others are small."""
        sizes, cpu = self._sizes, self._are_cpu
        small = [n for n in numbers if 0 < sizes[n] <= _SMALL_BYTES and cpu[n]]
        left = set(small)
        for number in (n for n in numbers if sizes[n] and n not in left):
            one, start, size = tensors[number], self._end, sizes[number]
            location = Location(one.dtype, tuple(one.shape), _choose_stride(one), start, start, size)
            self.singles.append((number, location))
            self._end += round_up(size, ALIGNMENT)
        return small

    def fits(self, tensors: Sequence[Any], pointers: list[int], *, keeps_tensors: bool) -> bool:
        """Return whether the plan holds for these tensors as well. Strides matter only where tensors share memory."""
        if keeps_tensors is not self.keeps_tensors or not self._has_facts(tensors):
            return False
        if pointers == self._pointers:
            return self._groups == [_describe_group(tensors, pointers, group.numbers) for group in self._groups]
        if _list_are_cpu(tensors) != self._are_cpu or _find_groups(tensors, pointers) != self._groups:
            return False
        self._pointers = pointers
        return True

    def _has_facts(self, tensors: Sequence[Any]) -> bool:
        """Return whether shapes and types are the plan's.

        It makes no list of shapes, which would wake the garbage collector.
        """
        shapes, dtypes = self._facts
        return (
            len(tensors) == len(shapes)
            and all(map(operator.eq, map(_get_shape, tensors), shapes))
            and all(map(operator.is_, map(_get_dtype, tensors), dtypes))
        )

    @functools.cached_property
    def layout(self) -> Layout:
        """Where all tensors are."""
        sizes, (shapes, dtypes) = self._sizes, self._facts
        starts = [ELSEWHERE if size else self._end for size in sizes]
        strides: dict[int, tuple[int, ...]] = {}
        units: dict[int, tuple[int, int]] = {}
        for number, location in (
            *self.singles,
            *((number, location) for number, (_, location) in self._in_spans.items()),
        ):
            starts[number] = location.start
            if location.stride != make_contiguous(location.shape):
                strides[number] = location.stride
        for run in self._runs:
            ends = itertools.accumulate(run.pick(sizes), initial=run.start)
            for number, at in zip(run.numbers, ends, strict=False):
                starts[number] = at
        for number, (span, _) in self._in_spans.items():
            units[number] = span.start, round_up(span.bytes, ALIGNMENT)
        for first, others in self._aliases.items():
            units[first] = starts[first], sizes[first]
            for number in others:
                starts[number], units[number] = starts[first], units[first]
                if first in strides:
                    strides[number] = strides[first]
        return Layout(list(dtypes), list(map(tuple, shapes)), starts, strides, units, self._runs)

    @functools.cached_property
    def written(self) -> bytes:
        """The layout, written."""
        return self.layout.write()

    @functools.cached_property
    def layout_crc(self) -> int:
        """The CRC of what is written."""
        return zlib.crc32(self.written)

    def list_sources(self, tensors: Sequence[Any]) -> list[Any]:
        """Return what is copied beside the vectors, in the order of `list_targets`."""
        sources = [make_copyable(tensors[number]) for number, _ in self.singles]
        return sources + [_view_storage(tensors[span.number], span.first, span.bytes) for span in self.spans]

    def list_targets(self, data: Any) -> list[Any]:
        """Return the views of `data`, a tensor of bytes with the data of a slot."""
        typed = Typed(data)
        targets = [make_copyable(typed.view(location)) for _, location in self.singles]
        return targets + [data[span.start : span.start + span.bytes] for span in self.spans]

    def list_buffers(self, tensors: Sequence[Any]) -> Iterator[memoryview]:
        """Return the same in the order of the data, without holes."""
        end = 0
        pieces = [(location.start, _put_in_order(tensors[number], location)) for number, location in self.singles]
        pieces += [(span.start, _view_storage(tensors[span.number], span.first, span.bytes)) for span in self.spans]
        for start, one in sorted(pieces, key=operator.itemgetter(0)):
            if start > end:
                yield memoryview(bytes(start - end))
            end = start + one.nbytes
            yield view_memory(one)

    def list_vectors(self, tensors: Sequence[Any]) -> Iterator[Vector]:
        """Return the small tensors."""
        for run in self._runs:
            owners = run.pick(tensors)
            if (pointers := find_pointers(run, owners)) is None:
                locations = (Location(one.dtype, one.shape, make_contiguous(one.shape), 0, 0, 0) for one in owners)
                owners = [_put_in_order(one, location) for one, location in zip(owners, locations, strict=True)]
                pointers = [one.data_ptr() for one in owners]
            yield Vector(run, pointers, owners)


class Typed:
    """Views of bytes as tensors."""

    def __init__(self, data: Any) -> None:
        """View `data`, a tensor of bytes whose memory begins at a multiple of 16."""
        self.data = data
        self._by_dtype: dict[Any, tuple[Any, int]] = {}

    def view(self, location: Location, start: int | None = None) -> Any:
        """View the tensor that begins at `start`, else where its place says."""
        known = self._by_dtype.get(location.dtype)
        if known is None:
            whole = self.data.view(location.dtype)
            known = self._by_dtype[location.dtype] = whole, whole.storage_offset()
        whole, origin = known
        offset = origin + (location.start if start is None else start) // location.dtype.itemsize
        return whole.as_strided(location.shape, location.stride, offset)


def is_plain(tensor: Any) -> bool:
    """Return whether a tensor has integers in the processor's memory: RNG states, NumPy arrays and positions have."""
    return bool(tensor.is_cpu and not tensor.dtype.is_floating_point and not tensor.dtype.is_complex)


def find_pointers(run: Run, tensors: Sequence[Any], known: Sequence[int] = (0,)) -> Sequence[int] | None:
    """Return where the tensors of a run are in the processor's memory.

    Return None if one is not there, is not contiguous, or has other bits than one reads.

    What is negative when it is read is the imaginary part of a conjugate, every second number of its memory: only one
    number of it is contiguous.

    Args:
        run: the run.
        tensors: its tensors.
        known: as `list_pointers` gave them. Where one is 0, they are looked for.
    """
    kind = _get_type()
    if 0 in known:
        if not set(map(type, tensors)) <= _list_types():
            return None
        known = list_pointers(tensors)
    if 0 in known or (tensors[0].is_complex() and any(map(kind.is_conj, tensors))):
        return None
    if min(array("L", run.sizes)) == tensors[0].element_size() and any(map(kind.is_neg, tensors)):
        return None
    return known


def list_pointers(tensors: Sequence[Any]) -> list[int]:
    """Return where tensors of torch's own type are in the processor's memory.

    Return 0 for all of them if one is not there, or is not contiguous.
    """
    kind = _get_type()
    if all(map(_is_cpu, tensors)) and all(map(kind.is_contiguous, tensors)):
        return list(map(kind.data_ptr, tensors))
    return [0] * len(tensors)


def view_memory(tensor: Any) -> memoryview:
    """View the bytes of a tensor on the processor whose elements lie without holes."""
    memory = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    memory.owner = tensor  # it lives as long as the view
    return memoryview(memory).cast("B")


def _put_in_order(tensor: Any, location: Location) -> Any:
    """Return the tensor, or a copy whose elements lie as its place says."""
    import torch

    if tensor.stride() == location.stride and not is_lazy(tensor):
        return tensor
    copy = torch.empty_strided(location.shape, location.stride, dtype=location.dtype)
    make_copyable(copy).copy_(make_copyable(tensor))
    return copy


def make_copyable(tensor: Any) -> Any:
    """View a tensor of a type that torch stores and cannot copy, such as float4, as bytes."""
    import torch

    return tensor if _can_copy(tensor.dtype) else tensor.view(torch.uint8)


_get_dtype = operator.attrgetter("dtype")
_get_nbytes = operator.attrgetter("nbytes")
_get_shape = operator.attrgetter("shape")
_is_cpu = operator.attrgetter("is_cpu")


@functools.cache
def _can_copy(dtype: Any) -> bool:
    import torch

    one = torch.empty(1, dtype=dtype)
    try:
        torch.empty(1, dtype=dtype).copy_(one)
    except (RuntimeError, NotImplementedError):
        return False
    return True


def make_contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    return tuple(math.prod(shape[n + 1 :]) for n in range(len(shape)))


def _list_are_cpu(tensors: Sequence[Any]) -> list[bool]:
    return list(map(_is_cpu, tensors))


def _get_type() -> Any:
    import torch

    return torch.Tensor


@functools.cache
def _list_types() -> frozenset[object]:
    import torch

    return frozenset({torch.Tensor, torch.nn.Parameter})


def _find_groups(tensors: Sequence[Any], pointers: Sequence[int]) -> list[_Group]:
    """Find which tensors overlap in memory."""
    order = sorted(range(len(tensors)), key=pointers.__getitem__)
    starts = [pointers[number] for number in order]
    if all(map(_get_type().is_contiguous, tensors)):
        sizes = list(map(_get_nbytes, tensors))
        ends = [pointers[number] + sizes[number] for number in order]
        if all(map(operator.le, ends, starts[1:])):
            return []
    groups: list[list[int]] = []
    end = -1
    for number, start in zip(order, starts, strict=True):
        one = tensors[number]
        if not one.numel() or is_lazy(one):  # its memory has other bits
            continue
        size = one.nbytes if one.is_contiguous() else _find_ends(one)[1] - _find_ends(one)[0]
        if start < end and _share_storage(tensors[groups[-1][0]], one):
            groups[-1].append(number)
            end = max(end, start + size)
        else:
            groups.append([number])
            end = start + size
    return [_describe_group(tensors, pointers, sorted(group)) for group in sorted(groups) if len(group) > 1]


def _describe_group(tensors: Sequence[Any], pointers: Sequence[int], numbers: Sequence[int]) -> _Group:
    base = pointers[numbers[0]]
    each = (
        (pointers[n] - base, tensors[n].stride(), tensors[n].storage_offset(), is_lazy(tensors[n])) for n in numbers
    )
    return _Group(tuple(numbers), tuple(each))


def is_lazy(tensor: Any) -> bool:
    """Return whether the memory has other bits than one reads: `copy_` resolves it."""
    return bool(tensor.is_conj() or tensor.is_neg())


def _share_storage(one: Any, other: Any) -> bool:
    found = [(tensor.untyped_storage().data_ptr(), tensor.device) for tensor in (one, other)]
    return found[0] == found[1]


def _find_ends(tensor: Any) -> tuple[int, int]:
    """Return the first byte and the end of a tensor in its storage."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    size = tensor.element_size()
    start = tensor.storage_offset() * size
    return start, start + (last + 1) * size


def _is_same(one: Any, other: Any) -> bool:
    return (
        all(getattr(one, name)() == getattr(other, name)() for name in ("data_ptr", "size", "stride"))
        and one.dtype == other.dtype
    )


def _choose_stride(tensor: Any) -> tuple[int, ...]:
    """Return the tensor's own strides if its elements lie without holes, in whatever order.

    Otherwise return those of a contiguous tensor.
    """
    shape, stride = tuple(tensor.shape), tuple(tensor.stride())
    if tensor.is_contiguous():
        return stride
    expected = 1
    for step, size in sorted((step, size) for step, size in zip(stride, shape, strict=True) if size != 1):
        if step != expected:
            return make_contiguous(shape)
        expected *= size
    return stride


def _view_storage(tensor: Any, start: int, size: int) -> Any:
    import torch

    empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return empty.set_(tensor.untyped_storage(), start, (size,), (1,))


def round_up(number: int, multiple: int) -> int:
    """Return the next multiple."""
    return -(-number // multiple) * multiple
