"""Starts one process for a replica, so that it ends with the supervisor.

`subprocess` does not fit for two reasons. It collects the child's status itself, while the supervisor must also reap
orphans that it did not start, with `waitpid(-1)`. And code that runs between fork and exec cannot report what failed.
"""

import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from muster._shared import processes
from muster.schedulers.supervision.driver import StartError


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A process to start."""

    command: Sequence[str]
    """Program (absolute path) and arguments."""
    env: Mapping[str, str]
    cwd: str
    keep_fds: Sequence[int] = ()
    """Descriptors that it inherits under the same numbers."""


def spawn(launch: Launch, stdout_fd: int, stderr_fd: int) -> int:
    """Start a process that leads its own session and gets SIGTERM when the calling thread ends.

    Args:
        launch: what to start.
        stdout_fd: becomes its standard output.
        stderr_fd: becomes its standard error.

    Returns:
        Its pid. The caller waits for it.

    Raises:
        StartError: the folder or the program is not there.
    """
    parent = os.getpid()
    error_read, error_write = os.pipe()  # close-on-exec: reading ends when exec succeeds
    pid = os.fork()
    if pid == 0:
        os.close(error_read)
        _exec_program(launch, (stdout_fd, stderr_fd), parent, error_write)
    os.close(error_write)
    with open(error_read, "rb") as errors:
        reason = errors.read().decode(errors="replace")
    if reason:
        os.waitpid(pid, 0)
        raise StartError(reason)
    return pid


def _exec_program(launch: Launch, outputs: tuple[int, int], parent: int, error_fd: int) -> NoReturn:
    """Become the program, or write the reason of a failure to `error_fd`. The child calls it."""
    what = launch.cwd
    try:
        os.setsid()
        processes.set_death_signal(signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(128 + signal.SIGTERM)
        null = os.open(os.devnull, os.O_RDONLY)
        for fd, number in ((null, 0), (outputs[0], 1), (outputs[1], 2)):
            os.dup2(fd, number)
        for fd in launch.keep_fds:
            os.set_inheritable(fd, True)
        for signum in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE, signal.SIGTERM):
            signal.signal(signum, signal.SIG_DFL)
        os.chdir(launch.cwd)
        what = launch.command[0]
        os.execve(launch.command[0], list(launch.command), dict(launch.env))  # noqa: S606  # no shell, on purpose
    except OSError as error:
        os.write(error_fd, f"{what!r}: {error.strerror}".encode())
    finally:
        os._exit(127)
