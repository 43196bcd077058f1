"""The agent's side of the status page: creates it, reads what workers report, writes commands.

Each round has one page. It is an anonymous memory file, which workers open as `/proc/<agent>/fd/<n>`. It disappears
with the last process that uses it, however the agent ends, and does not depend on free space in /dev/shm. Its size is
sealed, so that no worker can truncate it while the agent reads (SIGBUS). Only Linux has such files; elsewhere workers
run without a page.

The other side is `muster.worker`; the layout is `_shared.layouts.StatusPageLayout`. What a Trainer reports by HTTP is
kept beside the page, and shown if the rank reports no step by `muster.worker`.
"""

import mmap
import os
import struct
import sys
from collections.abc import Mapping
from typing import NamedTuple

from muster._shared.contract import Env, has_controls, show_controls
from muster._shared.layouts import StatusPageLayout as Layout
from muster._shared.layouts import read_entry, read_phase, read_values
from muster._shared.records import NO_ITEMS, record, replace

_NOEXEC_SEAL = 0x0008
"""MFD_NOEXEC_SEAL of Linux 6.3, which a hardened kernel requires and older kernels refuse.

Source: memfd_create(2).
"""
_ALL_ASKING = (True,) * len(Layout.KINDS)
_HEAD = struct.Struct(f"@{Layout.STRIDE + len(Layout.KINDS)}q")


class SlotStatus(NamedTuple):
    """What one rank has reported. A rank that never called `muster.worker` has no `owner_pid`.

    This is a tuple instead of a record, because nodes read all their slots every second and a record takes twice as
    long to build.
    """

    owner_pid: int | None
    step: int | None
    total: int | None
    phase: str
    """The innermost phase that the rank has named; "" if none."""
    changed_ns: int | None
    """CLOCK_MONOTONIC of the last change of step or phase, or of the last step of any optimizer."""
    saved_step: int | None
    optimizer_steps: int | None
    """Steps of the busiest optimizer, for a rank that reports no steps (`hooks.steps`); None if there are none."""
    asked: tuple[int | None, ...]
    """The step last asked about, by kind (length 4); None if it never asked, or asks about falling steps."""
    is_asking: tuple[bool, ...]
    """Whether the rank asks, by kind (length 4); False for a rank that asked about falling steps."""
    stride: tuple[int, ...]
    """The distance of the last two steps asked about, by kind (length 4); 0 if it asked at most once."""


@record
class ReportedStatus:
    """What a Trainer has reported of its progress."""

    step: int | None = None
    """Steps that it has done, including those of earlier runs that it continues; None if it has not reported any."""
    total: int | None = None
    values: Mapping[str, float] = NO_ITEMS


