"""Starts one process for a replica, so that it ends with the supervisor."""

import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
        OSError: no process or descriptor is left.
    """
    with open(os.devnull, "rb") as null:
        streams = (null.fileno(), stdout_fd, stderr_fd)
        try:
            return processes.spawn_program(
                launch.command, launch.env, launch.cwd, streams, launch.keep_fds, death_signal=signal.SIGTERM
            )
        except OSError as error:
            if error.filename is None:
                raise
            raise StartError(f"{error.filename!r}: {error.strerror}") from error
