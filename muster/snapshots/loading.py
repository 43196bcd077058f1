"""Finds the snapshot that this round continues from, and builds a rank's state of it.

The agents have decided which generation that is: the base in the control file, the same for every rank of the round. A
rank whose number and whose number of ranks are what they were has it in its own memory. Otherwise the content of any
rank of the round that saved it can be read: on this node from its memory file, on another through the agent.
"""

import contextlib
import gc
import itertools
import operator
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from muster._shared.snapshot_file import WorkerFiles
from muster.snapshots.content import Content, Damaged
from muster.snapshots.contents import Contents, find_checkpoint, find_step, give_up_damaged, record_loaded, say_once
from muster.snapshots.layout import (
    ELSEWHERE,
    Layout,
    Location,
    Typed,
    Vector,
    find_pointers,
    is_lazy,
    list_pointers,
    make_copyable,
)
from muster.snapshots.plain import LayoutCache, Sharding, build_dict, decode, join_keys, split_keys

_AT_ONCE: Final = 256
"""The parts of this many tensors stay in the processor's cache from one look at them to the next."""


class OtherSharding(Exception):
    """A distributed tensor is sharded over the ranks in another way than when it was saved."""


def load_state(files: WorkerFiles, into: Any) -> tuple[int, Any] | None:
    """Build the state that this rank continues from. See `muster.snapshots.load`. One line says which it is."""
    step = find_step(files)
    if step is None:
        return None
    contents = Contents(files)
    try:
        with give_up_damaged(files), _without_collections():
            state = _build(contents, into)
    finally:
        contents.close()
    if state is _CANNOT:
        path, checkpoint_step = find_checkpoint()
        where = f"step {checkpoint_step} of {path}" if path else "the beginning"
        say_once(
            f"continues from {where}: the snapshot of step {step} is of another number of ranks, and neither"
            " replicated nor sharded"
        )
        return None
    record_loaded(files, step, contents)
    return step, state


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Suspend the garbage collector: thousands of new objects that stay would make it look at all others."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


_CANNOT = object()


def _build(contents: Contents, into: Any) -> Any:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    some = contents.open_any().head
    if some.is_replicated:
        content = contents.open_replicated(rank % some.world_size)
        return fill(content, find_keeper(contents, content), into)
    if some.world_size == world_size:
        content = contents.open(rank)
        with contextlib.suppress(OtherSharding):
            return fill(content, content, into)
    if not some.is_sharded:
        return _CANNOT
    if into is None:
        raise ValueError("load: a sharded state of another number of ranks needs into=, the state to copy it to")
    from muster.snapshots.sharded import load_sharded

    load_sharded(contents, some.world_size, into)
    return into


def find_keeper(contents: Contents, content: Content) -> Content:
    """Return the content with the tensors of a replicated state: on this node if one is there."""
    if content.head.keeper == content.head.global_rank:
        return content
    near = contents.open_any()
    return near if near.head.keeper == near.head.global_rank else contents.open(near.head.keeper)


def fill(content: Content, keeper: Content, into: Any) -> Any:
    """Build the state of a content, with tensors of `into` where it has them and new ones elsewhere.

    Args:
        content: of one rank.
        keeper: has the tensors that lie elsewhere.
        into: a state with the tensors to copy to, of the same shapes. None: all are new.

    Raises:
        Damaged, OSError: as `Content.view`.
        OtherSharding: distributed tensors of `into` are sharded in another way.
        ValueError: tensors of `into` have other shapes or types, or are not in the snapshot.
    """
    import torch

    layout = content.layout
    with torch.no_grad():
        targets = _Match(layout)
        if into is not None:
            targets.add(decode(content.skeleton, _Leaf, _ShardedLeaf, lambda *_: None, _Table), into, "state")
        sources = [content] if keeper is content else [content, keeper]
        done = [numbers for source in sources for numbers in _copy_runs(source, layout, targets)]
        copies: list[tuple[Any, Any]] = []
        units: dict[tuple[bool, int], Typed] = {}
        count = len(layout.starts)
        left = sorted(set(range(count)).difference(*done)) if sum(map(len, done)) < count else ()
        for number in left:
            is_own = layout.starts[number] != ELSEWHERE
            source = content if is_own else keeper
            location = layout.find(number) if is_own else _find_elsewhere(keeper, number, layout.find(number))
            target = targets.memory[number]
            if target is None:
                unit = is_own, location.unit_start
                if unit not in units or not location.unit_bytes:
                    units[unit] = Typed(source.read_unit(location))
                targets.results[number] = units[unit].view(location, location.start - location.unit_start)
                continue
            copy = make_copyable(target), make_copyable(source.view(location))
            if source.is_near and not is_lazy(target):
                copies.append(copy)
            else:
                copy[0].copy_(copy[1])
        if copies:
            torch._foreach_copy_(*(list(column) for column in zip(*copies, strict=True)))
    return decode(content.skeleton, targets.results.__getitem__, _give_whole, None, targets.build_table)


def _copy_runs(source: Content, own: Layout, targets: "_Match") -> Iterator[Sequence[int]]:
    """Copy small tensors in few calls where that can be done, and yield their numbers.

    Args:
        source: has them.
        own: the layout of the rank that loads. It is the source's own, or one whose tensors lie elsewhere.
        targets: where they go. It gets new tensors for those that have no target and are alone in their memory.
    """
    layout = source.layout
    is_own = layout is own
    if not source.is_near or not (is_own or (layout.shapes, layout.dtypes) == (own.shapes, own.dtypes)):
        return
    for run in layout.runs:
        if not is_own and any(start != ELSEWHERE for start in run.pick(own.starts)):
            continue
        if (pointers := find_pointers(run, run.pick(targets.memory), run.pick(targets.pointers))) is None:
            targets.make(run.numbers)
            pointers = find_pointers(run, run.pick(targets.memory))
        if pointers is not None:
            source.copy_run(Vector(run, pointers, targets))
            yield run.numbers


