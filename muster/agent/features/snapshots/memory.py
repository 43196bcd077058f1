"""Knows what is in the memory files for snapshots, and what stays in them. `SnapshotFiles` makes the files.

Only the file that controls the others is mapped, which has a few kilobytes.
"""

import mmap
import os
import sys
from typing import NamedTuple

from muster._shared.contract import Env
from muster._shared.layouts import SnapshotBlock as Block
from muster._shared.layouts import SnapshotHeader as Header
from muster._shared.records import record, replace
from muster._shared.snapshot_file import BLOCK_BYTES, COMPLETE, SLOT_SPACE, SLOTS, Control, Slot
from muster.agent.features.snapshots.messages import Generation, Holding, Source
from muster.agent.workers.status_page import create_allocated, create_memory_file

LOOK_S = 1.0
"""How often a node looks for a snapshot that all its ranks have. At most one is confirmed in this time."""
MARK_LOOK_S = 0.05
"""The same while the leader waits for a certain snapshot, because ranks that save often have one slot less until then.
"""


Key = tuple[int, int]
"""Lineage and step."""


@record
class SnapshotRound:
    """A round, as its snapshots need it."""

    number: int
    lineage: int
    group_rank: int
    group_world_size: int
    sends_copies: bool
    """Whether this node sends its snapshots to a neighbour."""
    snapshot: Generation | None = None
    """The snapshot that all ranks continue."""
    source: Source | None = None
    """Where this node's part of it is, if this node has none."""
    neighbour: Source | None = None
    """The node that gets a copy of this node's part of it."""


class Extent(NamedTuple):
    """Where the content of one rank is."""

    fd: int
    offset: int
    length: int


class Part(NamedTuple):
    """What one node has saved of a generation, and where that is here."""

    holding: Holding
    world_size: int
    extents: list[Extent]
    serials: tuple[int, ...] = ()
    """How often saves into its slots had begun; empty for a copy."""

    @property
    def key(self) -> Key:
        """Lineage and step of the generation."""
        return self.holding.generation.key


