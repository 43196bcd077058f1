"""Sends what a node has of a generation to another node, block by block. Runs in threads, not on the loop.

A part is the content of one slot for each rank. It travels as blocks. Each follows a dictionary that has its digest
and, like every dictionary on a stream, a MAC, so the receiver knows that each byte is the sender's. A block that the
receiver already has, in the part that it got before, is not sent again.
"""

import hashlib
import os
import time
from collections.abc import Callable, Iterable

from muster.agent.features.snapshots.memory import Extent
from muster.agent.rendezvous.interface import Stream
from muster.agent.workers.status_page import create_memory_file

BLOCK_BYTES = 64 * 1024
"""How much each transfer takes of the agent's memory. Larger blocks cost as much processor time."""
_PAUSE_AFTER_BYTES = 4 * 1024 * 1024
_DIGEST_BYTES = 16


class TransferError(Exception):
    """A part was not transferred; `str()` says why."""


class NotKept(TransferError):
    """The leader says that no node has it."""


class Digests:
    """The digests of a neighbour's blocks, in a memory file, because for many GB they take many MB.

    A thread that uses them keeps them open, because they are closed with the last reference.
    """

    def __init__(self, lengths: Iterable[int]) -> None:
        """Make room for the digests of these contents.

        Raises:
            OSError: no memory file can be made.
        """
        count = sum(-(-length // BLOCK_BYTES) for length in lengths)
        self._fd = create_memory_file("muster-snapshot-digests", count * _DIGEST_BYTES)

    def read(self, number: int) -> bytes:
        """Read the digest of a block. Blocks are numbered one content after the other."""
        return os.pread(self._fd, _DIGEST_BYTES, number * _DIGEST_BYTES)

    def write(self, number: int, digest: bytes) -> None:
        """Write the digest of a block."""
        os.pwrite(self._fd, digest, number * _DIGEST_BYTES)

    def __del__(self) -> None:
        """Close the file, if it was made."""
        if hasattr(self, "_fd"):
            os.close(self._fd)


def send_extents(
    stream: Stream, extents: list[Extent], known: Digests | None, sent: Digests | None, *, is_gentle: bool
) -> None:
    """Send the content of a part.

    Args:
        stream: to the receiver, which calls `receive_extents`.
        extents: one for each rank.
        known: the digests of what the receiver got before; None if it got nothing.
        sent: gets the digests of all blocks, for the next time.
        is_gentle: take at most half of a core, because workers need the CPU.

    Raises:
        OSError: the connection broke, or the content cannot be read.
    """
    buffer = bytearray(BLOCK_BYTES)
    number = 0
    begun_s, since = time.monotonic(), 0
    for extent in extents:
        for at in range(0, extent.length, BLOCK_BYTES):
            view = memoryview(buffer)[: min(BLOCK_BYTES, extent.length - at)]
            if os.preadv(extent.fd, [view], extent.offset + at) != len(view):
                raise OSError("the memory of the snapshot is shorter than it says")
            digest = compute_digest(view)
            is_same = known is not None and known.read(number) == digest
            stream.send({"digest": digest.hex(), "same": is_same})
            if not is_same:
                stream.send_raw(view)
            if sent is not None:
                sent.write(number, digest)
            number += 1
            since += len(view)
            if is_gentle and since >= _PAUSE_AFTER_BYTES:
                time.sleep(time.monotonic() - begun_s)
                begun_s, since = time.monotonic(), 0


def receive_extents(
    stream: Stream,
    extents: list[Extent],
    before: list[Extent],
    count: Callable[[int], None] = lambda _: None,
) -> None:
    """Receive the content of a part, and verify it.

    Args:
        stream: from the sender, which calls `send_extents`.
        extents: the targets, one for each rank.
        before: what was received before, from which unchanged blocks are taken; empty if nothing was.
        count: gets the length of each received block.

    Raises:
        OSError: the connection broke, or memory ran out.
        ProtocolError: the stream has something else.
        TransferError: a block is not what the sender has read.
    """
    buffer = bytearray(BLOCK_BYTES)
    for rank, extent in enumerate(extents):
        for at in range(0, extent.length, BLOCK_BYTES):
            view = memoryview(buffer)[: min(BLOCK_BYTES, extent.length - at)]
            head = stream.receive()
            if head.get("same") is True:
                if rank >= len(before) or os.preadv(before[rank].fd, [view], before[rank].offset + at) != len(view):
                    raise TransferError("a block was left out that this node does not have")
            else:
                stream.receive_raw(view)
            if compute_digest(view).hex() != head.get("digest"):
                raise TransferError("a block was changed on its way")
            os.pwritev(extent.fd, [view], extent.offset + at)
            count(len(view))


def receive_blocks(stream: Stream, length: int, give: Callable[[memoryview], None]) -> None:
    """Receive bytes from `send_extents` of one extent, and verify each block before it is passed on.

    Raises:
        OSError: the connection broke.
        ProtocolError: the stream has something else.
        TransferError: a block is not what the sender has read.
    """
    buffer = bytearray(BLOCK_BYTES)
    for at in range(0, length, BLOCK_BYTES):
        view = memoryview(buffer)[: min(BLOCK_BYTES, length - at)]
        head = stream.receive()
        stream.receive_raw(view)
        if compute_digest(view).hex() != head.get("digest"):
            raise TransferError("a block was changed on its way")
        give(view)


def check_end(stream: Stream) -> None:
    """Have the sender of a part say that the worker did not write to it during the transfer.

    Raises:
        TransferError: the worker did write to it.
    """
    if stream.receive().get("end") is not True:
        raise TransferError("the worker wrote to it during the transfer")


def compute_digest(block: memoryview) -> bytes:
    """Return the digest of a block, long enough that blocks with equal digests are equal."""
    return hashlib.blake2b(block, digest_size=_DIGEST_BYTES).digest()


def read_counts(message: dict[str, object], key: str, count: int | None = None) -> list[int]:
    """Read a list of numbers.

    Args:
        message: a message from a stream.
        key: the list's.
        count: how many there must be; None means at least one.

    Raises:
        TransferError: it is something else.
    """
    values = message.get(key)
    found = [each for each in values if type(each) is int and 0 <= each < 1 << 41] if isinstance(values, list) else []
    if not found or [*found] != values or (count is not None and len(found) != count):
        raise TransferError(f"{key!r} is not what it must be")
    return found