def _find_elsewhere(keeper: Content, number: int, own: Location) -> Location:
    layout = keeper.layout
    if number < len(layout.starts) and layout.starts[number] != ELSEWHERE:
        location = layout.find(number)
        if location[:2] == own[:2]:
            return location
    raise Damaged(
        "it lacks a tensor of this rank, because another rank kept the tensors of both: with replicated=True all ranks"
        " must save the same tensors"
    )


def _give_whole(local: Any, _: Sharding) -> Any:
    if hasattr(local, "device_mesh"):
        return local
    raise ValueError("load: a sharded state needs into=, the state to copy it to")


class _Leaf(NamedTuple):
    """Stands for a tensor."""

    number: int


class _ShardedLeaf(NamedTuple):
    """Stands for a distributed tensor."""

    local: _Leaf
    sharding: Sharding


class _Table(NamedTuple):
    """Stands for a dict of tensors."""

    first: int
    joined: str | tuple[Any, ...]
    """Its keys."""
    more: Any


class _Match:
    """Finds the tensors of `into` for the saved ones."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._known = LayoutCache()
        self.memory: list[Any] = [None] * len(layout.starts)
        """What to copy to, by the number of the saved tensor."""
        self.results: list[Any] = [None] * len(layout.starts)
        """The tensors that the script gets: the same, or distributed tensors with it."""
        self.pointers = [0] * len(layout.starts)
        """Where that is in the processor's memory, contiguous. 0: not known."""
        self._tables: dict[int, Mapping[Any, Any]] = {}
        """Dicts that are as they were saved, by the number of the first tensor."""

    def add(self, saved: Any, into: Any, location: str) -> None:
        """Find the tensors of one value.

        Raises:
            OtherSharding, ValueError: as `fill`.
        """
        if isinstance(saved, _Leaf | _ShardedLeaf):
            if hasattr(into, "data_ptr"):
                self._add_tensor(saved, into, location)
        elif isinstance(saved, _Table):
            if isinstance(into, Mapping) and not self._add_table(saved, into):
                keys = split_keys(saved.joined)
                self.add({key: _Leaf(number) for number, key in enumerate(keys, saved.first)}, into, location)
        elif isinstance(saved, Mapping) and isinstance(into, Mapping):
            for key, value in saved.items():
                if key in into:
                    self.add(value, into[key], f"{location}[{key!r}]")
            for key in into.keys() - saved.keys():
                if hasattr(into[key], "data_ptr"):
                    raise ValueError(f"load: into= has a tensor {location}[{key!r}], and the snapshot has none")
        elif isinstance(saved, list | tuple) and isinstance(into, list | tuple):
            for number, (value, target) in enumerate(zip(saved, into, strict=False)):
                self.add(value, target, f"{location}[{number}]")

    def make(self, numbers: Iterable[int]) -> None:
        """Make new tensors for those that have no target and are alone in their memory."""
        import torch

        layout = self._layout
        for number in numbers:
            if self.memory[number] is None and number not in layout.units:
                made = torch.empty(layout.shapes[number], dtype=layout.dtypes[number])
                self.memory[number] = self.results[number] = made

    def build_table(self, first: int, joined: str | tuple[Any, ...], more: Any) -> dict[Any, Any]:
        """Build a dict of tensors."""
        if first in self._tables:
            return build_dict(self._tables[first], more)
        return build_dict(zip(split_keys(joined), itertools.islice(self.results, first, None), strict=False), more)

    def _add_table(self, table: _Table, into: Mapping[Any, Any]) -> bool:
        """Add all tensors of a dict at once, if they are the saved ones and nothing else."""
        import torch

        tensors, numbers = list(into.values()), slice(table.first, table.first + len(into))
        if join_keys(into) != table.joined or set(map(type, tensors)) != {torch.Tensor}:
            return False
        pointers: list[int] = []
        for at in range(0, len(tensors), _AT_ONCE):
            some, same = tensors[at : at + _AT_ONCE], slice(table.first + at, table.first + at + _AT_ONCE)
            if not all(map(operator.eq, map(operator.attrgetter("shape"), some), self._layout.shapes[same])):
                return False
            if not all(map(operator.is_, map(operator.attrgetter("dtype"), some), self._layout.dtypes[same])):
                return False
            pointers += list_pointers(some)
        self.pointers[numbers] = pointers
        self.memory[numbers] = self.results[numbers] = tensors
        self._tables[table.first] = into
        return True

    def _add_tensor(self, saved: _Leaf | _ShardedLeaf, into: Any, location: str) -> None:
        local = into
        if isinstance(saved, _ShardedLeaf):
            if not hasattr(into, "device_mesh"):
                raise ValueError(f"load: {location} was saved as a distributed tensor, and into= has another")
            if self._known.describe(into) != saved.sharding:
                raise OtherSharding
            saved, local = saved.local, into.to_local()
        wanted = self._layout.dtypes[saved.number], self._layout.shapes[saved.number]
        found = local.dtype, tuple(local.shape)
        if found != wanted:
            raise ValueError(
                f"load: {location} is {wanted[0]} of {wanted[1]} in the snapshot, {found[0]} of {found[1]} in into="
            )
        self.memory[saved.number], self.results[saved.number] = local, into
