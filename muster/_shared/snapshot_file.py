"""The memory that holds snapshots: what the agent, its workers and `muster.snapshots` agree on. Standard library only.

The agent creates these memory files when a worker wants them (`StatusPageLayout.MEMORY_WANTED`), and keeps their
descriptors, so that they outlive workers and end with the agent. Workers open them as `/proc/AGENT/fd/N`:

- one *control file* per node: a header that the agent writes, then one block of 4 KiB per local rank that the rank's
  worker writes (but for `PIN`). `Env.SNAPSHOTS` names it;
- one *content file* per local rank. Its size is fixed and sealed. Slot n begins at `n * SLOT_SPACE`, and memory is used
  only where something was written. What is in a slot is the worker's own affair: the agent copies `BYTES` of it.

A generation is named by lineage and step. A lineage is a positive number, given by the leader to each round. One of a
later round is greater. Every field is one aligned native 8-byte word, written by one store, as in the status page. The
worker's order is what makes a slot whole: `WRITING` before the first byte changes, `COMPLETE` after the last. A slot
that is `WRITING` when its worker has ended is empty, and the agent marks it so before it starts the next one.

A rank has three slots. Three things are never overwritten: the confirmed generation (at first the base), the one that
the agent holds while it is being confirmed, and a slot that is being sent. The agent writes `HOLD` and `PIN` and then
reads the slot's state again. The worker writes `WRITING` and then reads them again. So one of the two sees the other.
"""

import mmap
import os
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from muster._shared.contract import FORMAT, Env, check_format
from muster._shared.layouts import SnapshotBlock as Block
from muster._shared.layouts import SnapshotHeader as Header
from muster._shared.layouts import StatusPageLayout as Layout

SLOTS: Final = Block.SLOTS
SLOT_SPACE: Final = Block.SLOT_SPACE
"""Distance of the slots in a content file, and the most that one can hold."""
BLOCK_BYTES: Final = Header.BYTES
_WORDS: Final = BLOCK_BYTES // 8
MAGIC: Final = Header.MAGIC_VALUE
EMPTY, WRITING, COMPLETE = 0, 1, 2
_ANSWER_LIMIT_S: Final = 30.0
"""An agent that has not answered by then keeps no snapshots. It looks four times a second."""
_ANSWER_PAUSE_S: Final = 0.005


class _Slot:
    STATE, LINEAGE, STEP, BYTES, GLOBAL_RANK, WORLD_SIZE, IS_REPLICATED, SERIAL = range(8)


class Slot(NamedTuple):
    """What is in a slot."""

    state: int
    lineage: int
    step: int
    bytes: int
    """Length of the content."""
    global_rank: int
    """The rank whose state it is and, below, the number of ranks, when it was saved."""
    world_size: int
    is_replicated: bool
    """The tensors are the same on all ranks: any rank's serve any other's."""

    @property
    def generation(self) -> tuple[int, int] | None:
        """Lineage and step. None: the slot is not complete."""
        return (self.lineage, self.step) if self.state == COMPLETE else None


