"""The words of the memory that agent and workers share, and its texts: status page, control file for snapshots."""

import mmap
import struct
import zlib
from typing import Final

from muster._shared.contract import FORMAT


class StatusPageLayout:
    """Layout of the status page: one small memory file per node and round, shared by agent and workers.

    The agent writes the header, each worker its own slot. Every field is one aligned native 8-byte word (a signed
    integer, or a double where said), written by one store: a reader never sees half a field. There is no lock and no
    order between fields, so nothing may be concluded from two fields together but what one word holds.
    """

    MAGIC: Final = 0x6D75737465720000 | FORMAT
    """`muster` and the format. A worker that finds another value uses no page."""
    BLOCK_BYTES: Final = 4096
    """Size of the header and of each slot. Slot n begins at block n + 1."""
    WORDS: Final = BLOCK_BYTES // 8

    # words of the header
    MAGIC_WORD: Final = 0
    SLOTS: Final = 1
    ROUND: Final = 2
    ATTEMPT: Final = 3
    COMMAND: Final = 4
    """0: none. Otherwise drain id, kind, whether it is committed, and step in one word. See `pack_command`."""
    DEADLINE_NS: Final = 5
    """CLOCK_MONOTONIC: when what the drain is for ends the workers. 0: no limit."""
    MEMORY_WANTED: Final = 6
    """1: a worker wants memory that outlives it (`snapshot_file`). The workers write it."""
    MEMORY: Final = 7
    """The agent's answer, 0 while there is none: 1 + its descriptor of the control file, or -1 without memory."""

    # words of a slot
    OWNER: Final = 0
    """Process id of the process that writes here: the first of its rank, or the next after its end. 0: none yet."""
    STEP: Final = 1
    """1 + the step. 0: none yet."""
    TOTAL: Final = 2
    """Steps in all. 0: not known."""
    PHASE: Final = 3
    """1 + index in the table of phases. 0: the ordinary one."""
    CHANGED_NS: Final = 4
    """CLOCK_MONOTONIC of the last change of step or phase, or of the last step of any optimizer. 0: none yet."""
    SAVED: Final = 5
    """1 + the step of the last complete checkpoint. 0: none yet."""
    OPTIMIZER_STEPS: Final = 6
    """Steps of the busiest optimizer, counted by the import hook while `STEP` is 0."""
    VALUES: Final = 7
    """How many entries of the table of values are in use."""
    ASKED: Final = 8
    """Four words, one per kind: 1 + the step last asked about, 0 if it never asked, or `NOT_ASKING`."""
    STRIDE: Final = 12
    """Four words, one per kind: the distance of the last two steps asked about. 0: asked at most once."""
    PHASE_TABLE: Final = 16
    FIRST: Final = 88
    """1 + the first step that the script has reported.

    It is 1 if an optimizer was first and the script has reported none.
    """
    FIRST_NS: Final = 89
    """CLOCK_MONOTONIC of that step. 0: none yet. It shows how long the start took, whenever the agent looks."""
    DEBUGGER: Final = 90
    """What the rank asks of this node's terminal: `DEBUGGER_NONE`, `_WANTS` it, or `_QUIT` (end the job)."""
    TERMINAL: Final = 91
    """The agent's answer, 0 while there is none: `TERMINAL_QUEUED`, then `_LENT`; or `_NONE`."""
    WAITING: Final = 92
    """1 + the step whose snapshot is complete, while the rank waits for nodes that join. 0: it never has."""
    STAYS: Final = 93
    """1: the process can leave the round and take part in the next one."""
    VALUE_TABLE: Final = 96
    VERDICT: Final = 176
    """A text entry of at most 120 bytes: `VERDICT_STOP` or `VERDICT_ELSEWHERE`, and the reason. None: nothing."""
    SAVED_PATH: Final = 192
    """A text entry (checksum and bytes) that fills the rest of the slot but its last word.

    It begins with `SAVED` again as 8 native bytes, so that step and path cannot be of two checkpoints. Then comes the
    path, or nothing without one.
    """
    UNREAD: Final = WORDS - 1
    """Where values go that have no place in the table."""

    NOT_ASKING: Final = -1
    """In `ASKED`: the rank asked about falling steps, so no step can be agreed with it."""
    TABLE_ENTRIES: Final = 8
    NAME_BYTES: Final = 64
    """Limit of a name of a phase or value, in UTF-8."""
    PHASE_ENTRY_WORDS: Final = 1 + NAME_BYTES // 8
    """A text entry: a word that holds length and CRC-32, then the bytes. Readers check it: half a text is no text."""
    VALUE_ENTRY_WORDS: Final = PHASE_ENTRY_WORDS + 1
    """A text entry, then the value as a double."""
    PATH_BYTES: Final = (UNREAD - SAVED_PATH - 2) * 8

    VERDICT_BYTES: Final = (SAVED_PATH - VERDICT - 1) * 8
    VERDICT_STOP: Final = b"stop "
    VERDICT_ELSEWHERE: Final = b"elsewhere "

    DEBUGGER_NONE: Final = 0
    DEBUGGER_WANTS: Final = 1
    DEBUGGER_QUIT: Final = 2
    TERMINAL_LENT: Final = 1
    TERMINAL_NONE: Final = 2
    TERMINAL_QUEUED: Final = 3

    STOP: Final = 0
    CHECKPOINT: Final = 1
    PAUSE: Final = 2
    JOIN: Final = 3
    """The ranks wait, with a snapshot of the step, until the round ends for nodes that join."""
    VERBS: Final = {"stop": "stop", "checkpoint": "save", "pause": "pause", "join": "wait"}
    """What all ranks do at the step of a drain, by the name of its kind, in the order of the numbers."""
    ASKING_FUNCTIONS: Final = ("should_stop", "should_checkpoint", "wait_while_paused", "snapshots.save")
    """The function of `muster.worker` or `muster.snapshots` that asks about the step, by kind."""
    KINDS: Final = tuple(VERBS)

    _STEP_BITS: Final = 47
    MAX_STEP: Final = (1 << _STEP_BITS) - 2
    _COMMITTED: Final = 1 << _STEP_BITS
    _KIND_SHIFT: Final = _STEP_BITS + 1
    _DRAIN_SHIFT: Final = _KIND_SHIFT + 2
    MAX_DRAIN: Final = (1 << (63 - _DRAIN_SHIFT)) - 1

    @classmethod
    def pack_command(cls, *, drain: int, kind: int, step: int, is_committed: bool) -> int:
        """Pack a command into one word.

        Args:
            drain: 1 to `MAX_DRAIN`.
            kind: STOP, CHECKPOINT, PAUSE or JOIN.
            step: the ceiling, or the committed step. 0 to `MAX_STEP`.
            is_committed: whether `step` is the agreed one.

        Raises:
            ValueError: a value is outside its range.
        """
        if not (1 <= drain <= cls.MAX_DRAIN and 0 <= kind < len(cls.KINDS) and 0 <= step <= cls.MAX_STEP):
            raise ValueError(f"no command can hold drain {drain}, kind {kind}, step {step}")
        return drain << cls._DRAIN_SHIFT | kind << cls._KIND_SHIFT | (cls._COMMITTED if is_committed else 0) | step

    @classmethod
    def get_step(cls, command: int) -> int:
        """Return the ceiling, or the committed step."""
        return command & (cls._COMMITTED - 1)

    @classmethod
    def get_kind(cls, command: int) -> int:
        """Return STOP, CHECKPOINT, PAUSE or JOIN."""
        return command >> cls._KIND_SHIFT & 3

    @classmethod
    def is_committed(cls, command: int) -> bool:
        """Return whether the step is the agreed one. Otherwise it is the ceiling."""
        return bool(command & cls._COMMITTED)