class StatusPage:
    """The page of one round, mapped in the agent."""

    def __init__(self, *, nproc: int, round_number: int, attempt: int) -> None:
        """Create and map a page with its memory allocated.

        Args:
            nproc: number of slots, one per local rank.
            round_number: the round's, which workers check.
            attempt: the attempt's number, which workers check as well.

        Raises:
            OSError: the system has no memory files, or memory or descriptors ran out.
        """
        size = (nproc + 1) * Layout.BLOCK_BYTES
        self.round_number = round_number
        self._fd = create_allocated("muster-status-page", size)
        try:
            self._memory = mmap.mmap(self._fd, size)
        except BaseException:
            os.close(self._fd)
            raise
        self._words = memoryview(self._memory).cast("q")
        self._words[Layout.SLOTS], self._words[Layout.ROUND], self._words[Layout.ATTEMPT] = nproc, round_number, attempt
        self._words[Layout.MAGIC_WORD] = Layout.MAGIC
        self._reported = ReportedStatus()
        self._reported_base: int | None = None
        """Steps that the Trainer had done before the first one that the optimizer's hook has counted."""

    def build_env(self, local_rank: int) -> dict[str, str]:
        """Build the variable by which the worker of a local rank finds its slot."""
        return {Env.STATUS_PAGE: f"/proc/{os.getpid()}/fd/{self._fd}:{self.round_number}:{local_rank}"}

    @property
    def is_memory_wanted(self) -> bool:
        """Whether a worker wants memory that outlives it, and has no answer yet."""
        return self._words[Layout.MEMORY_WANTED] != 0 and self._words[Layout.MEMORY] == 0

    def answer_memory(self, control_fd: int | None) -> None:
        """Tell the workers by which descriptor of the agent they find that memory; None: there is none."""
        self._words[Layout.MEMORY] = -1 if control_fd is None else control_fd + 1

    def write_command(self, command: int) -> None:
        """Write the command for all workers of the node (`contract.StatusPageLayout.pack_command`); 0 withdraws it."""
        self._words[Layout.COMMAND] = command

    def withdraw_wait(self) -> None:
        """Let ranks go on that wait, because they have got a signal. A step that they save at stays committed."""
        command = self._words[Layout.COMMAND]
        if not Layout.is_committed(command) or Layout.get_kind(command) in (Layout.PAUSE, Layout.JOIN):
            self.write_command(0)

    def write_deadline(self, deadline_ns: int) -> None:
        """Write when the workers will be ended, by CLOCK_MONOTONIC; 0 means that there is no limit."""
        self._words[Layout.DEADLINE_NS] = deadline_ns

    def read_slot(self, local_rank: int) -> SlotStatus:
        """Read what a rank has reported. The worker need not help: it may hold its GIL, hang or be stopped."""
        owner, step, total, phase, changed_ns, saved, optimizer_steps, _values, *kinds = _HEAD.unpack_from(
            self._memory, (local_rank + 1) * Layout.BLOCK_BYTES
        )
        asked, stride = kinds[: len(Layout.KINDS)], kinds[len(Layout.KINDS) :]
        return SlotStatus(
            owner_pid=owner or None,
            step=_clean(step - 1),
            total=_clean(total) or None,
            phase=read_phase(self._memory, local_rank, phase) if phase else "",
            changed_ns=changed_ns or None,
            saved_step=_clean(saved - 1),
            optimizer_steps=_clean(optimizer_steps) or None,
            asked=tuple([word - 1 if word > 0 else None for word in asked]),
            is_asking=_ALL_ASKING if Layout.NOT_ASKING not in asked else tuple(w != Layout.NOT_ASKING for w in asked),
            stride=tuple(stride),
        )

    def read_waiting(self, local_rank: int) -> int | None:
        """Read the step at which a rank waits for nodes that join; None if it does not."""
        return _clean(self._words[(local_rank + 1) * Layout.WORDS + Layout.WAITING] - 1)

    def read_stays(self, local_rank: int) -> int | None:
        """Read the process that can leave the round and take part in the next one; None if the rank has none."""
        owner, stays = (self._words[(local_rank + 1) * Layout.WORDS + word] for word in (Layout.OWNER, Layout.STAYS))
        return owner if stays == 1 and owner > 0 else None

    def record_reported(self, local_rank: int, status: ReportedStatus) -> None:
        """Record what the Trainer of a local rank reports. At its end it names no step, and the last one stays."""
        if status.step is not None:
            self._reported_base = status.step - (self.read_slot(local_rank).optimizer_steps or 0)
        self._reported = replace(
            status, total=status.total or self._reported.total, values=status.values or self._reported.values
        )

    def read_shown(self, local_rank: int) -> SlotStatus:
        """Read a slot for people: where a Trainer has reported its step, all ranks of the node have one.

        The Trainer reports only every few seconds. In between, each rank's optimizer continues the count.
        """
        slot = self.read_slot(local_rank)
        if slot.step is not None or self._reported_base is None:
            return slot
        step = min(max(0, self._reported_base + (slot.optimizer_steps or 0)), self._reported.total or Layout.MAX_STEP)
        return slot._replace(step=step, total=self._reported.total)

    def read_first(self, local_rank: int) -> tuple[int, int] | None:
        """Read a rank's step count after its first step, and that step's time by CLOCK_MONOTONIC in ns; None: no step.

        Steps are counted as in `read_shown`.
        """
        block = (local_rank + 1) * Layout.WORDS
        done, at_ns = self._words[block + Layout.FIRST], self._words[block + Layout.FIRST_NS]
        if self._reported_base is not None and self.read_slot(local_rank).step is None:
            done += self._reported_base + 1
        return (done, at_ns) if 0 < done <= Layout.MAX_STEP and at_ns > 0 else None

    def read_verdict(self, local_rank: int) -> tuple[str, str] | None:
        """Read what the rank has said should follow its end, and why; None if nothing."""
        text = read_entry(self._memory, local_rank, Layout.VERDICT, Layout.VERDICT_BYTES)
        if not text or not text.startswith((Layout.VERDICT_STOP, Layout.VERDICT_ELSEWHERE)):
            return None
        verdict, _, reason = show_controls(text.decode(errors="replace")).partition(" ")
        return verdict, reason

    def read_debugger(self, local_rank: int) -> int:
        """Read what the rank requests of the terminal: `Layout.DEBUGGER_NONE`, `_WANTS` or `_QUIT`."""
        return self._words[(local_rank + 1) * Layout.WORDS + Layout.DEBUGGER]

    def write_terminal(self, local_rank: int, answer: int) -> None:
        """Answer the rank's request with `Layout.TERMINAL_LENT` or `_NONE`; 0 withdraws the answer."""
        self._words[(local_rank + 1) * Layout.WORDS + Layout.TERMINAL] = answer

    def read_values(self, local_rank: int) -> dict[str, float]:
        """Read the values that a rank shows, by name. Entries that are being written are omitted.

        For a rank that shows none, return what a Trainer has reported.
        """
        return read_values(self._memory, local_rank) or dict(self._reported.values)

    def read_saved(self, local_rank: int) -> tuple[int, str] | None:
        """Read step and path of the rank's last checkpoint; None if there is none, or it is being written.

        The path is "" if none can be used.
        """
        text = read_entry(self._memory, local_rank, Layout.SAVED_PATH, 8 + Layout.PATH_BYTES)
        saved = self._words[(local_rank + 1) * Layout.WORDS + Layout.SAVED]
        if text is None or saved <= 0 or int.from_bytes(text[:8], sys.byteorder) != saved:
            return None
        path = text[8:].decode(errors="replace")
        return saved - 1, "" if has_controls(path) else path

    def read_checkpoint(self) -> tuple[int, str] | None:
        """Read the step that all ranks of the node saved last, and the path that the lowest of them has named.

        None means that one of them has saved another step, or none. The path "" means that none has named one.
        """
        first = self.read_saved(0)
        if first is None:
            return None
        found = [first, *map(self.read_saved, range(1, self._words[Layout.SLOTS]))]
        if any(each is None or each[0] != first[0] for each in found):
            return None
        return first[0], next((each[1] for each in found if each is not None and each[1]), "")

    def close(self) -> None:
        """Unmap and close the page; workers that have mapped it keep it. Idempotent."""
        if self._fd >= 0:
            self._words.release()
            self._memory.close()
            os.close(self._fd)
            self._fd = -1


def _clean(number: int) -> int | None:
    """Return a step or number of steps; None if there is none, or if the worker has written something else."""
    return number if 0 <= number <= Layout.MAX_STEP else None


def create_memory_file(name: str, size: int) -> int:
    """Create a memory file of a sealed size; its memory is allocated when something is written.

    Raises: OSError: the system has no memory files, or descriptors ran out.
    """
    if not hasattr(os, "memfd_create"):
        raise OSError("this system has no memory files (memfd_create)")
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        fd = os.memfd_create(name, flags | _NOEXEC_SEAL)
    except OSError:
        fd = os.memfd_create(name, flags)
    try:
        os.ftruncate(fd, size)
        import fcntl

        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(fd)
        raise
    return fd


def create_allocated(name: str, size: int) -> int:
    """Create a memory file with its memory allocated: a page that is missing later would cause a SIGBUS.

    Raises:
        OSError: as `create_memory_file`, or memory ran out.
    """
    fd = create_memory_file(name, size)
    try:
        os.posix_fallocate(fd, 0, size)
    except BaseException:
        os.close(fd)
        raise
    return fd