class Control:
    """The control file, mapped."""

    def __init__(self, memory: mmap.mmap) -> None:
        """Take a mapping of the whole file."""
        self.words = memoryview(memory).cast("q")

    @property
    def lineage(self) -> int:
        """The lineage of the round."""
        return self.words[Header.LINEAGE]

    @property
    def base(self) -> tuple[int, int] | None:
        """Lineage and step of the generation that the round continues. None: it begins anew."""
        step = self.words[Header.BASE_STEP]
        return (self.words[Header.BASE_LINEAGE], step - 1) if step else None

    @property
    def confirmed(self) -> tuple[int, int] | None:
        """The newest generation that all ranks are known to have."""
        step = self.words[Header.CONFIRMED]
        return (self.words[Header.LINEAGE], step - 1) if step else self.base

    def read_block(self, local_rank: int, word: int) -> int:
        """Read a word of `Block`."""
        return self.words[(local_rank + 1) * _WORDS + word]

    def write_block(self, local_rank: int, word: int, value: int) -> None:
        """Write a word of `Block`."""
        self.words[(local_rank + 1) * _WORDS + word] = value

    def read_slots(self, local_rank: int) -> tuple[Slot, ...]:
        """Read the three slots of a rank."""
        first = (local_rank + 1) * _WORDS + Block.SLOT
        starts = range(first, first + SLOTS * Block.SLOT_WORDS, Block.SLOT_WORDS)
        return tuple(_build_slot(*self.words[at : at + 7]) for at in starts)

    def read_serial(self, local_rank: int, slot: int) -> int:
        """Return how often a save into the slot has begun: the same before and after means that nothing was written."""
        return self.words[self._find_slot(local_rank, slot) + _Slot.SERIAL]

    def empty_slot(self, local_rank: int, slot: int) -> None:
        """Make a slot empty. Its memory stays, for the next save."""
        self.words[self._find_slot(local_rank, slot) + _Slot.STATE] = EMPTY

    def find_slot(self, local_rank: int, generation: tuple[int, int] | None) -> int | None:
        """Return the slot that has a generation of this rank, complete. None: none has."""
        found = [slot.generation for slot in self.read_slots(local_rank)]
        return found.index(generation) if generation is not None and generation in found else None

    def begin_save(self, local_rank: int) -> int | None:
        """Choose the slot for the next save and mark it as being written.

        Returns:
            Its number. From now on its old content counts for nothing. None: no slot is free. This was counted, and the
            save is left out.
        """
        state = _Slot.STATE
        for _ in range(100):
            slots = self.read_slots(local_rank)
            chosen = self._choose(local_rank, slots)
            if chosen is None:
                break
            at = self._find_slot(local_rank, chosen)
            self.words[at + state] = WRITING
            if self._choose(local_rank, slots) == chosen:  # the agent has not changed it since
                self.words[at + _Slot.SERIAL] += 1
                return chosen
            self.words[at + state] = slots[chosen].state
        self.write_block(local_rank, Block.SKIPPED, self.read_block(local_rank, Block.SKIPPED) + 1)
        return None

    def end_save(self, local_rank: int, slot: int, saved: Slot) -> None:
        """Say that the slot is whole, after its last byte was written. `saved.state` is not used."""
        at = self._find_slot(local_rank, slot)
        for word, value in enumerate(saved[1:], _Slot.LINEAGE):
            self.words[at + word] = value
        self.words[at + _Slot.STATE] = COMPLETE

    def _choose(self, local_rank: int, slots: Sequence[Slot]) -> int | None:
        confirmed, hold = self.confirmed, self.words[Header.HOLD]
        pin = self.read_block(local_rank, Block.PIN)
        held = choose_held(slots, self.words[Header.LINEAGE], hold - 1) if hold else None
        return choose_slot(slots, confirmed, held, pin - 1)

    def _find_slot(self, local_rank: int, slot: int) -> int:
        return (local_rank + 1) * _WORDS + Block.SLOT + slot * Block.SLOT_WORDS


def _build_slot(
    state: int, lineage: int, step: int, bytes_: int, global_rank: int, world_size: int, is_replicated: int
) -> Slot:
    return Slot(state, lineage, step, bytes_, global_rank, world_size, bool(is_replicated))


def choose_held(slots: Sequence[Slot], lineage: int, step: int) -> tuple[int, int] | None:
    """Return the oldest complete generation of the lineage at or above the step."""
    return min((g for slot in slots if (g := slot.generation) and g[0] == lineage and g[1] >= step), default=None)


def choose_slot(
    slots: Sequence[Slot], confirmed: tuple[int, int] | None, held: tuple[int, int] | None, pinned: int
) -> int | None:
    """Choose the slot to write to: an empty one, else the one with the oldest generation that nothing needs.

    Args:
        slots: all of a rank.
        confirmed: is never written to.
        held: is never written to.
        pinned: the slot that is being sent to another node, which is never written to. -1: none.
    """
    kept = {generation for generation in (confirmed, held) if generation is not None}
    free = [n for n, slot in enumerate(slots) if n != pinned and slot.generation not in kept]
    return min(free, key=lambda n: slots[n].generation or (-1, -1), default=None)


# -- a worker opens them -----------------------------------------------------------------------------------------------


class WorkerFiles(NamedTuple):
    """The files as one worker has them."""

    control: Control
    agent: str
    """`/proc/AGENT/fd`."""
    local_rank: int
    ranks: int
    """The number of ranks of this node."""

    def open_content(self, local_rank: int) -> int:
        """Open the content file of a rank of this node. The caller closes it. Only the own one may be written to.

        Raises:
            OSError: it cannot be opened.
        """
        flags = os.O_RDWR if local_rank == self.local_rank else os.O_RDONLY
        return os.open(f"{self.agent}/{self.control.read_block(local_rank, Block.FILE)}", flags | os.O_CLOEXEC)


