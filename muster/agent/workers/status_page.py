"""The agent's side of the status page: creates it, reads what workers report, writes commands.

One page per round. It is an anonymous memory file, which workers open as `/proc/<agent>/fd/<n>`: it goes with the last
process that uses it, however the agent ends, and no full /dev/shm is in its way. Its size is sealed, so that no worker
can cut it under the agent's reads (SIGBUS). Only Linux has it; elsewhere workers run without a page.

The other side is `muster.worker`; the layout is `_shared.contract.StatusPageLayout`.
"""

import mmap
import os
import struct
import sys
import zlib
from typing import NamedTuple

from muster._shared.contract import Env, has_controls
from muster._shared.contract import StatusPageLayout as Layout

_NOEXEC_SEAL = 0x0008
"""MFD_NOEXEC_SEAL of Linux 6.3, which a hardened kernel demands; older kernels refuse it.

Source: memfd_create(2).
"""
_ALL_ASKING = (True,) * len(Layout.KINDS)
_HEAD = struct.Struct(f"@{Layout.STRIDE + len(Layout.KINDS)}q")


class SlotStatus(NamedTuple):
    """What one rank has reported. A rank that never called `muster.worker` has no `owner_pid`.

    A tuple and no record: nodes read all their slots every second, and a record takes twice as long to build.
    """

    owner_pid: int | None
    step: int | None
    total: int | None
    phase: str
    """The innermost phase that the rank has named; "": none."""
    changed_ns: int | None
    """CLOCK_MONOTONIC of the last change of step or phase, or of the last step of any optimizer."""
    saved_step: int | None
    optimizer_steps: int | None
    """What the busiest optimizer has done, for a rank that reports no steps (`hooks.steps`); None: nothing."""
    asked: tuple[int | None, ...]
    """Length 3, by kind: the step last asked about; None: never asked, or it asks about falling steps."""
    is_asking: tuple[bool, ...]
    """Length 3, by kind: False for a rank that asked about falling steps."""
    stride: tuple[int, ...]
    """Length 3, by kind: the distance of the last two steps asked about; 0: asked at most once."""


