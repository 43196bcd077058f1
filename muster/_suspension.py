"""Stopping a whole job for a while (Ctrl-Z), and continuing it. The guard's part, and the time that does not count.

A terminal's Ctrl-Z reaches the guard only: the agent is in a process group of its own, and each worker in a session of
its own. The guard stops all of them, then itself, so that the shell gets the terminal back; `fg`, or SIGCONT, continues
them. The agent's clocks stand still meanwhile: a limit that runs out while no process may run says nothing.

The lease stands still only if no other node can go on: a node alone has none, and an adapter says that it stops all
nodes together. Else the others replace this node, and its workers are killed before they continue.
"""

import mmap
import os
import signal
import struct
import time

from muster import _processes

_LIMIT_S = 2.0
"""How long stopping takes at most; a process in uninterruptible sleep stops when that ends."""
_MONOTONIC_AT = 0
_LEASE_AT = 8


class SuspendedTime:
    """How long a job was stopped, in a page that the guard writes and the agent reads."""

    def __init__(self) -> None:
        self._page = mmap.mmap(-1, mmap.PAGESIZE)

    def read_s(self) -> float:
        """In all; seconds of the monotonic clock."""
        return float(struct.unpack_from("d", self._page, _MONOTONIC_AT)[0])

    def read_lease_s(self) -> float:
        """While the lease stood still; seconds of CLOCK_BOOTTIME."""
        return float(struct.unpack_from("d", self._page, _LEASE_AT)[0])

    def add(self, seconds: float, lease_s: float) -> None:
        """Guard's side: the job was stopped for so long."""
        struct.pack_into("dd", self._page, _MONOTONIC_AT, self.read_s() + seconds, self.read_lease_s() + lease_s)


def stop_tree(charge: int) -> list[int]:
    """Stop the charge and all descendants of this process; returns them. The charge goes first: it starts no more."""
    end_s = time.monotonic() + _LIMIT_S
    _processes.send_signal([charge], signal.SIGSTOP)
    while True:
        found = _processes.list_descendants(os.getpid())
        running = [pid for pid in found if not _is_stopped(pid)]
        if not running or time.monotonic() > end_s:
            return found
        _processes.send_signal(running, signal.SIGSTOP)
        time.sleep(0.002)


def continue_tree() -> None:
    """Continue all descendants of this process."""
    _processes.send_signal(_processes.list_descendants(os.getpid()), signal.SIGCONT)


def _is_stopped(pid: int) -> bool:
    stat = _processes.read_stat(pid)
    return stat is None or stat[0] in ("T", "t", "Z", "X")


def stop_self() -> None:
    """Stop this process until SIGCONT. Not by SIGTSTP: the kernel ignores that where no shell could continue it."""
    os.kill(os.getpid(), signal.SIGSTOP)