def open_files(where: str) -> WorkerFiles | None:
    """Open the files of this worker, and claim the rank's block for this process.

    Args:
        where: what `find_files` returns.

    Returns:
        None in a process that another one of the rank precedes.

    Raises:
        OSError: they cannot be opened: of another user, or in another namespace of processes.
        ValueError: they have another format, or are of another round.
    """
    path, round_number, rank = where.rsplit(":", 2)
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        control = Control(mmap.mmap(fd, os.fstat(fd).st_size))
    finally:
        os.close(fd)
    words, local_rank = control.words, int(rank)
    if words[Header.MAGIC] != MAGIC:
        check_format(words[Header.MAGIC] ^ MAGIC ^ FORMAT, "it")
    if words[Header.ROUND] != int(round_number) or not 0 <= local_rank < words[Header.RANKS]:
        raise ValueError("it belongs to another round")
    owner = control.read_block(local_rank, Block.OWNER)
    if owner not in (0, os.getpid()) and os.path.exists(f"/proc/{owner}"):
        return None
    control.write_block(local_rank, Block.OWNER, os.getpid())
    words[Header.USED] = 1
    return WorkerFiles(control, path.rpartition("/")[0], local_rank, words[Header.RANKS])


def find_files(environ: Mapping[str, str]) -> str | None:
    """Return where this rank's files are. The agent makes them now if no worker has wanted them before.

    Returns:
        Path of the control file, round and local rank, with colons between them. None outside muster, and where
        snapshots are switched off or cannot be kept.

    Raises:
        OSError: the status page cannot be opened: of another user, or in another namespace of processes.
    """
    page = environ.get(Env.STATUS_PAGE)
    if environ.get(Env.SNAPSHOTS) or not page:
        return environ.get(Env.SNAPSHOTS)
    path, round_number, rank = page.rsplit(":", 2)
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    with mmap.mmap(fd, Layout.BLOCK_BYTES) as memory, memoryview(memory) as view, view.cast("q") as words:
        os.close(fd)
        if words[Layout.MAGIC_WORD] != Layout.MAGIC or words[Layout.ROUND] != int(round_number):
            return None
        words[Layout.MEMORY_WANTED] = 1
        end_s = time.monotonic() + _ANSWER_LIMIT_S
        while words[Layout.MEMORY] == 0 and time.monotonic() < end_s:
            time.sleep(_ANSWER_PAUSE_S)
        control = words[Layout.MEMORY]
    return f"{path.rpartition('/')[0]}/{control - 1}:{round_number}:{rank}" if control > 0 else None


# -- the limit ---------------------------------------------------------------------------------------------------------


class MemoryLimit(NamedTuple):
    """What one rank's state may take at most, and what it follows from."""

    state_bytes: int
    """The size of one state of one rank."""
    node_bytes: int
    """The size of all that this node keeps."""
    states: int
    """How many states are kept for each rank: three, and two more for each copy of a neighbour's."""


def compute_limit(
    header: Sequence[int], own_bytes: int, read_available: "Callable[[], int | None] | None" = None
) -> MemoryLimit | None:
    """Compute how large the state of a rank may be. None: nothing limits it.

    Args:
        header: words of the control file.
        own_bytes: what the content files of this node use already: it counts as free (`measure_used`).
        read_available: reads the free memory. None: `read_available_bytes`.
    """
    limits = [header[Header.LIMIT]] if header[Header.LIMIT] else []
    if header[Header.SHARE]:
        available = (read_available or read_available_bytes)()
        if available is not None:
            limits.append((available + own_bytes) * header[Header.SHARE] // 1000)
    if not limits:
        return None
    states = SLOTS + 2 * header[Header.COPIES]
    return MemoryLimit(min(limits) // (header[Header.RANKS] * states), min(limits), states)


def measure_used(files: WorkerFiles) -> int:
    """Return the bytes of memory that the content files of this node use."""
    paths = (f"{files.agent}/{files.control.read_block(rank, Block.FILE)}" for rank in range(files.ranks))
    return sum(os.stat(path).st_blocks * 512 for path in paths)


def read_available_bytes(root: str = "/") -> int | None:
    """Read how much memory this process can still take: of the machine, and of all cgroups that it is in.

    Cached files that the kernel drops before it kills anything count as free. None: the system does not say.

    Args:
        root: where `proc` and `sys` are.
    """
    meminfo = (line.split() for line in _read(f"{root}proc/meminfo").splitlines())
    found = [int(words[1]) * 1024 for words in meminfo if words[0] == "MemAvailable:"]
    for line in _read(f"{root}proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory") and "memory" not in controllers.split(","):
            continue
        base, names = (
            (f"{root}sys/fs/cgroup/memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"))
            if controllers
            else (f"{root}sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file"))
        )
        parts = [part for part in path.split("/") if part and part != ".."]
        for depth in range(len(parts), -1, -1):
            free = _read_free(os.path.join(base, *parts[:depth]), *names)
            if free is not None:
                found.append(free)
    return min(found, default=None)