class StatusPage:
    """The page of one round, mapped in the agent."""

    def __init__(self, *, nproc: int, round_number: int, attempt: int) -> None:
        """Create and map a page with its memory allocated.

        Args:
            nproc: number of slots, one per local rank.
            round_number: of the round; workers check it.
            attempt: likewise.

        Raises:
            OSError: the system has no memory files, or memory or descriptors ran out.
        """
        size = (nproc + 1) * Layout.BLOCK_BYTES
        self.round_number = round_number
        self._fd = _create_memory_file(size)
        try:
            self._memory = mmap.mmap(self._fd, size)
        except BaseException:  # whatever it is, it is raised again
            os.close(self._fd)
            raise
        self._words = memoryview(self._memory).cast("q")
        self._words[Layout.SLOTS], self._words[Layout.ROUND], self._words[Layout.ATTEMPT] = nproc, round_number, attempt
        self._words[Layout.MAGIC_WORD] = Layout.MAGIC

    def build_env(self, local_rank: int) -> dict[str, str]:
        """Build the variable by which the worker of a local rank finds its slot."""
        return {Env.STATUS_PAGE: f"/proc/{os.getpid()}/fd/{self._fd}:{self.round_number}:{local_rank}"}

    def write_command(self, command: int) -> None:
        """Write the command for all workers of the node (`contract.StatusPageLayout.pack_command`); 0 withdraws it."""
        self._words[Layout.COMMAND] = command

    def write_deadline(self, deadline_ns: int) -> None:
        """Write when the workers will be ended, by CLOCK_MONOTONIC; 0: no limit."""
        self._words[Layout.DEADLINE_NS] = deadline_ns

    def read_slot(self, local_rank: int) -> SlotStatus:
        """Read what a rank has reported. Needs nothing of the worker: it may hold its GIL, hang or be stopped."""
        owner, step, total, phase, changed_ns, saved, optimizer_steps, _values, *kinds = _HEAD.unpack_from(
            self._memory, (local_rank + 1) * Layout.BLOCK_BYTES
        )
        stop, checkpoint, pause = asked = kinds[:3]
        return SlotStatus(
            owner_pid=owner or None,
            step=_clean(step - 1),
            total=_clean(total) or None,
            phase=self._read_phase(local_rank, phase) if phase else "",
            changed_ns=changed_ns or None,
            saved_step=_clean(saved - 1),
            optimizer_steps=_clean(optimizer_steps) or None,
            asked=(
                stop - 1 if stop > 0 else None,
                checkpoint - 1 if checkpoint > 0 else None,
                pause - 1 if pause > 0 else None,
            ),
            is_asking=_ALL_ASKING if Layout.NOT_ASKING not in asked else tuple(w != Layout.NOT_ASKING for w in asked),
            stride=tuple(kinds[3:]),
        )

    def read_debugger(self, local_rank: int) -> int:
        """Read what the rank asks of the terminal: `Layout.DEBUGGER_NONE`, `_WANTS` or `_QUIT`."""
        return self._words[(local_rank + 1) * Layout.WORDS + Layout.DEBUGGER]

    def write_terminal(self, local_rank: int, answer: int) -> None:
        """Answer it with `Layout.TERMINAL_LENT` or `_NONE`; 0 takes the answer back."""
        self._words[(local_rank + 1) * Layout.WORDS + Layout.TERMINAL] = answer

    def read_values(self, local_rank: int) -> dict[str, float]:
        """Read the values a rank shows, by name. Entries that are being written are left out."""
        values: dict[str, float] = {}
        block = (local_rank + 1) * Layout.WORDS
        for index in range(min(self._words[block + Layout.VALUES], Layout.TABLE_ENTRIES)):
            word = Layout.VALUE_TABLE + index * Layout.VALUE_ENTRY_WORDS
            name = self._read_text(local_rank, word, Layout.NAME_BYTES)
            if name is not None:
                at = 8 * (block + word + Layout.VALUE_ENTRY_WORDS - 1)
                values[name.decode(errors="replace")] = struct.unpack_from("@d", self._memory, at)[0]
        return values

    def read_saved(self, local_rank: int) -> tuple[int, str] | None:
        """Read step and path ("": none that can be used) of the rank's last checkpoint; None: none, or in between."""
        text = self._read_text(local_rank, Layout.SAVED_PATH, 8 + Layout.PATH_BYTES)
        saved = self._words[(local_rank + 1) * Layout.WORDS + Layout.SAVED]
        if text is None or saved <= 0 or int.from_bytes(text[:8], sys.byteorder) != saved:
            return None
        path = text[8:].decode(errors="replace")
        return saved - 1, "" if has_controls(path) else path

    def read_checkpoint(self) -> tuple[int, str] | None:
        """Read the step that all ranks of the node have saved last, and the path that the lowest of them has named.

        None: one of them has saved another step, or none. Path "": none has named one.
        """
        first = self.read_saved(0)
        if first is None:
            return None
        found = [first, *map(self.read_saved, range(1, self._words[Layout.SLOTS]))]
        if any(each is None or each[0] != first[0] for each in found):
            return None
        return first[0], next((each[1] for each in found if each is not None and each[1]), "")

    def close(self) -> None:
        """Unmap and close; workers that have mapped the page keep it. Idempotent."""
        if self._fd >= 0:
            self._words.release()
            self._memory.close()
            os.close(self._fd)
            self._fd = -1

    def _read_phase(self, local_rank: int, number: int) -> str:
        if not 1 <= number <= Layout.TABLE_ENTRIES:
            return ""
        word = Layout.PHASE_TABLE + (number - 1) * Layout.PHASE_ENTRY_WORDS
        name = self._read_text(local_rank, word, Layout.NAME_BYTES)
        return "" if name is None else name.decode(errors="replace")

    def _read_text(self, local_rank: int, word: int, limit_bytes: int) -> bytes | None:
        head = self._words[(local_rank + 1) * Layout.WORDS + word]
        length, checksum = head >> 32, head & 0xFFFFFFFF
        if not 0 < length <= limit_bytes:
            return None
        start = (local_rank + 1) * Layout.BLOCK_BYTES + 8 * (word + 1)
        text = self._memory[start : start + length]
        return text if zlib.crc32(text) == checksum else None


def _clean(number: int) -> int | None:
    """A step or number of steps; None where there is none, or where the worker has written something else."""
    return number if 0 <= number <= Layout.MAX_STEP else None


def _create_memory_file(size: int) -> int:
    """Create a memory file of a sealed size with its memory allocated: a page that is missing later is a SIGBUS.

    Raises:
        OSError: see `StatusPage`.
    """
    if not hasattr(os, "memfd_create"):
        raise OSError("this system has no memory files (memfd_create)")
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        fd = os.memfd_create("muster-status-page", flags | _NOEXEC_SEAL)
    except OSError:
        fd = os.memfd_create("muster-status-page", flags)
    try:
        os.posix_fallocate(fd, 0, size)
        import fcntl

        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except BaseException:  # whatever it is, it is raised again
        os.close(fd)
        raise
    return fd