def read_entry(page: mmap.mmap, slot: int, word: int, limit_bytes: int) -> bytes | None:
    """Read a text entry of a slot of the status page; None if there is none, or only half of it is written."""
    start = (slot + 1) * StatusPageLayout.BLOCK_BYTES + word * 8
    (head,) = struct.unpack_from("@q", page, start)
    length, checksum = head >> 32, head & 0xFFFFFFFF
    if not 0 < length <= limit_bytes:
        return None
    text = page[start + 8 : start + 8 + length]
    return text if zlib.crc32(text) == checksum else None


def read_name(page: mmap.mmap, slot: int, word: int) -> str:
    """Read a name of a phase or value; "" as for `read_entry`."""
    return (read_entry(page, slot, word, StatusPageLayout.NAME_BYTES) or b"").decode(errors="replace")


def read_phase(page: mmap.mmap, slot: int, number: int) -> str:
    """Read the name of a phase; "" if it has none."""
    if not 1 <= number <= StatusPageLayout.TABLE_ENTRIES:
        return ""
    return read_name(page, slot, StatusPageLayout.PHASE_TABLE + (number - 1) * StatusPageLayout.PHASE_ENTRY_WORDS)


def read_values(page: mmap.mmap, slot: int) -> dict[str, float]:
    """Read the values that a rank shows, by name. Entries that are being written are omitted."""
    begin, size = (slot + 1) * StatusPageLayout.BLOCK_BYTES, StatusPageLayout.VALUE_ENTRY_WORDS
    (used,) = struct.unpack_from("@q", page, begin + StatusPageLayout.VALUES * 8)
    found = {}
    for word in [StatusPageLayout.VALUE_TABLE + n * size for n in range(min(used, StatusPageLayout.TABLE_ENTRIES))]:
        if name := read_name(page, slot, word):
            (found[name],) = struct.unpack_from("@d", page, begin + (word + size - 1) * 8)
    return found


