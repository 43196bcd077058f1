"""Reads a replica's log from the files that `capture` writes, during the run and afterwards, from any shell."""

import contextlib
import struct
from collections.abc import Generator
from pathlib import Path
from typing import Final

from muster._shared.foreign_files import read_regular
from muster.schedulers.processes.capture import TIMES_RECORD, log_path, times_path
from muster.schedulers.supervision.file_watch import Watch

_TIMES_PIECE_BYTES: Final = 1 << 20


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
        self._rows: Generator[tuple[float, int], None, None] | None = None
        """Times, with the positions of the first bytes that were written then."""
        self._next_row: tuple[float, int] | None = None
        """The first of them that no position has reached."""
        self._at_s: float | None = None

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
            return read_regular(self._path, limit_bytes, offset)
        except FileNotFoundError:  # the app has been deleted
            return b""

    def find_offset(self, time_s: float, *, after: bool) -> int | None:
        """See `ByteSource`."""
        rows = self._read_rows()
        return next((offset for at_s, offset in rows if at_s > time_s or (at_s == time_s and not after)), None)

    def find_time(self, offset: int) -> float | None:
        """See `ByteSource`."""
        if self._rows is None:
            self._rows = self._read_rows()
            self._next_row = next(self._rows, None)
        while self._next_row is not None and self._next_row[1] <= offset:
            self._at_s = self._next_row[0]
            self._next_row = next(self._rows, None)
        return self._at_s

    def _read_rows(self) -> Generator[tuple[float, int], None, None]:
        path, position = times_path(self._folder, self._stream), 0
        with contextlib.suppress(OSError):  # the log is shown without times
            while piece := read_regular(path, _TIMES_PIECE_BYTES, position):
                whole = len(piece) - len(piece) % TIMES_RECORD.size
                for at_s, offset in struct.iter_unpack(TIMES_RECORD.format, piece[:whole]):
                    if not at_s:  # a hole
                        return
                    yield at_s, offset
                if not whole:
                    return
                position += whole

    def wait(self, limit_s: float) -> None:
        """See `ByteSource`."""
        self._watch.wait(limit_s)

    def close(self) -> None:
        """See `ByteSource`."""
        self._watch.close()
        if self._rows is not None:
            self._rows.close()
