"""Reads a replica's log from the files that `capture` writes, during the run and afterwards, from any shell."""

import struct
from collections.abc import Iterator
from pathlib import Path

from muster.schedulers.processes.capture import TIMES_RECORD, log_path, read_notice, times_path
from muster.schedulers.supervision.file_watch import Watch


class FileSource:
    """A `lines.ByteSource`: one stream of a replica, see `capture`. Times are exact to about 0.01 s.

    Args:
        folder: the replica's.
        stream: stdout, stderr or combined.
        also: folders in which a file changes when the app ends.
    """

    def __init__(self, folder: Path, stream: str, *also: Path) -> None:
        self._folder = folder
        self._stream = stream
        self._also = also
        self._path = log_path(folder, stream)
        self._watch = Watch(folder, *also)
        self._exists = False

    def find_size(self) -> int | None:
        """See `ByteSource`."""
        try:
            size = self._path.stat().st_size
        except OSError:
            return None
        if not self._exists:  # its folder could not be watched earlier
            self._exists = True
            self._watch.close()
            self._watch = Watch(self._folder, *self._also)
        return size

    def read(self, offset: int, limit_bytes: int) -> bytes:
        """See `ByteSource`."""
        try:
            with open(self._path, "rb") as file:
                file.seek(offset)
                return file.read(limit_bytes)
        except FileNotFoundError:  # the app has been deleted
            return b""

    def find_offset(self, time_s: float, *, after: bool) -> int | None:
        """See `ByteSource`."""
        try:
            content = times_path(self._folder, self._stream).read_bytes()
        except FileNotFoundError:
            return None
        whole = len(content) - len(content) % TIMES_RECORD.size
        rows: Iterator[tuple[float, int]] = struct.iter_unpack(TIMES_RECORD.format, content[:whole])
        return next((offset for at_s, offset in rows if at_s > time_s or (at_s == time_s and not after)), None)

    def read_notice(self) -> bytes:
        """See `ByteSource`."""
        return read_notice(self._folder)

    def wait(self, limit_s: float) -> None:
        """See `ByteSource`."""
        self._watch.wait(limit_s)

    def close(self) -> None:
        """See `ByteSource`."""
        self._watch.close()
