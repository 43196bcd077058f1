"""Writes the job's status to `status.json` in the run's folder, as one line.

A status that cannot be written is dropped, because the next one is newer. While the disk does not answer, at most one
waits.
"""

import contextlib
import os
import time
from collections.abc import Callable

from muster._shared.codec import encode
from muster._shared.contract import STATUS_LIMIT_BYTES, LogNames
from muster._shared.job_view import JobStatus
from muster.agent.logs import open_own

_ANOTHERS_S = 20.0


class StatusFile:
    """The status file of one node."""

    def __init__(self, run_dir: str, submit: Callable[[Callable[[], None]], None]) -> None:
        """Write nothing yet.

        Args:
            run_dir: the folder that contains it.
            submit: runs a call in the thread that writes files.
        """
        self._path = os.path.join(run_dir, LogNames.STATUS)
        self._submit = submit
        self._is_writing = False
        """Whether a call waits in the thread."""
        self._own: os.stat_result | None = None
        """The file as the thread last wrote it."""

    def write(self, status: JobStatus, *, is_last: bool = False, gives_way: bool = False) -> None:
        """Replace the file soon. Drop the status while the thread has not written the one before, unless `is_last`.

        Args:
            status: the content.
            is_last: whether it is this agent's last status.
            gives_way: whether another agent knows more and may write into the same folder. While it does, nothing is
                written.
        """
        if self._is_writing and not is_last:
            return
        self._is_writing = True
        text = encode(status, STATUS_LIMIT_BYTES)
        self._submit(lambda: self._replace(f"{text}\n", gives_way=gives_way))

    def _replace(self, text: str, *, gives_way: bool) -> None:
        if not (gives_way and self._is_anothers()):
            _write(self._path, text)
            self._own = _read_stat(self._path)
        self._is_writing = False

    def _is_anothers(self) -> bool:
        """Return whether another agent has recently replaced the file."""
        found = _read_stat(self._path)
        if found is None or (self._own is not None and found.st_ino == self._own.st_ino):
            return False
        return abs(time.time() - found.st_mtime) < _ANOTHERS_S


def _read_stat(path: str) -> os.stat_result | None:
    with contextlib.suppress(OSError):
        return os.stat(path)
    return None


def _write(path: str, text: str) -> None:
    temporary = f"{path}.{os.getpid()}"
    with contextlib.suppress(OSError):
        fd = open_own(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            with open(fd, "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(temporary, path)
        except OSError:  # disk full
            os.unlink(temporary)