class SnapshotFiles:
    """The memory files for snapshots: one that controls them, and one for the content of each rank.

    The owner closes them.
    """

    def __init__(self, *, nproc: int, share: int, limit_bytes: int, copies: int) -> None:
        """Create them. None of the content's memory is used yet.

        Args:
            nproc: how many ranks the node has.
            share: see `Header.SHARE`.
            limit_bytes: see `Header.LIMIT`.
            copies: see `Header.COPIES`.

        Raises:
            OSError: the system has no memory files, or memory or descriptors ran out.
        """
        self.nproc = nproc
        self._fds: list[int] = []
        try:
            self._fds.append(create_allocated("muster-snapshots", (nproc + 1) * Header.BYTES))
            for local_rank in range(nproc):
                self._fds.append(create_memory_file("muster-snapshot", Block.FILE_BYTES))
                self._write((local_rank + 1) * Header.BYTES // 8 + Block.FILE, self._fds[-1])
            self._write(Header.RANKS, nproc)
            self._write(Header.SHARE, share)
            self._write(Header.LIMIT, limit_bytes)
            self._write(Header.COPIES, copies)
            self._write(Header.MAGIC, Header.MAGIC_VALUE)
        except BaseException:
            self.close()
            raise

    @property
    def control_fd(self) -> int:
        """The descriptor of the file that controls the others."""
        return self._fds[0]

    @property
    def content_fds(self) -> list[int]:
        """The descriptors of the content's files, by local rank."""
        return self._fds[1:]

    @property
    def is_used(self) -> bool:
        """Whether a worker has used the files."""
        return any(os.pread(self._fds[0], 8, 8 * Header.USED))

    def begin_round(self, round_number: int, lineage: int) -> None:
        """Let the workers of a round save, if there is nothing to continue."""
        self._write(Header.ROUND, round_number)
        self._write(Header.LINEAGE, lineage)

    def build_env(self, round_number: int, local_rank: int) -> dict[str, str]:
        """Build the variable by which the worker of a local rank finds its files."""
        return {Env.SNAPSHOTS: f"/proc/{os.getpid()}/fd/{self._fds[0]}:{round_number}:{local_rank}"}

    def _write(self, word: int, value: int) -> None:
        os.pwrite(self._fds[0], value.to_bytes(8, sys.byteorder), 8 * word)

    def close(self) -> None:
        """Close them; workers that have mapped them keep their memory. Idempotent."""
        while self._fds:
            os.close(self._fds.pop())


class SnapshotMemory:
    """The memory of one node."""

    def __init__(self, files: SnapshotFiles) -> None:
        """Map the file that controls the others."""
        self.files = files
        self.nproc = files.nproc
        self.control = Control(mmap.mmap(files.control_fd, (self.nproc + 1) * BLOCK_BYTES))
        self._owners: dict[int, tuple[int, int]] = {}
        """By lineage, the group rank of this node in that round, and the round's number of nodes."""
        self._round: SnapshotRound | None = None
        self._newest: int | None = None
        """The newest step at the last look."""
        self._reported: int | None = None
        self.is_copying = False
        """Whether the confirmed snapshot is being sent. Until that is over, no newer one is kept."""
        self._sends_copies = False
        self._aside: Part | None = None
        """This node's part of the base from before it got another node's, which may be needed elsewhere."""
        self.targets = [0] * self.nproc
        """By local rank, the slot into which another node's part is written."""

    @property
    def is_used(self) -> bool:
        """Whether a worker has used snapshots."""
        return self.control.words[Header.USED] != 0

    # -- rounds -----------------------------------------------------------------------------------------------------

    def note_round(self, formed: SnapshotRound) -> None:
        """Note that the workers that have used the files since the last look are those of this round."""
        self._round, self._newest, self._reported, self.is_copying = formed, None, None, False
        self._sends_copies = formed.sends_copies
        self._owners[formed.lineage] = formed.group_rank, formed.group_world_size
        base = None if formed.snapshot is None else formed.snapshot.lineage
        for lineage in sorted(self._owners)[:-16]:
            if lineage != base:  # even after rounds without saves
                del self._owners[lineage]

    def begin_round(self, formed: SnapshotRound) -> None:
        """Have the workers of a round continue its snapshot. No worker of another round may run any more."""
        words, base = self.control.words, formed.snapshot
        if self._aside is not None and (base is None or self._aside.key != base.key):
            self._aside = None
        if self.is_used:
            self._drop_others(None if base is None else base.key)
        words[Header.ROUND], words[Header.LINEAGE] = formed.number, formed.lineage
        words[Header.BASE_LINEAGE], words[Header.BASE_STEP] = (base.lineage, base.step + 1) if base else (0, 0)
        words[Header.CONFIRMED] = words[Header.HOLD] = 0
        for local_rank in range(self.nproc):
            for word in (Block.OWNER, Block.PIN, Block.LOADED):
                self.control.write_block(local_rank, word, 0)
        self.note_round(formed)

    def _drop_others(self, base: tuple[int, int] | None) -> None:
        """Empty all slots from which the base does not descend, and those that were being written."""
        from muster.agent.features.snapshots.keeping import is_kept

        for local_rank in range(self.nproc):
            for number, slot in enumerate(self.control.read_slots(local_rank)):
                key = slot.generation
                if key is None or not is_kept(key, base, self._owners):
                    self.control.empty_slot(local_rank, number)

    def name_socket(self) -> None:
        """Write the name by which this node's workers find `ranges.RangeServer`."""
        words = self.control.words
        for at in (Header.SOCKET, Header.SOCKET + 1):
            words[at] = int.from_bytes(os.urandom(8), "big") >> 2 | 1

    @property
    def lineages(self) -> tuple[int, ...]:
        """Lineages of the rounds that this node took part in."""
        return tuple(self._owners)

    def make_room(self, base: Key) -> None:
        """Empty all slots, because this node gets another node's part of the base.

        The bytes of its own part stay until a worker saves over them: nodes may need each other's.
        """
        self._aside = self.find_part(base) or self.find_aside(base)
        kept = [0] * self.nproc if self._aside is None else [e.offset // SLOT_SPACE for e in self._aside.extents]
        self.targets = [(number + 1) % SLOTS for number in kept]
        for local_rank in range(self.nproc):
            for number in range(SLOTS):
                self.control.empty_slot(local_rank, number)

    def find_aside(self, key: Key) -> Part | None:
        """Return what this node had of the base before it got another node's part, if it is still there."""
        part = self._aside
        return part if part is not None and part.key == key and self.is_unchanged(part) else None

    def adopt(self, holding: Holding, world_size: int, lengths: list[int]) -> None:
        """Adopt what another node's rank, or the rank in this place, has saved, in each rank's target slot."""
        generation = holding.generation
        self.control.words[Header.USED] = 1
        for local_rank, length in enumerate(lengths):
            rank = holding.first_rank + local_rank
            slot = Slot(
                COMPLETE, generation.lineage, generation.step, length, rank, world_size, generation.is_replicated
            )
            self.control.end_save(local_rank, self.targets[local_rank], slot)
        self._owners[generation.lineage] = holding.group_rank, generation.size

    def find_part(self, key: tuple[int, int]) -> Part | None:
        """Return what this node's ranks have saved of a generation, and where it is; None if not all have it."""
        owner, extents, found = self._owners.get(key[0]), [], []
        if owner is None:
            return None
        serials = self._read_serials()
        for local_rank in range(self.nproc):
            number = self.control.find_slot(local_rank, key)
            if number is None:
                return None
            slot = self.control.read_slots(local_rank)[number]
            found.append(slot)
            extents.append(Extent(self.get_fd(local_rank), number * SLOT_SPACE, slot.bytes))
        generation = Generation(lineage=key[0], step=key[1], size=owner[1], is_replicated=found[0].is_replicated)
        holding = Holding(generation=generation, group_rank=owner[0], first_rank=found[0].global_rank, nproc=self.nproc)
        slots = [extent.offset // SLOT_SPACE for extent in extents]
        kept = tuple(of_rank[slot] for of_rank, slot in zip(serials, slots, strict=True))
        return Part(holding, found[0].world_size, extents, kept)

    def find_extent(self, key: Key, rank: int) -> Extent | None:
        """Return where a global rank's content of a generation is among this node's own; None if it is not here."""
        for local_rank in range(self.nproc):
            for number, slot in enumerate(self.control.read_slots(local_rank)):
                if slot.generation == key and slot.global_rank == rank:
                    return Extent(self.get_fd(local_rank), number * SLOT_SPACE, slot.bytes)
        aside = self.find_aside(key)
        if aside is None or not 0 <= rank - aside.holding.first_rank < self.nproc:
            return None
        return aside.extents[rank - aside.holding.first_rank]

    def is_unchanged(self, part: Part) -> bool:
        """Return whether no save into the slots of a part has begun since it was found."""
        if not part.serials:
            return True
        slots = [extent.offset // SLOT_SPACE for extent in part.extents]
        return part.serials == tuple(of_rank[slot] for of_rank, slot in zip(self._read_serials(), slots, strict=True))

    def _read_serials(self) -> list[list[int]]:
        return [
            [self.control.read_serial(local_rank, slot) for slot in range(SLOTS)] for local_rank in range(self.nproc)
        ]

    def measure_used(self) -> int:
        """Return the bytes of memory that the content files use."""
        return sum(os.fstat(fd).st_blocks * 512 for fd in self.files.content_fds)

    def get_fd(self, local_rank: int) -> int:
        """Return the content file of a rank."""
        return self.files.content_fds[local_rank]

    def list_holdings(self) -> tuple[Holding, ...]:
        """Return what the ranks of this node have completely saved. Call this while no worker runs."""
        if not self.is_used:
            return ()
        from muster.agent.features.snapshots.keeping import find_whole

        parts = map(self.find_part, sorted(find_whole(self._read_slots()), reverse=True))
        aside = None if self._aside is None else self.find_aside(self._aside.key)
        others = () if aside is None else (replace(aside.holding, is_copy=True),)
        return (*(part.holding for part in parts if part is not None), *others)

    # -- while workers run ------------------------------------------------------------------------------------------

    def look(self) -> tuple[int, int, bool, bool] | None:
        """Look for a snapshot that all ranks of this node have, and keep it.

        Returns:
            Its step, how many steps the ranks have advanced since the last look, whether it is replicated, and whether
            the ranks keep different ones; None if there is nothing new.
        """
        formed, words = self._round, self.control.words
        if formed is None or not formed.lineage or not self.is_used:
            return None
        from muster.agent.features.snapshots.keeping import decide_keeping, find_kept, find_whole, is_split

        slots = self._read_slots()
        hold = words[Header.HOLD]
        decision = decide_keeping(
            slots, formed.lineage, self.control.confirmed, hold - 1 if hold else None, may_hold=not self.is_copying
        )
        kept = decision.report
        if decision.hold is not None:
            words[Header.HOLD] = decision.hold + 1
            slots = self._read_slots()  # after the word: see `_shared.snapshot_file`
            kept = find_kept(slots, formed.lineage, decision.hold)
            if kept != decision.hold or (formed.lineage, kept) not in find_whole(slots):
                words[Header.HOLD] = 0
                kept = None
        advance = 0 if self._newest is None or decision.newest is None else max(0, decision.newest - self._newest)
        self._newest = decision.newest
        if kept is None or kept == self._reported:
            return None
        self._reported = kept
        is_replicated = find_whole(slots).get((formed.lineage, kept), False)
        return kept, advance, is_replicated, is_split(slots, formed.lineage, words[Header.HOLD] - 1)

    def _read_slots(self) -> list[tuple[Slot, ...]]:
        return [self.control.read_slots(local_rank) for local_rank in range(self.nproc)]

    def hold(self, step: int) -> None:
        """Keep the first snapshot of the round at or above this step."""
        self.control.words[Header.HOLD], self._reported = step + 1, None

    @property
    def is_waiting(self) -> bool:
        """Whether the ranks have not reached the step that they are to keep."""
        return self.control.words[Header.HOLD] != 0 and self._reported is None

    def confirm(self, snapshot: Generation) -> None:
        """Keep a snapshot that all ranks of the round have. What was kept for it need not stay.

        If it will be sent to a neighbour, the snapshot before it, which the neighbour has, stays until then.
        """
        formed, words = self._round, self.control.words
        if formed is None or snapshot.lineage != formed.lineage:
            return
        if self._sends_copies:  # none newer before the leader confirms
            self.is_copying = True
            if self.control.confirmed is not None:
                self.pin(self.control.confirmed)
        words[Header.CONFIRMED] = snapshot.step + 1
        words[Header.HOLD], self._reported = 0, None

    def end_copy(self, *, is_over: bool) -> None:
        """End a copy: all neighbours have the sent snapshot, or no more are sent in this round."""
        self.is_copying = False
        self._sends_copies = self._sends_copies and not is_over
        self.unpin()

    def pin(self, key: tuple[int, int]) -> bool:
        """Have the workers spare the slots of a generation; return False if a rank does not have it."""
        slots = [self.control.find_slot(local_rank, key) for local_rank in range(self.nproc)]
        for local_rank, slot in enumerate(slots):
            if slot is not None:
                self.control.write_block(local_rank, Block.PIN, slot + 1)
        return None not in slots

    def unpin(self) -> None:
        """Allow the slots to be written to again."""
        for local_rank in range(self.nproc):
            self.control.write_block(local_rank, Block.PIN, 0)
