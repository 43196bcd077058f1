"""The agent's error tree: whose fault it was decides what the command line says and exits with.

    MusterError
    ├── UsageError          the caller's: a flag, a variable, a script that is not there        exit 2
    ├── EnvironmentFault    the machine's: no memory, no descriptors, no such interpreter        exit 1
    │   └── SpawnError      a worker could not be started
    ├── RendezvousError     the job's nodes did not come together in time                        exit 69
    └── InternalError       ours: a broken invariant                                             exit 1

A worker's failure is data (`report.Failure`), never an exception. Only `cli.main` maps these to exit codes.
"""

from muster._contract import ExitCode


class MusterError(Exception):
    """Root of all errors the agent raises on purpose; `str()` is one clear line for the console."""

    exit_code: int = ExitCode.WORKERS_FAILED


class UsageError(MusterError, ValueError):
    """The caller's fault: names the value and what is allowed."""

    exit_code = ExitCode.USAGE


class EnvironmentFault(MusterError):
    """The machine's fault: names what was missing."""


class SpawnError(EnvironmentFault):
    """A worker could not be started."""


class RendezvousError(MusterError):
    """The nodes did not come together, or came apart and could not be joined again."""

    exit_code = ExitCode.RENDEZVOUS


class InternalError(MusterError):
    """Our fault: an invariant does not hold. Please report it."""
