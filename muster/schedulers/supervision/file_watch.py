"""Waits for changes of files without polling them.

Source: inotify(7). If the kernel gives no instance (a user has 128 by default), or files change on another host
(network file systems send no notifications), `wait` still returns, after `MAX_WAIT_S`.
"""

import ctypes
import os
import time

from muster._shared import processes

_IN_MODIFY = 0x2
_IN_ATTRIB = 0x4
_IN_CLOSE_WRITE = 0x8
_IN_MOVED_FROM = 0x40
_IN_MOVED_TO = 0x80
_IN_CREATE = 0x100
_IN_DELETE = 0x200
_IN_DELETE_SELF = 0x400

MAX_WAIT_S = 1.0
FALLBACK_POLL_S = 0.05
"""The poll interval without an inotify instance."""


class Watch:
    """Waits for changes in a few folders. Use as a context manager.

    Args:
        folders: what is in them, not below.
        all_changes: also what goes, and changes of times and modes.
    """

    def __init__(self, *folders: os.PathLike[str], all_changes: bool = False) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd: int = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        self._mask = _IN_MODIFY | _IN_CLOSE_WRITE | _IN_MOVED_TO | _IN_CREATE | _IN_DELETE_SELF
        self._mask |= _IN_ATTRIB | _IN_MOVED_FROM | _IN_DELETE if all_changes else 0
        if self._fd >= 0 and any(self._add(each) < 0 for each in folders):
            self.close()

    def __enter__(self) -> "Watch":  # noqa: PYI034  # typing.Self is Python 3.11
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the instance. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def wait(self, limit_s: float = MAX_WAIT_S) -> None:
        """Return when something changed since the last call, at the latest after `limit_s`."""
        if self.is_active:
            self.has_changed(limit_s)
        else:
            time.sleep(min(FALLBACK_POLL_S, limit_s))

    @property
    def is_active(self) -> bool:
        """Whether the kernel reports changes."""
        return self._fd >= 0

    def has_changed(self, limit_s: float) -> bool:
        """Return whether something has changed since the last call, or does within `limit_s`. Active ones only."""
        if not processes.wait_readable(self._fd, limit_s):
            return False
        os.read(self._fd, 65536)
        return True

    def _add(self, folder: os.PathLike[str]) -> int:
        """Watch one more folder. Returns its number in events; -1: it is gone, or no watches are left."""
        number: int = self._libc.inotify_add_watch(self._fd, os.fsencode(folder), self._mask)
        return number