def _read_free(folder: str, most_name: str, used_name: str, cached_name: str) -> int | None:
    most, used = _read(f"{folder}/{most_name}").strip(), _read(f"{folder}/{used_name}").strip()
    if not most.isdigit() or not used.isdigit():
        return None
    stat = (line.split() for line in _read(f"{folder}/memory.stat").splitlines())
    cached = next((int(words[1]) for words in stat if words[0] == cached_name), 0)
    return max(0, int(most) - max(0, int(used) - cached))


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""


# -- a rank's state on another node ------------------------------------------------------------------------------------

REQUEST: Final = struct.Struct("@qqqqq")
"""Lineage, step, global rank, offset, length. Length 0 asks for the length of the content only."""
ANSWER: Final = struct.Struct("@q")
"""The length of the content, then as many bytes as were asked for. Or a negative number: `NOT_REACHED`, `NOT_KEPT`."""
NOT_REACHED: Final = -1
NOT_KEPT: Final = -2
"""No node of the job has it: it was lost with its node, before another one had a copy."""


class NotKeptError(OSError):
    """No node has what a rank has saved."""


def build_address(control: Control) -> bytes | None:
    """Return the address of the agent's socket.

    The socket is abstract. Only processes that can open the control file know its name.
    """
    first, second = control.words[Header.SOCKET : Header.SOCKET + 2]
    return b"\0muster-snapshots-%016x%016x" % (first, second) if first else None


class RemoteReader:
    """Reads the base of any rank of the job that saved it, through the agent. Close it."""

    def __init__(self, control: Control) -> None:
        """Connect to the agent of this node.

        Raises:
            OSError: it does not answer.
        """
        address, base = build_address(control), control.base
        if address is None or base is None:
            raise OSError("there is no snapshot to read")
        self._base = base
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            self._socket.connect(address)
        except BaseException:  # it is raised again
            self._socket.close()
            raise

    def find_bytes(self, global_rank: int) -> int:
        """Return the length of the content that this rank of the old round has saved.

        Raises:
            NotKeptError: no node has it.
            OSError: no node that can be reached has it.
        """
        return self._ask(global_rank, 0, 0)

    def read(self, global_rank: int, offset: int, into: memoryview) -> None:
        """Read as many bytes of that content as `into` (of bytes) holds.

        Raises:
            OSError: no node has it, or the connection was lost.
        """
        self._ask(global_rank, offset, len(into))
        while into:
            count = self._socket.recv_into(into)
            if not count:
                raise OSError("the agent has closed the connection")
            into = into[count:]

    def close(self) -> None:
        """Close it. May be called again."""
        self._socket.close()

    def _ask(self, global_rank: int, offset: int, length: int) -> int:
        self._socket.sendall(REQUEST.pack(*self._base, global_rank, offset, length))
        answer = self._socket.recv(ANSWER.size, socket.MSG_WAITALL)
        (found,) = ANSWER.unpack(answer) if len(answer) == ANSWER.size else (NOT_REACHED,)
        if found == NOT_KEPT:
            raise NotKeptError(f"no node has what rank {global_rank} has saved")
        if found < 0 or offset + length > found:
            raise OSError(f"no node that can be reached has bytes {offset} to {offset + length} of rank {global_rank}")
        return int(found)
