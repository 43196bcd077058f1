"""Which run has a hold: the file that the run's supervisor has locked as long as it lives. Standard library only."""

import fcntl
import os
from pathlib import Path


def lock_hold(path: str | Path, name: str) -> int | None:
    """Take a hold for a run, and return a descriptor that keeps it. None: another run has it.

    Args:
        path: the file.
        name: the run's.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    os.ftruncate(fd, 0)
    os.pwrite(fd, name.encode(), 0)
    return fd


def find_owner(path: str | Path) -> str:
    """Return the name of the run that has a hold. "": none has."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return ""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return os.pread(fd, 4096, 0).decode(errors="replace") or "another run"
    finally:
        os.close(fd)
    return ""
