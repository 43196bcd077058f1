"""Says what a person can check after a failure whose cause alone does not say it."""

import os
import re
from contextlib import suppress
from typing import Final

from muster._shared.reports import Failure, format_size
from muster._shared.verdicts.causes import DISK, UNKNOWN

_QUOTED_PATH: Final = re.compile(r"'([^'\n]*/[^'\n]*)'|: '([^'\n]+)'")
_KILLED_CODE: Final = 137
"""The exit code of a shell whose program was ended by SIGKILL."""
_KILLED: Final = (
    "find what has sent SIGKILL: the kernel for want of memory (`dmesg -T | grep -i kill` on that host), a limit of "
    "the scheduler or of the container, or another person or program (`kill -9`)"
)
_DISK_CHECKS: Final = (
    ("Disk quota exceeded", "remove files, or ask for a larger quota (`quota -s` shows it)"),
    ("Read-only file system", "write elsewhere; if it was writable before, `dmesg -T` on that host says why"),
    ("Input/output error", "`dmesg -T` on that host shows the errors of the disk"),
)
_FULL_CHECK: Final = "remove files, or write elsewhere"


def find_advice(failure: Failure) -> str:
    """Return what to check or do next, in one line; "" if the cause says enough.

    It looks at file systems only if the failure has an error file. Without one, the disk with the logs may hang.
    """
    if failure.cause == UNKNOWN and (failure.signal == "SIGKILL" or failure.exit_code == _KILLED_CODE):
        return _KILLED
    return _advise_on_disk(failure) if failure.cause == DISK else ""


def _advise_on_disk(failure: Failure) -> str:
    text = f"{failure.evidence}\n{failure.exception or ''}"
    check = next((check for sign, check in _DISK_CHECKS if sign.lower() in text.lower()), _FULL_CHECK)
    named = _QUOTED_PATH.search(text)
    if named is None:
        unknown = "the message names no path, and `df -h` on that host shows all file systems"
        return "; ".join((check, unknown, *_describe_folders(failure.error_file)))
    path = named[1] or named[2]
    free = _describe_free(path) if failure.error_file else ""
    return f"{path}{f' ({free})' if free else ''}: {check}"


def _describe_folders(error_file: str | None) -> list[str]:
    """Describe the free space of the working directory and the log folder."""
    if error_file is None:
        return []
    folders = [("the log folder", os.path.dirname(error_file))]
    with suppress(OSError):  # it was removed
        folders.insert(0, ("the working directory", os.getcwd()))
    return [f"{name} {folder} has {free}" for name, folder in folders if (free := _describe_free(folder))]


def _describe_free(path: str) -> str:
    """Return the free space of the file system that has this file, or is to have it; "" if it is not known."""
    path = os.path.abspath(path)
    while not os.path.exists(path) and path != os.path.sep:
        path = os.path.dirname(path)
    try:
        found = os.statvfs(path)
    except OSError:
        return ""
    inodes = ", no inodes" if found.f_files and not found.f_favail else ""
    return f"{format_size(found.f_bavail * found.f_frsize, 1)} free{inodes}"
