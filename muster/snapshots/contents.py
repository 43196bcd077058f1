"""What the ranks of the job have saved of the generation that this round continues from, wherever it is.

States of this node are read from its memory files, those of others through the agent.
"""

import contextlib
import os
from collections.abc import Iterator
from typing import Final

from muster._shared.contract import Env
from muster._shared.layouts import SnapshotBlock as Block
from muster._shared.snapshot_file import NotKeptError, RemoteReader, WorkerFiles
from muster.snapshots.content import Content, Damaged, open_far, open_near, say

_MOST_LOST: Final = 1024
"""How many ranks, whose states may have been lost with their nodes, are asked for one after the other."""


class Contents:
    """What the ranks saved of the base of this round. Close it."""

    def __init__(self, files: WorkerFiles) -> None:
        """Remember where this node's memory is. Nothing is read yet."""
        self._files = files
        self._reader: RemoteReader | None = None
        self._opened: dict[int, Content] = {}
        """What is mapped, by the rank that has saved it. It stays so until `close`."""
        self.is_near = True
        """Nothing was read from another node."""

    def open(self, global_rank: int) -> Content:
        """Open what a rank has saved, as it was numbered then.

        Raises:
            Damaged: it is not what was saved. The slot is emptied if it is this rank's own.
            NotKeptError: no node has it.
            OSError: no node that can be reached has it.
        """
        if global_rank in self._opened:
            return self._opened[global_rank]
        control = self._files.control
        own = self._files.local_rank
        for local_rank in (own, *(rank for rank in range(self._files.ranks) if rank != own)):
            slot = control.find_slot(local_rank, control.base)
            if slot is not None and (found := control.read_slots(local_rank)[slot]).global_rank == global_rank:
                fd = self._files.open_content(local_rank)
                try:
                    return self._opened.setdefault(global_rank, open_near(fd, slot, found.bytes))
                finally:
                    os.close(fd)
        self.is_near = False
        if self._reader is None:
            self._reader = RemoteReader(control)
        return open_far(self._reader, global_rank)

    def open_any(self) -> Content:
        """Open what some rank has saved: on this node if possible, or else the lowest rank's that a node has.

        Raises:
            Damaged, OSError: as `open`.
        """
        control = self._files.control
        for local_rank in (self._files.local_rank, *range(self._files.ranks)):
            slot = control.find_slot(local_rank, control.base)
            if slot is not None:
                return self.open(control.read_slots(local_rank)[slot].global_rank)
        for rank in range(_MOST_LOST):
            with contextlib.suppress(NotKeptError):
                return self.open(rank)
        return self.open(_MOST_LOST)

    def open_replicated(self, rank: int) -> Content:
        """Open what a rank, as it was numbered then, has saved.

        If that was lost with its node, open what any other rank has.

        Raises:
            Damaged, OSError: as `open`.
        """
        try:
            return self.open(rank)
        except NotKeptError:
            return self.open_any()

    def close(self) -> None:
        """End the connection to the agent, if there is one, and forget what is open."""
        self._opened.clear()
        if self._reader is not None:
            self._reader.close()


def find_step(files: WorkerFiles) -> int | None:
    """Return the step that this rank continues from memory. None: there is none, or a checkpoint is of a later one."""
    base, (path, checkpoint_step) = files.control.base, find_checkpoint()
    if base is not None and path and checkpoint_step > base[1]:
        say_once(f"continues from step {checkpoint_step} of {path}: the snapshot is of step {base[1]}")
        return None
    return None if base is None else base[1]


def record_loaded(files: WorkerFiles, step: int, contents: Contents) -> None:
    """Tell the agent that this rank has loaded the step, and the user from where."""
    files.control.write_block(files.local_rank, Block.LOADED, 1 + step)
    say_once(f"continues from step {step}, from {'memory' if contents.is_near else 'the memory of another node'}")


@contextlib.contextmanager
def give_up_damaged(files: WorkerFiles) -> Iterator[None]:
    """Empty this rank's slot of the base if it is damaged: the next attempt does not find it.

    Raises:
        Damaged: names the step.
    """
    try:
        yield
    except Damaged as damaged:
        base = files.control.base
        slot = files.control.find_slot(files.local_rank, base)
        if slot is not None:
            files.control.empty_slot(files.local_rank, slot)
        step = None if base is None else base[1]
        raise Damaged(f"load: the snapshot of step {step} is damaged ({damaged}) and was discarded") from None


def find_checkpoint() -> tuple[str | None, int]:
    """Return the path and step of the last checkpoint that all ranks have reported."""
    return os.environ.get(Env.RESUME_PATH), int(os.environ.get(Env.RESUME_STEP) or -1)


def say_once(line: str) -> None:
    """Print a line of which one for the whole job is enough."""
    if os.environ.get("RANK") == "0":
        say(line)
