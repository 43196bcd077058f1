"""Gets this node's part of what a round continues into its own slots, from a copy here or from another node.

The workers of this node wait for it, and those of the other nodes wait for them. So it has a total limit, reports its
progress now and then, and ends soon after its round is over, whatever it is doing.
"""

import os
from collections.abc import Callable

from muster._shared.snapshot_file import SLOT_SPACE
from muster.agent.features.snapshots.copies import read_description
from muster.agent.features.snapshots.memory import Extent, Part, SnapshotMemory
from muster.agent.features.snapshots.messages import Generation, Holding
from muster.agent.features.snapshots.transfer import TransferError, check_end, receive_extents
from muster.agent.rendezvous.interface import Stream
from muster.agent.runtime.loop import Loop

LIMIT_S = 600.0
"""How long it may take in total: about as long as the other nodes' workers wait in `init_process_group`."""
TELL_S = 10.0
"""How often the progress is printed."""
_COPY_BYTES = 1 << 20


class DoesNotFit(TransferError):
    """The part is larger than this node may keep."""


class Fetch:
    """One part to get. Marked methods run in a thread; all others run on the loop."""

    def __init__(
        self,
        loop: Loop,
        memory: SnapshotMemory,
        generation: Generation,
        find_limit: Callable[[], int | None],
        print_line: Callable[[str], None],
    ) -> None:
        """Begin the time limit."""
        self._loop = loop
        self._memory = memory
        self._generation = generation
        self._find_limit = find_limit
        self._print_line = print_line
        self._stream: Stream | None = None
        self._given_up = ""
        """The reason for giving up."""
        self._received = self._total = 0
        self.does_not_fit = False
        self._limit = loop.call_later(LIMIT_S, lambda: self.cancel(f"it took longer than {LIMIT_S:.0f} s"))
        self._teller = loop.call_later(TELL_S, self._tell)

    def cancel(self, why: str) -> None:
        """End the transfer soon. Idempotent."""
        self._given_up = self._given_up or why
        if self._stream is not None:
            self._stream.abort()

    def end(self, problem: str | None) -> str | None:
        """Return why the thread failed once it has ended or was not started; None if it did not fail."""
        self._limit.cancel()
        self._teller.cancel()
        return self._given_up or problem

    def _tell(self) -> None:
        done, total, step = self._received / 1e9, self._total / 1e9, self._generation.step
        self._print_line(f"{done:.1f} of {total:.1f} GB of this node's part of the snapshot of step {step} are here")
        self._teller = self._loop.call_later(TELL_S, self._tell)

    # -- in a thread ------------------------------------------------------------------------------------------------

    def receive(self, stream: Stream, group_rank: int) -> None:
        """Get the part from another node.

        Raises:
            DoesNotFit: the part is larger than this node may keep.
            OSError, ProtocolError, TransferError: the part did not arrive, or not completely.
        """
        self._stream = stream
        self._count(0)  # finds a reason that `cancel` has set
        stream.send({"do": "get", "key": [*self._generation.key], "group_rank": group_rank})
        answer = stream.receive()
        if "failed" in answer:
            raise TransferError(str(answer["failed"]))
        holding, world_size, lengths = read_description(answer)
        if holding.generation.key != self._generation.key:
            raise TransferError("it has sent another one")
        receive_extents(stream, self._begin(lengths), [], self._count)
        check_end(stream)
        self._adopt(holding, world_size, lengths)

    def copy(self, part: Part) -> None:
        """Get the part from the copy that this node keeps for another one.

        Raises:
            DoesNotFit: the part is larger than this node may keep.
            OSError, TransferError: the copy no longer exists, or the transfer was given up.
        """
        lengths = [extent.length for extent in part.extents]
        for source, target in zip(part.extents, self._begin(lengths), strict=True):
            for at in range(0, source.length, _COPY_BYTES):
                block = os.pread(source.fd, min(_COPY_BYTES, source.length - at), source.offset + at)
                os.pwrite(target.fd, block, target.offset + at)
                self._count(len(block))
        self._adopt(part.holding, part.world_size, lengths)

    def _begin(self, lengths: list[int]) -> list[Extent]:
        if len(lengths) != self._memory.nproc:
            raise TransferError("it is of another number of ranks")
        limit = self._find_limit()
        if limit is not None and max(lengths) > limit:
            self.does_not_fit = True
            raise DoesNotFit(f"a state of {max(lengths)} bytes is more than the {limit} that --snapshot-memory allows")
        self._total = sum(lengths)
        targets = self._memory.targets
        return [
            Extent(self._memory.get_fd(rank), targets[rank] * SLOT_SPACE, length) for rank, length in enumerate(lengths)
        ]

    def _count(self, count: int) -> None:
        if self._given_up:
            raise TransferError(self._given_up)
        self._received += count

    def _adopt(self, holding: Holding, world_size: int, lengths: list[int]) -> None:
        self._loop.call_from_thread(lambda: self._memory.adopt(holding, world_size, lengths))
