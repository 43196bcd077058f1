"""Stopping a whole job for a while (Ctrl-Z), and continuing it: the guard's part, imported when it is needed.

A terminal's Ctrl-Z reaches the guard only: the agent is in a process group of its own, and each worker in a session of
its own. The guard stops all of them, then itself, so that the shell gets the terminal back. `fg`, or SIGCONT, continues
them. The agent's clocks stand still until then, because a limit that runs out while no process may run says nothing.

The lease stands still only if no other node can go on: a node alone has none, and an adapter says that it stops all
nodes together. Otherwise the others replace this node, and its workers are killed before they continue.
"""

import os
import signal
import time

from muster._shared import processes

_LIMIT_S = 2.0
"""How long stopping takes at most. A process in uninterruptible sleep stops when that ends."""


def stop_tree(guarded_pid: int) -> list[int]:
    """Stop the guarded process, then all descendants of this process, and return them. The first one starts no more."""
    end_s = time.monotonic() + _LIMIT_S
    processes.send_signal([guarded_pid], signal.SIGSTOP)
    while True:
        found = processes.list_descendants(os.getpid())
        running = [pid for pid in found if not _is_stopped(pid)]
        if not running or time.monotonic() > end_s:
            return found
        processes.send_signal(running, signal.SIGSTOP)
        time.sleep(0.002)


def continue_tree() -> None:
    """Continue all descendants of this process."""
    processes.send_signal(processes.list_descendants(os.getpid()), signal.SIGCONT)


def _is_stopped(pid: int) -> bool:
    stat = processes.read_stat(pid)
    return stat is None or stat[0] in ("T", "t", "Z", "X")


def stop_self(*, is_blocked: bool) -> None:
    """Stop this process until SIGCONT.

    It does not use SIGTSTP, which the kernel ignores where no shell could continue the process.

    Args:
        is_blocked: SIGCONT is blocked in this process: wait for it. One that came while the others were being stopped
            counts, and the first process of a container, which cannot stop itself, waits, too.
    """
    if is_blocked:
        signal.sigwait({signal.SIGCONT})
    else:
        os.kill(os.getpid(), signal.SIGSTOP)