class SnapshotHeader:
    """Words of the header of the control file for snapshots. See `_shared.snapshot_file`.

    The agent writes all but `USED`, most of them before it starts the workers of a round.
    """

    MAGIC_VALUE: Final = 0x6D75737473000000 | FORMAT
    BYTES: Final = 4096
    """The size of the header, and of each block."""

    MAGIC: Final = 0
    RANKS: Final = 1
    """How many blocks follow."""
    ROUND: Final = 2
    LINEAGE: Final = 3
    """The lineage of the round, to which what is saved now belongs. 0: nothing can be saved."""
    BASE_LINEAGE: Final = 4
    BASE_STEP: Final = 5
    """1 + the step of the generation that the round continues. 0: there is none, `load` finds nothing."""
    CONFIRMED: Final = 6
    """1 + the step of this lineage that all ranks have. 0: still the base. Changes while workers run."""
    HOLD: Final = 7
    """1 + a step: the oldest complete generation of this lineage at or above it stays. Changes while workers run."""
    USED: Final = 8
    """1: a worker of this node has used snapshots."""
    SHARE: Final = 9
    """Thousandths of the free memory that all ranks of the node may take. 0: `LIMIT` alone counts."""
    LIMIT: Final = 10
    """Bytes that all ranks of the node may take. 0: no such limit."""
    COPIES: Final = 11
    """How many other nodes' states this node keeps beside its own."""
    SOCKET: Final = 12
    """Two words: the name of the agent's socket for `snapshot_file.RemoteReader`. 0: there is none."""


class SnapshotBlock:
    """Words of a rank's block in that file."""

    SLOTS: Final = 3
    SLOT_SPACE: Final = 1 << 40
    FILE_BYTES: Final = SLOTS * SLOT_SPACE
    """The size of a rank's content file. Memory is used only where something was written."""

    OWNER: Final = 0
    """Process that writes here: the first of its rank that uses snapshots."""
    FILE: Final = 1
    """The agent's descriptor of the content file (written by the agent)."""
    PIN: Final = 2
    """1 + the slot that is being sent. 0: none (written by the agent)."""
    REFUSED: Final = 3
    """Bytes of the last state that did not fit. 0: none."""
    SKIPPED: Final = 4
    """How many saves were left out because no slot was free."""
    LOADED: Final = 5
    """1 + the step that this worker has loaded. 0: it has not. The agent clears it before a round."""
    SLOT: Final = 16
    """Where slot 0 begins. Each slot has `SLOT_WORDS`."""
    SLOT_WORDS: Final = 16
