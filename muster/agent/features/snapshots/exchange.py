"""Moves parts of snapshots between nodes: sends, keeps and fetches them, and serves them to nodes that lack them.

Each transfer runs in its own thread, on its own connection. What it reads is pinned, or is the base of the round, to
which no worker writes. If a slot was written to all the same, the receiver learns this at the end.
"""

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from muster._shared.snapshot_file import compute_limit
from muster.agent.features.snapshots.copies import Copies, describe
from muster.agent.features.snapshots.keeping import is_kept
from muster.agent.features.snapshots.memory import Extent, Key, Part, SnapshotMemory, SnapshotRound
from muster.agent.features.snapshots.messages import Generation, Source
from muster.agent.features.snapshots.transfer import (
    BLOCK_BYTES,
    Digests,
    NotKept,
    TransferError,
    read_counts,
    receive_blocks,
    send_extents,
)
from muster.agent.rendezvous.interface import Stream
from muster.agent.rendezvous.protocol.framing import ProtocolError
from muster.agent.runtime.loop import Loop

if TYPE_CHECKING:
    from muster.agent.features.snapshots.fetching import Fetch

OpenStream = Callable[[tuple[str, int], Callable[[Stream], None], Callable[[str], None]], None]
Seek = Callable[[int, Callable[[Source | None], None]], None]
"""Asks the leader which node has what a global rank has saved of the base."""
SEEK_LIMIT_S = 30.0
OnEnd = Callable[[str | None], None]
"""Gets the reason of a failure; None means success."""


