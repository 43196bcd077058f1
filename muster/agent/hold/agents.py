"""Starts an agent that waits for its run, with the guard above it; see `waiting`."""

import os
import signal
import socket
from collections.abc import Collection, Mapping, Sequence

from muster._shared import processes
from muster._shared.contract import WAITING_FLAG


def start_waiting(
    prefix: Sequence[str],
    flags: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cpus: Collection[int] = (),
) -> tuple[int, socket.socket]:
    """Start a guard with its agent, which end with this process.

    Args:
        prefix: the command, without flags.
        flags: the agent's, without a program.
        env: its environment; None means this process's.
        cpus: its affinity; empty means this process's.

    Returns:
        The guard's pid, and our end of the connection to it.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [*prefix, WAITING_FLAG, str(theirs.fileno()), *flags]
    holder = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            signal.set_wakeup_fd(-1)
            processes.set_death_signal(signal.SIGTERM)
            if os.getppid() == holder:
                if cpus:
                    os.sched_setaffinity(0, cpus)
                os.set_inheritable(theirs.fileno(), True)
                os.execve(command[0], command, dict(os.environ if env is None else env))  # noqa: S606  # no shell
        finally:
            os._exit(127)
    theirs.close()
    return pid, ours
