"""A sharded state for another number of ranks, through torch.distributed.checkpoint.

When it saves, each rank writes where its parts lie. No plan is needed. When other ranks load it, each of them reads
where the parts of all the old ranks lie, and then only the rows that it needs.
"""

import io
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner

from muster._shared.snapshot_file import WorkerFiles
from muster.snapshots.content import Content
from muster.snapshots.contents import Contents, give_up_damaged, record_loaded
from muster.snapshots.layout import Location
from muster.snapshots.plain import Sharding, array, decode


def load_sharded(contents: Contents, world_size: int, into: Any) -> None:
    """Fill the tensors of `into` from what `world_size` ranks have saved. No collective."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(into, storage_reader=Reader(contents, world_size), no_dist=True)


class Reader(dcp.StorageReader):  # type: ignore[misc]  # torch is not checked
    """Reads the snapshot that this round continues from, for any sharding of it."""

    def __init__(self, contents: Contents, world_size: int) -> None:
        """Read `contents`, which `world_size` ranks have saved."""
        self._contents = contents
        self._world_size = world_size
        self._chunks: dict[tuple[str, tuple[int, ...]], tuple[Content, Location]] = {}
        """Where each part of a tensor is, by the tensor's name and the part's offsets in it."""
        self._values: dict[str, Any] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin anew. There is one snapshot only, without an id."""

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Merge what the ranks have written about their parts.

        Plain values, and tensors that several ranks have whole, are those of the rank with this rank's number.
        """
        merged: dict[str, Any] = {}
        own = int(os.environ["RANK"]) % self._world_size
        for rank in (own, *(rank for rank in range(self._world_size) if rank != own)):
            content = self._contents.open(rank)
            for name, value, location, sharding in _list_parts(content):
                if location is None:
                    merged.setdefault(name, BytesStorageMetadata())
                    self._values.setdefault(name, value)
                    continue
                shape = location.shape if sharding is None else sharding.shape
                offsets = (0,) * len(shape) if sharding is None else sharding.offsets
                properties = TensorProperties(dtype=location.dtype)
                tensor = merged.setdefault(name, TensorStorageMetadata(properties, torch.Size(shape), []))
                if (name, offsets) not in self._chunks and (0 not in location.shape or not tensor.chunks):
                    self._chunks[name, offsets] = content, location
                    tensor.chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(location.shape)))
        return Metadata(state_dict_metadata=merged)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *_: Any, **__: Any) -> None:
        """Do nothing: nothing is left to set up."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Keep the plan."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Keep the plans."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> "torch.futures.Future[None]":
        """Copy what the plan asks for."""
        for item in plan.items:
            name, offsets = item.storage_index.fqn, item.storage_index.offset
            if item.type == LoadItemType.BYTE_IO:
                buffer = io.BytesIO()
                torch.save(self._values[name], buffer)
                buffer.seek(0)
                planner.load_bytes(item, buffer)
                continue
            content, location = self._chunks[name, tuple(offsets or ())]
            rows = (item.storage_offsets[0], item.lengths[0]) if location.shape else ()
            source = content.view(location, *rows)
            for dimension in range(1, len(location.shape)):
                source = source.narrow(dimension, item.storage_offsets[dimension], item.lengths[dimension])
            target = planner.resolve_tensor(item).detach()
            target.copy_(source)
            planner.commit_tensor(item, target)
        self._contents.close()
        done: torch.futures.Future[None] = torch.futures.Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:  # noqa: ARG003
        """Return False: no id names what is in memory."""
        return False


class RoundReader(Reader):
    """Reads for `muster.snapshots.reader`. It records what was loaded, and gives up what is damaged."""

    def __init__(self, files: WorkerFiles, step: int, note_loaded: Callable[[int], None]) -> None:
        """Read the base of the round.

        Raises:
            Damaged: it is not what was saved.
            OSError: no node that can be reached has it.
        """
        self.step = step
        self._files = files
        self._note_loaded = note_loaded
        contents = Contents(files)
        with give_up_damaged(files):
            super().__init__(contents, contents.open_any().head.world_size)

    def read_metadata(self, *args: Any, **more: Any) -> Metadata:
        """Do as `Reader`."""
        with give_up_damaged(self._files):
            return super().read_metadata(*args, **more)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> "torch.futures.Future[None]":
        """Do as `Reader`. Then this rank has loaded the step."""
        with give_up_damaged(self._files):
            done = super().read_data(plan, planner)
        record_loaded(self._files, self.step, self._contents)
        self._note_loaded(self.step)
        return done


def _list_parts(content: Content) -> Iterator[tuple[str, Any, Location | None, Sharding | None]]:
    """Yield name and value of what a rank has saved. For a tensor, yield its place and sharding as well.

    Names are those that torch.distributed.checkpoint gives.
    """
    parts: dict[int, tuple[Location, Sharding | None]] = {}
    alive: list[Any] = []

    def make_tensor(number: int) -> Any:
        location = content.layout.find(number)
        stand_in = torch.empty(location.shape, dtype=location.dtype, device="meta")
        alive.append(stand_in)
        parts[id(stand_in)] = location, None
        return stand_in

    def make_sharded(stand_in: Any, sharding: Sharding) -> Any:
        parts[id(stand_in)] = parts[id(stand_in)][0], sharding
        return stand_in

    def make_array(stand_in: Any, form: Any, shape: tuple[int, ...]) -> Any:
        return array(None if stand_in is None else content.view(parts[id(stand_in)][0]).clone(), form, shape)

    flat, _ = flatten_state_dict(decode(content.skeleton, make_tensor, make_sharded, make_array))
    for name, value in flat.items():
        yield name, value, *parts.get(id(value), (None, None))