class Exchange:
    """All transfers of one node. Close it."""

    def __init__(self, loop: Loop, memory: SnapshotMemory, open_stream: OpenStream, seek: Seek) -> None:
        self.copies = Copies(self._find_limit)
        self._loop = loop
        self._memory = memory
        self._open_stream = open_stream
        self._seek = seek
        self._sent: tuple[Key, Digests] | None = None
        """What the neighbour got last, with its digests."""
        self._sent_to: tuple[str, int] | None = None
        self.fetching: Fetch | None = None

    def begin_round(self, formed: SnapshotRound) -> None:
        """Drop copies that are no ancestors of the round's snapshot."""
        base = None if formed.snapshot is None else formed.snapshot.key
        lineages = self._memory.lineages
        self.copies.drop(lambda key: is_kept(key, base, lineages))

    def _find_limit(self, copied_bytes: int) -> int | None:
        words = self._memory.control.words
        limit = compute_limit(words, self._memory.measure_used() + copied_bytes)
        return None if limit is None else limit.state_bytes

    def _find_own_limit(self) -> int | None:
        return self._find_limit(self.copies.measure())

    # -- to the neighbour -------------------------------------------------------------------------------------------

    def send(self, key: Key, neighbour: Source, on_end: OnEnd) -> None:
        """Send this node's pinned part of a generation to another node."""
        part = self._memory.find_part(key)
        if part is None:
            on_end("a rank has not saved it")
            return
        place = (neighbour.host, neighbour.port)
        before = self._sent if self._sent_to == place else None

        def send(stream: Stream) -> None:
            digests = _offer(stream, part, before, self._memory)
            if digests is not None:
                self._sent, self._sent_to = (key, digests), place

        self._connect(neighbour, send, on_end)

    # -- from another node ------------------------------------------------------------------------------------------

    def fetch(
        self,
        generation: Generation,
        source: Source,
        on_end: Callable[[str | None, bool], None],
        print_line: Callable[[str], None],
    ) -> None:
        """Get a part of the generation into this node's own slots, while no worker runs.

        Args:
            generation: what the round continues.
            source: the node that has the part.
            on_end: gets the reason of a failure or None, and whether the reason is that this node may not keep as much.
            print_line: prints the progress.
        """
        from muster.agent.features.snapshots.fetching import Fetch

        part = self.copies.open(generation.key, source.group_rank)
        self._memory.make_room(generation.key)
        fetch = self.fetching = Fetch(self._loop, self._memory, generation, self._find_own_limit, print_line)

        def end(problem: str | None) -> None:
            if part is not None:
                self._close(part)
            self.fetching = None
            on_end(fetch.end(problem), fetch.does_not_fit)

        if part is not None:
            self._in_thread(lambda: fetch.copy(part), end)
        else:
            self._connect(source, lambda stream: fetch.receive(stream, source.group_rank), end)

    # -- ranges for workers -----------------------------------------------------------------------------------------

    def read_range(
        self,
        key: Key,
        rank: int,
        offset: int,
        length: int,
        give: Callable[[memoryview], None],
        tell_length: Callable[[int], None],
    ) -> None:
        """Read what a global rank has saved of a generation, from any node that has it. This runs in a thread.

        Args:
            key: the generation.
            rank: the global rank that has saved it.
            offset: the first byte.
            length: how many bytes; 0 means that only the total length is wanted.
            give: gets the bytes, block by block.
            tell_length: gets the total length, before the first block.

        Raises:
            NotKept: no node has it.
            OSError: a connection broke.
            TransferError: no reachable node has it.
        """
        extent, copy = self._find_extent(key, rank)
        try:
            if extent is None:
                self._read_elsewhere(key, rank, offset, length, give, tell_length)
                return
            tell_length(extent.length)
            if offset + length > extent.length:
                return  # length already sent
            for at in range(offset, offset + length, BLOCK_BYTES):
                count = min(BLOCK_BYTES, offset + length - at)
                give(memoryview(os.pread(extent.fd, count, extent.offset + at)))
        finally:
            if copy is not None:
                self._close(copy)

    def _find_extent(self, key: Key, rank: int) -> tuple[Extent | None, Part | None]:
        """Return where it is on this node, and the copy that must be closed then."""
        own = self._memory.find_extent(key, rank)
        if own is not None:
            return own, None
        copy = self.copies.open(key, rank=rank)
        return (None, None) if copy is None else (copy.extents[rank - copy.holding.first_rank], copy)

    def _read_elsewhere(
        self,
        key: Key,
        rank: int,
        offset: int,
        length: int,
        give: Callable[[memoryview], None],
        tell_length: Callable[[int], None],
    ) -> None:
        stream = self._open_in_thread(self._ask_for_holder(rank))
        try:
            stream.send({"do": "read", "key": [*key], "rank": rank, "offset": offset, "length": length})
            answer = stream.receive()
            if "failed" in answer:
                raise TransferError(str(answer["failed"]))
            (total,) = read_counts(answer, "bytes", 1)
            tell_length(total)
            if offset + length <= total:
                receive_blocks(stream, length, give)
        finally:
            stream.close()

    def _ask_for_holder(self, rank: int) -> Source:
        found: list[Source | None] = []
        done = threading.Event()

        def tell(source: Source | None) -> None:
            found.append(source)
            done.set()

        self._loop.call_from_thread(lambda: self._seek(rank, tell))
        if not done.wait(SEEK_LIMIT_S):
            raise TransferError("the leader did not say which node has it")
        if found[0] is None:
            raise NotKept(f"no node has what rank {rank} has saved")
        return found[0]

    def _open_in_thread(self, place: Source) -> Stream:
        found: list[Stream | str] = []
        is_there, is_late = threading.Event(), threading.Event()

        def close_late() -> None:
            with contextlib.suppress(IndexError):
                late = found.pop()
                if not isinstance(late, str):
                    late.close()

        def tell(opened: Stream | str) -> None:
            found.append(opened)
            is_there.set()
            if is_late.is_set():
                close_late()

        self._loop.call_from_thread(lambda: self._open_stream((place.host, place.port), tell, tell))
        if not is_there.wait(SEEK_LIMIT_S):
            is_late.set()
            close_late()  # arrived in between
            raise TransferError(f"{place.host} cannot be reached")
        opened = found.pop()
        if isinstance(opened, str):
            raise TransferError(f"{place.host} cannot be reached")
        return opened

    def _send_range(self, stream: Stream, message: dict[str, object]) -> None:
        rank, offset, length = read_counts(
            {"words": [message.get(k) for k in ("rank", "offset", "length")]}, "words", 3
        )
        extent, copy = self._find_extent(_read_key(message), rank)
        try:
            if extent is None:
                raise TransferError("this node does not have it")
            stream.send({"bytes": [extent.length]})
            if offset + length <= extent.length:
                part = Extent(extent.fd, extent.offset + offset, length)
                send_extents(stream, [part], None, None, is_gentle=False)
        finally:
            if copy is not None:
                self._close(copy)

    # -- for other nodes --------------------------------------------------------------------------------------------

    def serve(self, stream: Stream) -> None:
        """Do what the other end of a connection requests."""
        self._in_thread(lambda: self._serve(stream), lambda _problem: None, stream)

    def _serve(self, stream: Stream) -> None:
        try:
            while True:
                message = stream.receive()
                if message.get("do") == "put":
                    self.copies.receive(stream, message)
                elif message.get("do") == "read":
                    self._send_range(stream, message)
                else:
                    self._send_part(stream, message)
        except TransferError as error:
            stream.send({"failed": str(error)})
            raise

    def _send_part(self, stream: Stream, message: dict[str, object]) -> None:
        part = self._find(_read_key(message), message.get("group_rank"))
        if part is None:
            raise TransferError("this node does not have it")
        stream.send(describe(part))
        try:
            send_extents(stream, part.extents, None, None, is_gentle=False)
            stream.send({"end": self._memory.is_unchanged(part)})
        finally:
            self._close(part)

    def _find(self, key: Key, group_rank: object) -> Part | None:
        """Return the part of a node; `_close` closes its descriptor."""
        for own in (self._memory.find_part(key), self._memory.find_aside(key)):
            if own is not None and own.holding.group_rank == group_rank:
                return own
        return self.copies.open(key, group_rank) if isinstance(group_rank, int) else None

    def _close(self, part: Part) -> None:
        if not part.serials:  # files cannot tell: they close before the agent's threads
            os.close(part.extents[0].fd)

    # -- threads ----------------------------------------------------------------------------------------------------

    def _connect(self, place: Source, act: Callable[[Stream], None], on_end: OnEnd) -> None:
        def run(stream: Stream) -> None:
            self._in_thread(lambda: act(stream), on_end, stream)

        self._open_stream((place.host, place.port), run, on_end)

    def _in_thread(self, act: Callable[[], None], on_end: OnEnd, stream: Stream | None = None) -> None:
        def run() -> str | None:
            try:
                act()
            except (OSError, ProtocolError, TransferError, ValueError, MemoryError) as error:
                return str(error) or type(error).__name__
            except BaseException as error:  # noqa: BLE001  # whatever it is, the next round waits for the end
                sys.excepthook(type(error), error, error.__traceback__)
                return "an error of muster, printed above"
            finally:
                close()
            return None

        def close() -> None:
            if stream is not None:
                stream.close()

        def give_up(error: RuntimeError) -> str:
            close()
            return str(error)

        self._loop.call_in_thread(run, on_end, give_up)

    def close(self) -> None:
        """Drop all copies. Idempotent."""
        self.copies.close()


def _offer(stream: Stream, part: Part, before: tuple[Key, Digests] | None, memory: SnapshotMemory) -> Digests | None:
    """Offer a part and send what the neighbour lacks.

    Return the digests of all blocks; None if it has the part already.
    """
    known = None if before is None else [*before[0]]
    stream.send({"do": "put", "before": known, **describe(part)})
    answer = stream.receive()
    if answer.get("has") is True:
        return None
    if answer.get("go") is not True:
        raise TransferError(f"the neighbour refused it: {str(answer.get('failed'))[:200]}")
    is_known = before is not None and answer.get("before") is True
    digests = Digests(extent.length for extent in part.extents)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the answer has the reason
        last = before[1] if before is not None and is_known else None
        send_extents(stream, part.extents, last, digests, is_gentle=True)
        stream.send({"end": memory.is_unchanged(part)})
    answer = stream.receive()
    if answer.get("ok") is not True:
        raise TransferError(f"the neighbour did not get it whole: {str(answer.get('failed'))[:200]}")
    return digests


def _read_key(message: dict[str, object]) -> Key:
    key = message.get("key")
    if not isinstance(key, list) or [type(each) for each in key] != [int, int]:
        raise TransferError("'key' is not what it must be")
    return key[0], key[1]
