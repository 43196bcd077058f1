"""The agent's error tree: which part failed decides the message and the exit code.

    MusterError
    ├── UsageError          the caller's: a flag, a variable, a missing script                  exit 2
    ├── EnvironmentFault    the machine's: no memory, no descriptors, no such interpreter        exit 1
    │   └── SpawnError      a worker could not be started
    └── InternalError       muster's: a broken invariant                                         exit 1

A worker's failure is data (`_shared.reports.Failure`), never an exception. Only `launch` maps these to exit codes; what
the job's end maps to, `node.decisions` does.
"""

from muster._shared.contract import ExitCode


class MusterError(Exception):
    """Root of the agent's own errors; `str()` is one clear line for the console."""

    exit_code: int = ExitCode.WORKERS_FAILED


class UsageError(MusterError, ValueError):
    """The caller's mistake. The message names the value and what is allowed."""

    exit_code = ExitCode.USAGE


class EnvironmentFault(MusterError):
    """The machine lacks something. The message names it."""


class SpawnError(EnvironmentFault):
    """A worker could not be started."""

    def __init__(self, reason: str, errno: int | None = None) -> None:
        """Keep the reason in one line, and the `errno` of the failed call; None if no system call has failed."""
        super().__init__(reason)
        self.errno = errno


class InternalError(MusterError):
    """A bug in muster: an invariant does not hold. Please report it."""
