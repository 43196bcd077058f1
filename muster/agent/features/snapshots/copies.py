"""The copies of another node's snapshots that this node keeps: the last complete one, and one that is being received.

Marked methods run in a thread. All others, and all that decides what stays, run on the loop. The lock prevents a copy
that a thread reads or writes from being closed.
"""

import os
import threading
from collections.abc import Callable

from muster._shared.records import replace
from muster._shared.snapshot_file import SLOT_SPACE
from muster.agent.features.snapshots.memory import Extent, Key, Part
from muster.agent.features.snapshots.messages import Generation, Holding
from muster.agent.features.snapshots.transfer import TransferError, check_end, read_counts, receive_extents
from muster.agent.rendezvous.interface import Stream
from muster.agent.workers.status_page import create_memory_file


def describe(part: Part) -> dict[str, object]:
    """Return what the receiver of a part must know."""
    generation, holding = part.holding.generation, part.holding
    return {
        "generation": [generation.lineage, generation.step, generation.size, int(generation.is_replicated)],
        "from": [holding.group_rank, holding.first_rank, holding.nproc, part.world_size],
        "bytes": [extent.length for extent in part.extents],
    }


def read_description(message: dict[str, object]) -> tuple[Holding, int, list[int]]:
    """Read the result of `describe`: the holding, the number of ranks, and the lengths.

    Raises:
        TransferError: it is something else.
    """
    generation_words = message.get("generation")
    if not isinstance(generation_words, list) or not all(type(each) is int for each in generation_words):
        raise TransferError("'generation' is not what it must be")
    lineage, step, size, is_replicated = (*generation_words, 0, 0, 0, 0)[:4]
    group_rank, first_rank, nproc, world_size = read_counts(message, "from", 4)
    lengths = read_counts(message, "bytes", nproc)
    if max(lengths) > SLOT_SPACE:
        raise TransferError("a state is larger than a slot")
    generation = Generation(lineage=lineage, step=step, size=size, is_replicated=bool(is_replicated))
    holding = Holding(generation=generation, group_rank=group_rank, first_rank=first_rank, nproc=nproc)
    return holding, world_size, lengths


class Copies:
    """The copies that one node keeps. Close it."""

    def __init__(self, find_limit: Callable[[int], int | None]) -> None:
        """Keep none yet.

        Args:
            find_limit: returns what a state of one rank may take, given what the copies here take; None means no limit.
        """
        self._find_limit = find_limit
        self._lock = threading.Lock()
        self._parts: list[Part] = []
        """Complete copies, the newest last."""
        self._busy = False

    def list_holdings(self) -> tuple[Holding, ...]:
        """Return the complete copies."""
        return tuple(replace(part.holding, is_copy=True) for part in self._parts)

    def measure(self) -> int:
        """Return the bytes that the complete copies take."""
        return sum(extent.length for part in self._parts for extent in part.extents)

    def find(self, key: Key, group_rank: int | None = None, rank: int | None = None) -> Part | None:
        """Return the copy of a generation that a node, or the node of a rank, has saved."""
        for part in self._parts:
            first = part.holding.first_rank
            is_ranks = rank is None or first <= rank < first + part.holding.nproc
            if part.key == key and group_rank in (None, part.holding.group_rank) and is_ranks:
                return part
        return None

    def open(self, key: Key, group_rank: int | None = None, rank: int | None = None) -> Part | None:
        """Find a copy as `find` does, with a separate descriptor for a thread: the copy may go while it reads."""
        with self._lock:
            part = self.find(key, group_rank, rank)
            return None if part is None else _open_again(part)

    def drop(self, keeps: Callable[[Key], bool]) -> None:
        """Drop the copies of generations that are not kept."""
        with self._lock:
            kept = [part for part in self._parts if keeps(part.key)]
            dropped = [part for part in self._parts if part not in kept]
            self._parts = kept
        for part in dropped:
            os.close(part.extents[0].fd)

    def receive(self, stream: Stream, message: dict[str, object]) -> None:
        """Receive a part that a neighbour offers, and keep it beside the last one. Runs in a thread.

        Raises:
            OSError: the connection broke, or memory files are not available.
            ProtocolError: the stream has something else.
            TransferError: the part was refused, or did not arrive completely.
        """
        holding, world_size, lengths = read_description(message)
        with self._lock:
            if self._busy:
                raise TransferError("this node is receiving another copy")
            self._busy = True
        is_new = self.find(holding.generation.key, holding.group_rank) is None
        try:
            if is_new:
                self._receive_new(stream, Part(holding, world_size, []), lengths, message.get("before"))
        finally:
            self._busy = False
        stream.send({"ok": True} if is_new else {"has": True})

    def _receive_new(self, stream: Stream, part: Part, lengths: list[int], before: object) -> None:
        own = [each for each in self._parts if each.holding.group_rank == part.holding.group_rank]
        limit = self._find_limit(self.measure())
        if limit is not None and max(lengths) > limit:
            raise TransferError(
                f"a state of {max(lengths)} bytes is more than the {limit} that --snapshot-memory allows"
            )
        with self._lock:
            stale = own[:-1]  # keep the last complete one
            self._parts = [each for each in self._parts if each not in stale]
            last = _open_again(own[-1]) if own and own[-1] in self._parts else None
        for each in stale:
            os.close(each.extents[0].fd)
        is_known = last is not None and [*last.key] == before and [e.length for e in last.extents] == lengths
        fd = -1
        try:
            fd = create_memory_file("muster-snapshot-copy", len(lengths) * SLOT_SPACE)
            extents = [Extent(fd, rank * SLOT_SPACE, length) for rank, length in enumerate(lengths)]
            stream.send({"go": True, "before": is_known})
            receive_extents(stream, extents, last.extents if last is not None and is_known else [])
            check_end(stream)
        except BaseException:
            if fd >= 0:
                os.close(fd)
            raise
        finally:
            if last is not None:
                os.close(last.extents[0].fd)
        with self._lock:
            # Keep parts of the generation: fewer nodes' ranks may read them, and only this node may have them.
            own_rank = part.holding.group_rank
            others = [each for each in self._parts if each.holding.group_rank != own_rank and each.key != part.key]
            self._parts = [each for each in self._parts if each not in others]
            self._parts.append(part._replace(extents=extents))
        for each in others:  # its node has a new neighbour
            os.close(each.extents[0].fd)

    def close(self) -> None:
        """Drop all copies. Idempotent."""
        self.drop(lambda _key: False)


def _open_again(part: Part) -> Part:
    fd = os.dup(part.extents[0].fd)
    return part._replace(extents=[each._replace(fd=fd) for each in part.extents])
